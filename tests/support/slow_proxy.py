"""A TCP proxy that delays, freezes and cuts, to stand between our processes and Postgres or NATS.

It runs in a thread with a loop of its own, so that a test that blocks does not block the traffic.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

from deploy.local.ports import free_port

CHUNK_BYTES = 64 * 1024
# Chunks on their way in one direction of one connection; beyond it the sender is held back.
CHUNKS_MAX = 256
CALL_SECONDS = 5.0


class SlowProxy:
    """A proxy to 127.0.0.1:`target_port`. `port` is where it listens; delays may be changed at any time."""

    def __init__(self, target_port: int, to_server_seconds: float = 0.0, to_client_seconds: float = 0.0) -> None:
        self.target_port = target_port
        self.to_server_seconds = to_server_seconds
        self.to_client_seconds = to_client_seconds
        self.port = free_port()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    def delay(self, seconds: float) -> None:
        """Delays both directions by so much each."""
        self.to_server_seconds = self.to_client_seconds = seconds

    def cut(self) -> None:
        """Resets every connection and refuses new ones until `mend`."""
        self._is_cut = True
        self._run(self._reset())

    def mend(self) -> None:
        """Lets connections through again."""
        self._is_cut = False

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._is_cut:
                return
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(server_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, server_writer, lambda: self.to_server_seconds))
                group.create_task(self._pump(server_reader, writer, lambda: self.to_client_seconds))
            self._drop(server_writer)
        except (OSError, ExceptionGroup):
            pass  # a side that is gone ends the other below
        finally:
            self._drop(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: Any) -> None:
        """Every chunk leaves its delay after it came: latency, not a narrower pipe."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)

        async def deliver() -> None:
            while True:
                due, chunk = await chunks.get()
                await asyncio.sleep(max(due - self._loop.time(), 0.0))
                if not chunk:
                    writer.write_eof()
                    return
                writer.write(chunk)
                await writer.drain()

        async def collect() -> None:
            while True:
                chunk = await reader.read(CHUNK_BYTES)
                await chunks.put((self._loop.time() + delay(), chunk))
                if not chunk:
                    return

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            group.create_task(collect())

    async def _reset(self) -> None:
        for writer in list(self._writers):
            self._drop(writer)

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
