"""The wire dialects: how a run's events look to a client.

A dialect is a pure encoder. It gets the canonical events of one run (seq from 1,
no gaps) and gives frames; it has no clock, no randomness, no IO and no request.
Everything it emits comes from the event or from its constructor, and from one
event at a time: nothing is carried from event to event. So a reader can resume at
any frame by feeding only the events from its cursor's seq on.

A frame's id is `{run_id}:{seq}.{k}` for the k-th frame (from 1) of event seq.
Events of a kind the encoder does not know give no frames: a new kind is a
compatible change. Exactly one terminal frame ends a stream.

Dialects: `conversations` (named events).
"""
