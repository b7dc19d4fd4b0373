"""A real conversation service in this process, and callers who talk to it over gRPC."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

import psycopg
from grpc import aio

from kit.callers import Caller
from kit.channels import CHANNEL_OPTIONS, call_metadata, to_service_error
from kit.errors import ServiceError
from kit.settings import load
from services.conversation.domain.events import is_terminal, kind_of
from services.conversation.server import serve
from services.conversation.settings import Settings
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1 import project_service_pb2 as projects
from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceStub
from threadloom.conversation.v1.message_pb2 import ContentPart, Message
from threadloom.conversation.v1.project_service_pb2 import Identity, ProviderKey
from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceStub
from threadloom.conversation.v1.relay_service_pb2_grpc import RelayServiceStub
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import Run, RunEventBatch, RunOptions, Trace
from threadloom.conversation.v1.thread_pb2 import Thread
from threadloom.conversation.v1.webhook_service_pb2_grpc import WebhookServiceStub

if TYPE_CHECKING:
    from tests.contract.conversation.books import Books

CREDENTIAL = "service-credential-of-tests"
PROVIDER_KEY = "key-of-tests"
# Entries of THREADLOOM_SECRET_KEYS.
RING_1 = "k1:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
RING_2 = "k2:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="
NO_NATS = "nats://127.0.0.1:1"
START_SECONDS = 10.0
WAIT_SECONDS = 10.0
POLL_SECONDS = 0.01

Found = TypeVar("Found")
Response = TypeVar("Response")


async def eventually(look: Callable[[], Awaitable[Found]], seconds: float = WAIT_SECONDS) -> Found:
    """What `look` finds once it is true of something."""
    deadline = time.monotonic() + seconds
    while True:
        found = await look()
        if found:
            return found
        assert time.monotonic() < deadline, f"not so after {seconds} s; last: {found!r}"
        await asyncio.sleep(POLL_SECONDS)


class Sql:
    """The database as its superuser sees it."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Every row."""
        cursor = await self._connection.execute(query.encode(), arguments)
        return await cursor.fetchall() if cursor.description else []

    async def value(self, query: str, *arguments: object) -> Any:
        """The first column of the only row."""
        ((found, *_),) = await self.rows(query, *arguments)
        return found

    async def tables(self) -> list[str]:
        """Every table of the service's schema."""
        query = (
            "SELECT table_name FROM information_schema.tables"
            " WHERE table_schema = 'conversation' AND table_type = 'BASE TABLE' ORDER BY 1"
        )
        return [name for (name,) in await self.rows(query)]

    async def contents(self) -> dict[str, list[str]]:
        """All rows of all tables as text, but of those that change by themselves."""
        names = [name for name in await self.tables() if name not in ("workers", "outbox", "schema_version")]
        queries = {name: f"SELECT t::text FROM conversation.{name} t ORDER BY 1" for name in names}
        return {name: [row for (row,) in await self.rows(query)] for name, query in queries.items()}


class Stream(ABC):
    """A stream that is read in the background. `error` is set when it failed."""

    def __init__(self, call: Any) -> None:
        self.error: ServiceError | None = None
        self._call = call
        self._grown = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    @abstractmethod
    def _take(self, response: Any) -> None:
        """Keeps what was read."""

    async def until(self, holds: Callable[[Self], object], seconds: float = WAIT_SECONDS) -> Self:
        """Waits until something holds of what was read."""
        async with asyncio.timeout(seconds):
            while not holds(self):
                assert not self.task.done(), f"ended before: {self.error or self}"
                self._grown.clear()
                await self._grown.wait()
        return self

    async def ended(self, seconds: float = WAIT_SECONDS) -> ServiceError | None:
        """The error the stream ended with, None when there was none."""
        await asyncio.wait_for(asyncio.shield(self.task), seconds)
        return self.error

    async def leave(self) -> None:
        """Goes away, as a client does that closes its connection."""
        self._call.cancel()
        await asyncio.wait({self.task})

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
                self._grown.set()
        except aio.AioRpcError as error:
            self.error = to_service_error(error)
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        finally:
            self._grown.set()


