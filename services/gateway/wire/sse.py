"""Frames as bytes of a text/event-stream."""

from services.gateway.wire.frames import Frame

# A comment: every client skips it, every proxy counts it as traffic.
KEEP_ALIVE = b": keep-alive\n\n"

# `no-transform` keeps proxies from compressing (and so buffering) the stream; nginx reads the last one.
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


def to_bytes(frame: Frame) -> bytes:
    """The frame as the wire has it, ended by its blank line. Data is JSON, which holds no line break."""
    if frame.id:
        return b"id: %b\nevent: %b\ndata: %b\n\n" % frame
    return b"event: %b\ndata: %b\n\n" % (frame.event, frame.data)
