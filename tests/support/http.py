"""A small client of the conversations dialect, as a careful browser would be: it resumes what breaks."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from uuid import uuid4

import aiohttp

from tests.support.sse import Frame, FrameReader

T = TypeVar("T")

TERMINAL = ("done", "error")
# Between two attempts: short, since tests want to meet a server that is just coming back.
RETRY_SECONDS = 0.1
CONNECT_SECONDS = 2.0
READ_SECONDS = 30.0
# Worth another try: a replica is away, or its database is.
TRANSIENT = (500, 502, 503, 504)


class Refused(Exception):
    """An HTTP status of 400 or more, with its JSON body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class Broken(Exception):
    """A transfer that ended without a terminal frame."""


@dataclass
class Answer:
    """What a client has seen of a run, over all its connections."""

    frames: list[Frame] = field(default_factory=list)
    text: str = ""
    connections: int = 0

    def add(self, frame: Frame) -> None:
        """Takes a frame in; a withdrawal cuts the text."""
        self.frames.append(frame)
        if frame.event == "delta":
            self.text += frame.data["text"]
        elif frame.event == "withdraw":
            self.text = self.text[: frame.data["keep"]]

    @property
    def ids(self) -> list[str]:
        """The frames' ids in the order they came."""
        return [frame.id for frame in self.frames if frame.id]

    @property
    def last_id(self) -> str:
        """Where to go on; empty before the first frame."""
        return next((frame.id for frame in reversed(self.frames) if frame.id), "")

    @property
    def end(self) -> Frame | None:
        """The terminal frame."""
        return self.frames[-1] if self.frames and self.frames[-1].event in TERMINAL else None

    @property
    def withdrawals(self) -> int:
        """How often text was withdrawn."""
        return sum(frame.event == "withdraw" for frame in self.frames)

    def order(self) -> list[tuple[int, int]]:
        """The ids as numbers (seq, index), to be compared."""
        found = [one.rpartition(":")[2].partition(".") for one in self.ids]
        return [(int(seq), int(index)) for seq, _, index in found]


