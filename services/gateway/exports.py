"""A file made while it is sent, so that its size costs no memory."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from kit.errors import ServiceError
from kit.telemetry import log
from services.gateway.middleware import TransferBroken
from services.gateway.transfers import Streams, Transfer


class Export(Transfer):
    """Sends pieces as they are made. A file that cannot be completed is broken off: a clean end would hide the gap."""

    def __init__(
        self,
        streams: Streams,
        pieces: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        reader_stall_seconds: float,
    ) -> None:
        super().__init__(streams)
        self._pieces, self._headers, self._reader_stall_seconds = pieces, headers, reader_stall_seconds

    async def serve(self) -> None:
        """Sends the file. Raises TransferBroken."""
        await self.start([(name.encode(), value.encode()) for name, value in self._headers.items()])
        async with aclosing(self._pieces):
            if self.scope["method"] != "HEAD":
                await self._send_pieces()
        self.is_ending = True
        await self.write(b"")

    async def _send_pieces(self) -> None:
        try:
            async for piece in self._pieces:
                # The next piece is made when this one has room on its way to the reader.
                async with asyncio.timeout(self._reader_stall_seconds):
                    await self.write(piece)
        except ServiceError as error:
            log.warning("export broken", reason=error.reason)
            raise TransferBroken from None
        except TimeoutError:
            log.info("export broken", reason="the reader takes nothing")
            raise TransferBroken from None
