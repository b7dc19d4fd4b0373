"""What is measured: the provider itself, our own chain, and the peers."""
