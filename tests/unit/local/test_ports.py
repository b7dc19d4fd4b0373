"""Ports: free, remembered, and whose."""

import os
import socket
from pathlib import Path

from deploy.local.ports import LAST_PORT, PortBook, free_port, is_free
from deploy.local.processes import listener


def test_a_listening_port_is_taken_and_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        assert f"(pid {os.getpid()})" in (listener(port) or "")
    assert is_free(port)
    assert listener(port) is None


def test_free_ports_are_below_the_range_of_outgoing_connections() -> None:
    assert all(free_port() <= LAST_PORT for _ in range(20))


def test_a_port_is_remembered_until_somebody_else_has_it(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    first = PortBook(path).port("gateway-2")
    assert PortBook(path).port("gateway-2") == first
    assert PortBook(path).port("gateway-3") != first
    with socket.create_server(("127.0.0.1", first)):
        second = PortBook(path).port("gateway-2")
    assert second != first
    assert PortBook(path).port("gateway-2") == second
