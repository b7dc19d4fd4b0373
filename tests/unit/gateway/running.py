"""A gateway that really listens, and a raw client that sees what is on the wire."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
import uvicorn

from kit.outbound import NOTHING_ALLOWED, AllowedHosts
from services.gateway.app import App, create_app
from services.gateway.clients import Clients
from services.gateway.limits import Patience
from services.gateway.serving import listen, make_server
from services.gateway.settings import Settings
from tests.unit.gateway.replica import ANON, CREDENTIAL, SECRET

# So short that a test of a timeout takes a moment, so long that a busy machine does not trip over it.
QUICK = Patience(
    silence=0.4, start_silence=0.4, unreachable=1.0, hold=0.3, keep_alive=0.3, heartbeat=0.1, reader_stall=5.0
)
WAIT_SECONDS = 10.0
# Nobody listens there: ports below 1024 are not given out.
NOWHERE = "127.0.0.1:1"


def token(user: Any = "alice", secret: str = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    """A user's token."""
    subject = {} if user is None else {"sub": user}
    return jwt.encode({**subject, **claims}, secret, algorithm)


ALICE = {"apikey": ANON, "authorization": f"Bearer {token()}"}


@dataclass
class Reply:
    """A response as it was on the wire. `is_whole` is False when the transfer broke."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes]
    is_whole: bool

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Gateway:
    """A gateway on a port of its own."""

    def __init__(self, app: App, port: int) -> None:
        self.app, self.port = app, port

    async def open(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends bytes on a new connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        return reader, writer

    async def raw(self, raw: bytes) -> Reply:
        """Sends bytes, reads one response."""
        reader, writer = await self.open(raw)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await read_reply(reader)
        finally:
            writer.close()

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = ALICE, **more: str
    ) -> Reply:
        """One request. A body that is not bytes goes out as JSON; `more` are headers, `_` for `-`."""
        return await self.raw(request(method, path, body, {**headers, **more}))


def request(method: str, path: str, body: Any = None, headers: Mapping[str, str] = ALICE) -> bytes:
    """A request as bytes."""
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: test", *(f"{n.replace('_', '-')}: {v}" for n, v in headers.items())]
    if body is not None:
        lines.append(f"content-length: {len(sent)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + sent


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value for name, value in pairs}


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk; empty for the last. Raises IncompleteReadError when the transfer breaks."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """A whole response, or what came of it."""
    status, headers = await read_head(reader)
    chunks: list[bytes] = []
    is_whole = True
    try:
        if headers.get("transfer-encoding") == "chunked":
            while chunk := await read_chunk(reader):
                chunks.append(chunk)
        elif length := int(headers.get("content-length", 0)):
            chunks.append(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        is_whole = False
    return Reply(status, headers, b"".join(chunks), chunks, is_whole)


async def _end(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Ends a server at once; its own shutdown takes 0.2 s, too long for some hundred tests."""
    serving.cancel()
    await asyncio.wait({serving})
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=WAIT_SECONDS)


@contextlib.asynccontextmanager
async def running_gateway(
    *addresses: str,
    billing: tuple[str, ...] = (NOWHERE,),
    patience: Patience = QUICK,
    origins: tuple[str, ...] = ("localhost",),
    allowed_hosts: AllowedHosts = NOTHING_ALLOWED,
) -> AsyncIterator[Gateway]:
    """A gateway before these replicas of conversation, and of billing."""
    settings = Settings(("127.0.0.1", 0), addresses, billing, CREDENTIAL, origins, 1.0, "INFO", allowed_hosts)
    clients = Clients(addresses, billing, CREDENTIAL)
    app = create_app(settings, clients, patience)
    sock = listen("127.0.0.1", 0)
    server = make_server(app)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield Gateway(app, sock.getsockname()[1])
    finally:
        await app.drain(0.01)
        await _end(server, serving)
        await app.close()
        await clients.close()
