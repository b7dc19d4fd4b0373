"""Plays one script: paces the answer's deltas, waits at gates, and fails where the script says so."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Literal

from tests.fakes.calls import Call
from tests.fakes.connection import LAST_CHUNK, Connection, chunk, response_head
from tests.fakes.replies import GARBAGE, Events, Reply, error_body, error_event, render_events, reply_body, to_json
from tests.fakes.script import Script

# An answer without pauses leaves in writes of about this size, so that a load test measures its own client.
BATCH_BYTES = 256 * 1024
FAILURE = "this failure was asked for by the script"

Fault = Literal["cut", "close", "hang", "error_at"]
FAULTS: tuple[Fault, ...] = ("cut", "close", "hang", "error_at")


def failure(script: Script, call: Call) -> str:
    """What an error says; with `leak` it quotes the key behind so many characters, as providers do."""
    if not script.leak:
        return FAILURE
    key = call.headers.get("authorization", "").removeprefix("Bearer ")
    return f"{'.' * script.leak} Incorrect API key provided: '{key}'."


class Gates:
    """Named barriers. A gate once opened stays open until `close_all`."""

    def __init__(self) -> None:
        self._gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def open(self, name: str) -> None:
        self._gates[name].set()

    def close_all(self) -> None:
        self._gates.clear()

    async def wait(self, name: str, call: Call) -> None:
        gate = self._gates[name]
        if not gate.is_set():
            call.hold(name)
            await gate.wait()
            call.hold("")


def first_fault(script: Script, deltas: int) -> tuple[Fault | None, int]:
    """The fault that comes first and how many deltas go before it; a place past the end is never reached."""
    places = [(place, fault) for fault in FAULTS if (place := getattr(script, fault)) is not None and place <= deltas]
    place, fault = min(places, default=(deltas, None))
    return fault, max(place, 0)


async def silence() -> None:
    """Say nothing more; the client's leaving or the provider's end cancels this."""
    await asyncio.Event().wait()


def refuse(
    connection: Connection, call: Call, status: int, body: object, headers: dict[str, str] | None = None
) -> None:
    connection.write_json(status, body, headers)
    call.answer(status)
    call.end("refused")


async def play(script: Script, reply: Reply, stream: bool, connection: Connection, call: Call, gates: Gates) -> None:
    """Answer `call`; returns when its part of the connection is done."""
    connection.call, connection.ignores_close = call, bool(script.ignore_close)
    if script.error:
        await asyncio.sleep(script.first / 1000)
        wait_hint = {"retry-after": script.retry_after} if script.retry_after else {}
        kind = "rate_limit_exceeded" if script.error == 429 else "server_error"
        refuse(connection, call, script.error, error_body(failure(script, call), kind), wait_hint)
        return
    if script.hang is not None and script.hang < 0:
        await silence()
    events = render_events(reply, script)
    player = StreamPlayer(script, events, connection, call, gates)
    if stream:
        await player.play()
    else:
        await _play_whole(script, reply, events, connection, call, gates)


async def _play_whole(
    script: Script, reply: Reply, events: Events, connection: Connection, call: Call, gates: Gates
) -> None:
    """One JSON body, after as long as its stream would have taken. A place of a fault does not matter here."""
    fault, _ = first_fault(script, len(events.deltas))
    if script.gate:
        await gates.wait(script.gate, call)
    await asyncio.sleep((script.first + script.delay * max(len(events.deltas) - 1, 0)) / 1000)
    if fault == "hang":
        await silence()
    if fault == "error_at":
        refuse(connection, call, 500, error_body(failure(script, call), "server_error"))
        return
    data = GARBAGE.encode() if script.garbage_at is not None else to_json(reply_body(reply))
    head = response_head(200, {"content-type": "application/json", "content-length": str(len(data))})
    call.answer(200)
    if fault is not None:
        connection.write(head + data[: len(data) // 2])
        await _end_early(fault, connection, call)
        return
    connection.write(head)
    await _write_pieces(connection, data, script.split)
    call.send(events.texts)
    _finish(call)


def _finish(call: Call) -> None:
    """With `ignore_close` an answer gets this far though its reader is gone."""
    call.end("finished" if call.client_closed is None else "closed_by_client")


async def _write_pieces(connection: Connection, data: bytes, size: int, chunked: bool = False) -> None:
    """Write `size` bytes at a time (0: all), each in a segment, and as a chunk, of its own."""
    for at in range(0, len(data), size or len(data) or 1):
        piece = data[at : at + size] if size else data
        connection.write(chunk(piece) if chunked else piece)
        if size:
            await asyncio.sleep(0)  # the loop gathers the writes of one round into one segment


async def _end_early(fault: Fault, connection: Connection, call: Call) -> None:
    if fault == "cut":
        await connection.reset()
    else:
        connection.close()
    call.end("cut")


class StreamPlayer:
    """Sends one streamed answer. Delta i is due at `start + i * delay`, however late the ones before it were."""

    def __init__(self, script: Script, events: Events, connection: Connection, call: Call, gates: Gates) -> None:
        self._script = script
        self._events = events
        self._connection = connection
        self._call = call
        self._gates = gates
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._start = 0.0  # loop time at which delta 0 is, or would have been, due

    async def play(self) -> None:
        self._write_head()
        fault, stop = first_fault(self._script, len(self._events.deltas))
        gate_at = min(self._script.gate_at, len(self._events.deltas))
        self._set_start()
        if self._script.gate and gate_at <= stop:
            await self._send_until(gate_at)
            await self._gates.wait(self._script.gate, self._call)
            self._set_start()
        await self._send_until(stop)
        await self._end(fault)

    def _write_head(self) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-request-id": f"req_fake_{self._call.id}",
            "set-cookie": f"fake_session={self._call.id}; path=/",  # as the proxies in front of providers do
            "transfer-encoding": "chunked",
        }
        if self._script.close is not None:
            # Announced, so that the client does not send its next call into the closing connection.
            headers["connection"] = "close"
        self._connection.write(response_head(200, headers))
        self._call.answer(200)

    def _set_start(self) -> None:
        """The schedule begins now, and again after a gate, which holds up all that follows it."""
        before_first = self._script.first / 1000 if self._sent == 0 else 0.0
        self._start = self._loop.time() + before_first - self._sent * self._script.delay / 1000

    async def _send_until(self, stop: int) -> None:
        while self._sent < stop:
            due = await self._due(stop)
            await self._send(due)

    async def _due(self, stop: int) -> int:
        """Wait until at least one delta is due; the number of deltas that should have left by then."""
        delay = self._script.delay / 1000
        wait = self._start + self._sent * delay - self._loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        if delay <= 0:
            return stop
        elapsed = int((self._loop.time() - self._start) / delay) + 1
        return min(stop, max(elapsed, self._sent + 1))

    async def _send(self, until: int) -> None:
        """Write the deltas up to `until`, or as many as fill a batch."""
        begin, size, batch = self._sent, 0, []
        while self._sent < until and size < BATCH_BYTES:
            event = self._events.deltas[self._sent]
            batch.append(event)
            size += len(event)
            self._sent += 1
        if self._script.split:
            await _write_pieces(self._connection, b"".join(batch), self._script.split, chunked=True)
        else:
            self._connection.write(b"".join([chunk(event) for event in batch]))
        self._call.send(self._events.texts[begin : self._sent])
        await self._connection.drained()

    async def _end(self, fault: Fault | None) -> None:
        if fault == "hang":
            await silence()
        if fault == "cut":
            await _end_early(fault, self._connection, self._call)
            return
        last = b""
        if fault is None:
            last = self._events.ending
        elif fault == "error_at":
            last = error_event(failure(self._script, self._call), self._script)
        await _write_pieces(self._connection, last, self._script.split, chunked=True)
        self._connection.write(LAST_CHUNK)
        if fault == "close":
            await _end_early(fault, self._connection, self._call)
        elif fault == "error_at":
            self._call.end("cut")
        else:
            _finish(self._call)