class Reading(Stream):
    """A run's stream. `events` and `batches` grow."""

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        self.events: list[RunEvent] = []
        self.batches: list[RunEventBatch] = []

    def __str__(self) -> str:
        return ", ".join(self.kinds)

    @property
    def run_id(self) -> str:
        """The run the batches say they are of."""
        return self.batches[0].run_id

    @property
    def kinds(self) -> list[str]:
        """What happened so far, in short."""
        return [kind_of(event) for event in self.events]

    @property
    def text(self) -> str:
        """The reply's text so far, superseded text left out."""
        return text_of(self.events)

    @property
    def is_over(self) -> bool:
        """Whether the terminal event came."""
        return bool(self.events) and is_terminal(self.events[-1])

    async def end(self, seconds: float = WAIT_SECONDS) -> Self:
        """Waits for the stream's end; raises the error it ended with."""
        error = await self.ended(seconds)
        if error is not None:
            raise error
        return self

    async def refusal(self, seconds: float = WAIT_SECONDS) -> ServiceError:
        """The error the stream ends with."""
        error = await self.ended(seconds)
        assert error is not None, f"no error but {self}"
        return error

    def _take(self, response: Any) -> None:
        self.batches.append(response.batch)
        self.events += response.batch.events


def text_of(events: Sequence[RunEvent], start: str = "") -> str:
    """The text events lead to, after a text that was there before."""
    text = start
    for event in events:
        if event.HasField("text_delta"):
            text += event.text_delta.text
        elif event.HasField("step_superseded"):
            text = text[: event.step_superseded.kept_chars]
    return text


class Person:
    """A caller at one service."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        self.caller = caller
        self.metadata = call_metadata(CREDENTIAL, caller, "request-of-tests")
        self.conversation = ConversationServiceStub(channel)
        self.projects = ProjectServiceStub(channel)
        self.relay = RelayServiceStub(channel)
        self.webhooks = WebhookServiceStub(channel)

    async def call(self, method: Callable[..., Any], request: object) -> Any:
        """The answer of a unary method; raises the ServiceError it was refused with."""
        try:
            return await method(request, metadata=self.metadata, timeout=WAIT_SECONDS)
        except aio.AioRpcError as error:
            raise to_service_error(error) from error

    async def thread(self, **fields: Any) -> str:
        """A new thread's id."""
        answer = await self.call(self.conversation.CreateThread, api.CreateThreadRequest(**fields))
        return str(answer.thread.id)

    async def get_thread(self, thread: str) -> Thread:
        """The thread."""
        answer = await self.call(self.conversation.GetThread, api.GetThreadRequest(thread_id=thread))
        found: Thread = answer.thread
        return found

    def run(self, thread: str, text: str | Sequence[str], key: str = "", **options: Any) -> Reading:
        """Sends a message and reads its run."""
        texts = [text] if isinstance(text, str) else text
        return self.send(
            api.RunRequest(
                thread_id=thread,
                parts=[ContentPart(text=part) for part in texts],
                options=RunOptions(**options),
                request_id=key,
            )
        )

    def send(self, request: api.RunRequest) -> Reading:
        """Sends a message as it is given and reads its run."""
        return Reading(self.conversation.Run(request, metadata=self.metadata))

    def follow(self, run: str, after: int = 0, thread: str = "") -> Reading:
        """Follows a run."""
        request = api.FollowRequest(run_id=run, after_seq=after, thread_id=thread)
        return Reading(self.conversation.Follow(request, metadata=self.metadata))

    async def set_provider_key(self, key: str, project: str = "") -> ProviderKey:
        """Sets the project's key of the provider."""
        request = projects.SetProviderKeyRequest(project_id=project, provider="openai", api_key=key)
        found: ProviderKey = (await self.call(self.projects.SetProviderKey, request)).provider_key
        return found

    async def delete_provider_key(self, project: str = "") -> None:
        """Removes it."""
        request = projects.DeleteProviderKeyRequest(project_id=project, provider="openai")
        await self.call(self.projects.DeleteProviderKey, request)

    async def provider_keys(self, project: str = "") -> list[ProviderKey]:
        """Which keys there are."""
        request = projects.ListProviderKeysRequest(project_id=project)
        return list((await self.call(self.projects.ListProviderKeys, request)).provider_keys)

    async def set_identity(self, identity: Identity, project: str = "") -> Identity:
        """Sets how tokens of the project's identity provider are verified."""
        request = projects.SetIdentityRequest(project_id=project, identity=identity)
        found: Identity = (await self.call(self.projects.SetIdentity, request)).identity
        return found

    async def identity(self, project: str = "") -> Identity:
        """What is set."""
        request = projects.GetIdentityRequest(project_id=project)
        found: Identity = (await self.call(self.projects.GetIdentity, request)).identity
        return found

    async def delete_identity(self, project: str = "") -> None:
        """Removes it."""
        await self.call(self.projects.DeleteIdentity, projects.DeleteIdentityRequest(project_id=project))

    async def cancel(self, run: str) -> Run:
        """Cancels a run."""
        answer = await self.call(self.conversation.CancelRun, api.CancelRunRequest(run_id=run))
        found: Run = answer.run
        return found

    async def get_run(self, run: str) -> Run:
        """The run."""
        answer = await self.call(self.conversation.GetRun, api.GetRunRequest(run_id=run))
        found: Run = answer.run
        return found

    async def delete(self, thread: str) -> None:
        """Deletes the thread."""
        await self.call(self.conversation.DeleteThread, api.DeleteThreadRequest(thread_id=thread))

    async def messages(self, thread: str) -> list[Message]:
        """All messages."""
        request = api.ListMessagesRequest(thread_id=thread, page_size=200)
        return list((await self.call(self.conversation.ListMessages, request)).messages)

    async def reply(self, thread: str) -> Message:
        """The newest message, which must be a reply."""
        found = (await self.messages(thread))[-1]
        assert not found.parts, "the newest message is a user's"
        return found

    async def traces(self, thread: str) -> list[Trace]:
        """All traces."""
        request = api.ListTracesRequest(thread_id=thread, page_size=500)
        return list((await self.call(self.conversation.ListTraces, request)).traces)