class Client:
    """One user at one or several gateways; a gateway that fails is left for the next."""

    def __init__(self, addresses: Sequence[str], headers: dict[str, str]) -> None:
        self._addresses, self._headers, self._turn = list(addresses), headers, 0

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        # A new connection each time: a kept one to a killed server fails for reasons a test does not mean.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, connector=connector, read_bufsize=1024 * 1024
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def address(self) -> str:
        """The gateway asked now."""
        return self._addresses[self._turn % len(self._addresses)]

    def turn(self) -> None:
        """Asks the next gateway from now on."""
        self._turn += 1

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """A request and its JSON (None when empty). Raises Refused."""
        async with self._session.request(method, self.address + path, json=body, headers=headers) as response:
            if response.status >= 400:
                raise await _refusal(response)
            return await response.json() if await response.read() else None

    async def text(self, path: str) -> str:
        """A page as it is. Raises Refused."""
        async with self._session.get(self.address + path) as response:
            if response.status >= 400:
                raise await _refusal(response)
            return await response.text()

    async def insist(self, attempt: Callable[[], Awaitable[T]], seconds: float = READ_SECONDS) -> T:
        """Tries until a request is answered while servers come back. Raises what the last attempt raised."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await attempt()
            except (Refused, aiohttp.ClientError, OSError) as error:
                lasting = isinstance(error, Refused) and error.status not in TRANSIENT
                if lasting or time.monotonic() > deadline:
                    raise
                await self._try_elsewhere()

    async def create_conversation(self, **fields: Any) -> str:
        """The id of a new conversation."""
        made = await self.call("POST", "/v1/conversations", fields)
        return str(made["id"])

    async def messages(self, conversation: str) -> list[dict[str, Any]]:
        """The first page of its messages."""
        found = await self.call("GET", f"/v1/conversations/{conversation}/messages")
        items: list[dict[str, Any]] = found["data"]
        return items

    async def cancel(self, conversation: str) -> Any:
        """Cancels its run."""
        return await self.call("POST", f"/v1/conversations/{conversation}/cancel")

    @asynccontextmanager
    async def post(
        self, conversation: str, content: Any, key: str | None = None, **options: Any
    ) -> AsyncIterator[AsyncIterator[Frame]]:
        """Posts a message; gives the frames. Raises Refused; Broken when the transfer breaks."""
        headers = {"Idempotency-Key": key} if key else {}
        path = f"/v1/conversations/{conversation}/messages"
        async with self._stream("POST", path, headers, {"content": content, **options}) as frames:
            yield frames

    @asynccontextmanager
    async def resume(self, conversation: str, last_id: str = "") -> AsyncIterator[AsyncIterator[Frame]]:
        """Goes on after a frame; without an id from the start of the active run. Raises as `post`."""
        headers = {"Last-Event-ID": last_id} if last_id else {}
        async with self._stream("GET", f"/v1/conversations/{conversation}/stream", headers, None) as frames:
            yield frames

    async def ask(self, conversation: str, content: Any, **options: Any) -> Answer:
        """Posts a message and reads the answer over one connection. Raises Refused or Broken."""
        answer = Answer(connections=1)
        async with self.post(conversation, content, **options) as frames:
            async for frame in frames:
                answer.add(frame)
        return answer

    async def follow(self, conversation: str, answer: Answer) -> Answer:
        """Reads the active run from its start to its end over one connection. Raises Refused or Broken."""
        answer.connections += 1
        async with self.resume(conversation) as frames:
            async for frame in frames:
                answer.add(frame)
        return answer

    async def read_to_end(
        self, conversation: str, content: Any, *, seconds: float = 30.0, answer: Answer | None = None, **options: Any
    ) -> Answer:
        """Posts a message and reads to the terminal frame, through any number of broken transfers.

        Before the first frame it posts again with the same Idempotency-Key, afterwards it resumes with its last id.
        `answer` may be watched meanwhile. Raises TimeoutError after `seconds`, Refused for a lasting refusal.
        """
        found, key, deadline = answer or Answer(), str(uuid4()), time.monotonic() + seconds
        while found.end is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no terminal frame in {seconds} s; {len(found.frames)} frames, {found.text!r}")
            found.connections += 1
            opened = (
                self.resume(conversation, found.last_id)
                if found.last_id
                else self.post(conversation, content, key, **options)
            )
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)), opened as frames:
                    async for frame in frames:
                        found.add(frame)
            except Refused as error:
                if error.status not in TRANSIENT:
                    raise
                await self._try_elsewhere()
            except (Broken, aiohttp.ClientError, OSError):  # TimeoutError among them
                await self._try_elsewhere()
        return found

    async def _try_elsewhere(self) -> None:
        self.turn()
        await asyncio.sleep(RETRY_SECONDS)

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, headers: dict[str, str], body: Any
    ) -> AsyncIterator[AsyncIterator[Frame]]:
        async with self._session.request(method, self.address + path, json=body, headers=headers) as response:
            if response.status >= 400:
                raise await _refusal(response)
            yield _frames(response)


async def _frames(response: aiohttp.ClientResponse) -> AsyncIterator[Frame]:
    if response.status == 204:  # nothing runs
        return
    reader = FrameReader()
    try:
        async for received in response.content.iter_any():
            for frame in reader.feed(received):
                yield frame
                if frame.event in TERMINAL:
                    return
    except (aiohttp.ClientError, OSError) as error:
        raise Broken(str(error)) from error
    raise Broken("the stream was closed without a terminal frame")


async def _refusal(response: aiohttp.ClientResponse) -> Refused:
    try:
        body = await response.json(content_type=None)
    except ValueError:
        body = (await response.read()).decode(errors="replace")
    return Refused(response.status, body)
