"""A receiver of webhooks: a real HTTP server that answers as it is told."""

import asyncio
import base64
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from deploy.local.ports import free_port

HANG_SECONDS = 60.0
SLOW_SECONDS = 0.1
BODY = "x" * 100_000  # more than is read of it


@dataclass(frozen=True)
class Got:
    """One try as it came."""

    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes

    @property
    def id(self) -> str:
        """The `webhook-id`."""
        return self.headers["webhook-id"]

    def is_signed(self, secret: str) -> bool:
        """As the standard says, written without our own."""
        key = base64.b64decode(secret.split("_", 1)[1])
        signed = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return self.headers["webhook-signature"] == f"v1,{expected}"


class Receiver:
    """`answers`, by path: one for each try, the last for all that follow.

    A status, `hang`, `slow`, `close` or `redirect`; without any 204.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[int | str]] = {}
        self.got: list[Got] = []
        # Tries under way now and at most, by path.
        self.open: Counter[str] = Counter()
        self.most_open: Counter[str] = Counter()
        self._port = free_port()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address, which stays when it goes away and comes back."""
        return f"http://127.0.0.1:{self._port}"

    async def come(self) -> None:
        """Listens from now on."""
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def leave(self) -> None:
        """Refuses connections from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def at(self, path: str) -> list[Got]:
        """The tries at a path."""
        return [one for one in self.got if one.path == path]

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.path
        self.open[path] += 1
        self.most_open[path] = max(self.most_open[path], self.open[path])
        try:
            return await self._answer(request)
        finally:
            self.open[path] -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append(Got(request.path, headers, await request.read()))
        queue = self.answers.get(request.path, [])
        answer = queue.pop(0) if len(queue) > 1 else queue[0] if queue else 204
        if answer == "hang":
            await asyncio.sleep(HANG_SECONDS)
        if answer == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if answer == "close":
            assert request.transport is not None
            request.transport.close()
        if answer == "redirect":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        return web.Response(status=answer if isinstance(answer, int) else 200, text=BODY)


@asynccontextmanager
async def running_receiver() -> AsyncIterator[Receiver]:
    """A receiver that is there."""
    found = Receiver()
    await found.come()
    try:
        yield found
    finally:
        await found.leave()