class Service:
    """One running service; `people` makes callers of it."""

    def __init__(
        self,
        port: int,
        stopped: asyncio.Event,
        task: asyncio.Task[None],
        callers: dict[str, Caller],
        books: "Books | None" = None,
    ) -> None:
        self.address = f"127.0.0.1:{port}"
        self.channel = aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stopped, self._task, self._books = stopped, task, books
        people = {name: Person(self.channel, caller) for name, caller in callers.items()}
        self.people = people
        self.alice, self.bob, self.role, self.system = (people[n] for n in ("alice", "bob", "role", "system"))

    @property
    def books(self) -> "Books":
        """The billing service it asks."""
        assert self._books is not None
        return self._books

    def ask_to_stop(self) -> None:
        """What SIGTERM does: it drains."""
        self._stopped.set()

    async def stop(self) -> None:
        """An orderly stop, also of one that was stopped before."""
        await self.channel.close()
        self.ask_to_stop()
        await asyncio.wait_for(self._task, START_SECONDS)


class Launcher:
    """Starts services on one database and stops them all."""

    def __init__(self, environ: dict[str, str], callers: dict[str, Caller], books: "Books | None" = None) -> None:
        self._environ, self._callers, self._books = environ, callers, books
        self._services: list[Service] = []

    async def __call__(self, **environ: str) -> Service:
        """A further service; arguments are environment variables."""
        settings = load(Settings, self._environ | environ)
        stopped, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(settings, stopped, ready))
        await asyncio.wait({task, ready}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        service = Service(await ready, stopped, task, self._callers, self._books)
        self._services.append(service)
        return service

    async def close(self) -> None:
        """Stops every service."""
        await asyncio.gather(*(service.stop() for service in self._services))


async def connected(admin_url: str) -> AsyncIterator[Sql]:
    """A connection of the superuser."""
    async with await psycopg.AsyncConnection.connect(admin_url, autocommit=True) as connection:
        yield Sql(connection)


def project_id(caller: Caller) -> UUID:
    """The caller's project, which it must have."""
    assert caller.project is not None
    return caller.project
