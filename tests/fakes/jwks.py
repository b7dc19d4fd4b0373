"""A fake identity provider: an HTTP server with a JWKS document, which can fail in every way, and counts.

Each path is a document of its own; what is not set is 404.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web


@dataclass
class Page:
    """What a path answers. `gate` holds the answer back until it is set; a body may be far too long."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None


class FakeIdentityProvider:
    """Serves on 127.0.0.1 within the loop of the test."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.fetches: Counter[str] = Counter()
        self.asked = asyncio.Event()  # set with each request

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port: int = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def publish(self, name: str, body: bytes, **page: object) -> str:
        """Sets a page; returns its URL."""
        self.pages[f"/{name}"] = Page(body, **page)  # type: ignore[arg-type]
        return self.url(name)

    def hang(self, name: str) -> asyncio.Event:
        """Lets a page answer no more until the gate is set."""
        gate = asyncio.Event()
        page = self.pages[f"/{name}"]
        self.pages[f"/{name}"] = Page(page.body, page.status, page.headers, gate)
        return gate

    def url(self, name: str) -> str:
        """A page's address."""
        return f"http://127.0.0.1:{self.port}/{name}"

    def fetched(self, name: str) -> int:
        """How often a page was asked for."""
        return self.fetches[f"/{name}"]

    async def _answer(self, request: web.Request) -> web.Response:
        self.fetches[request.path] += 1
        self.asked.set()
        page = self.pages.get(request.path, Page(status=404))
        if page.gate is not None:
            await page.gate.wait()
        return web.Response(status=page.status, body=page.body, headers=page.headers)
