"""A way to Postgres that counts the round trips made over it: the Sync and simple Query messages of its clients."""

import asyncio
import struct

FIRST_BYTES = 8
LENGTH_BYTES = 4
PROTOCOL_3 = 3 << 16
# What a client waits for an answer to.
ASKS = (b"S", b"Q")


class WireCounter:
    """A proxy to 127.0.0.1:`target`, listening at `port`, in the loop it was started in."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.trips = 0
        self.port = 0

    async def start(self) -> asyncio.Server:
        """Listens; the caller closes it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(_copy(server_reader, writer))
        try:
            while True:  # asks for encryption and the like, then the start-up message: they have no type
                head = await reader.readexactly(FIRST_BYTES)
                length, code = struct.unpack("!II", head)
                server_writer.write(head + await reader.readexactly(length - FIRST_BYTES))
                if code >> 16 == PROTOCOL_3 >> 16:
                    break
            while True:
                kind, size = await reader.readexactly(1), await reader.readexactly(LENGTH_BYTES)
                body = await reader.readexactly(struct.unpack("!I", size)[0] - LENGTH_BYTES)
                self.trips += kind in ASKS
                server_writer.write(kind + size + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            server_writer.close()
            await back
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
    except ConnectionError:
        pass
    writer.close()
