"""A conversation replica at transport level: a real gRPC server whose answers a test writes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from kit.callers import Caller, current_caller
from kit.errors import ServiceError, not_found, unauthenticated
from kit.serving import Server
from services.conversation.relaying import RelaySession
from threadloom.conversation.v1 import (
    conversation_service_pb2 as pb,
)
from threadloom.conversation.v1 import (
    conversation_service_pb2_grpc,
    project_service_pb2_grpc,
    relay_service_pb2,
    relay_service_pb2_grpc,
)
from threadloom.conversation.v1.project_service_pb2 import (
    CreateStreamTicketRequest,
    CreateStreamTicketResponse,
    DeleteIdentityRequest,
    DeleteIdentityResponse,
    DeleteProviderKeyRequest,
    DeleteProviderKeyResponse,
    Identity,
    KeyKind,
    Project,
    ProviderKey,
    RedeemStreamTicketRequest,
    RedeemStreamTicketResponse,
    ResolveProjectRequest,
    ResolveProjectResponse,
    SetIdentityRequest,
    SetIdentityResponse,
    SetProviderKeyRequest,
    SetProviderKeyResponse,
)
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import RUN_STATUS_RUNNING, Run, RunEventBatch
from threadloom.conversation.v1.thread_pb2 import Thread

CREDENTIAL = "service-credential-for-tests"
THREAD_ID = "01900000-0000-7000-8000-00000000000a"
RUN_ID = "01900000-0000-7000-8000-000000000001"
MESSAGE_ID = "01900000-0000-7000-8000-000000000002"
PROJECT_ID = "01900000-0000-7000-8000-0000000000f1"
SECRET = "a-secret-of-the-project-that-is-long-enough-for-hs256"
ANON, SERVICE, OTHER_SERVICE = "anon-key", "service-key", "service-key-of-other"

Batches = AsyncIterator[RunEventBatch]
Script = Callable[[Any], Batches]

PROJECTS = {
    "acme": Project(id=PROJECT_ID, slug="acme", jwt_secret=SECRET),
    "other": Project(id="01900000-0000-7000-8000-0000000000f2", slug="other", jwt_secret="another-" + SECRET),
}
KEYS = {
    ANON: ("acme", KeyKind.KEY_KIND_ANON),
    SERVICE: ("acme", KeyKind.KEY_KIND_SERVICE),
    OTHER_SERVICE: ("other", KeyKind.KEY_KIND_SERVICE),
}


def delta(seq: int, text: str = "") -> RunEvent:
    """Text of the reply; by default its own seq."""
    event = RunEvent(seq=seq)
    event.text_delta.text = text or f"{seq} "
    return event


def started(seq: int) -> RunEvent:
    """The provider answered."""
    event = RunEvent(seq=seq)
    event.reply_started.model = "m"
    return event


def finished(seq: int) -> RunEvent:
    """The end."""
    event = RunEvent(seq=seq)
    event.run_finished.finish_reason = "stop"
    return event


def batch(*events: RunEvent, last_seq: int = 0) -> RunEventBatch:
    """A batch of the test's run."""
    return RunEventBatch(
        run_id=RUN_ID,
        thread_id=THREAD_ID,
        message_id=MESSAGE_ID,
        events=events,
        last_seq=events[-1].seq if events else last_seq,
    )


def play(*steps: RunEventBatch | Exception | float) -> Script:
    """A script: batches to send, pauses in seconds, at last perhaps an error."""

    async def script(_: Any) -> Batches:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, RunEventBatch):
                yield step
            else:
                await asyncio.sleep(step)

    return script


class Replica(
    conversation_service_pb2_grpc.ConversationServiceServicer,
    project_service_pb2_grpc.ProjectServiceServicer,
    relay_service_pb2_grpc.RelayServiceServicer,
):
    """Answers as the test says, and remembers what it was asked."""

    def __init__(self, run: Script | None = None, follow: Script | None = None) -> None:
        self.run, self.follow = run or play(not_found("run")), follow or play(not_found("run"))
        self.runs: list[pb.RunRequest] = []
        self.follows: list[pb.FollowRequest] = []
        self.callers: list[Caller] = []
        self.requests: list[Any] = []
        self.resolves = 0
        self.identities: dict[str, Identity] = {}  # by slug
        self.failure: ServiceError | None = None
        self.tickets: set[str] = set()
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = Server(CREDENTIAL, ["threadloom.conversation.v1.ConversationService"])
        conversation_service_pb2_grpc.add_ConversationServiceServicer_to_server(self, self._server.grpc)
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(self, self._server.grpc)
        relay_service_pb2_grpc.add_RelayServiceServicer_to_server(self, self._server.grpc)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Ends at once, calls under way included."""
        await self._server.stop(0)

    async def set_serving(self, serving: bool) -> None:
        """What its health says."""
        await self._server.set_serving(serving)

    async def Relay(  # type: ignore[override]
        self, request_iterator: AsyncIterator[relay_service_pb2.RelayRequest], _: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[relay_service_pb2.RelayResponse]:
        async for response in RelaySession(self._start, self._follow).serve(request_iterator):
            yield response

    async def _start(self, request: pb.RunRequest) -> Batches:
        self.runs.append(request)
        self._note(request)
        async for found in self._play(self.run, request):
            yield found

    async def _follow(self, request: pb.FollowRequest) -> Batches:
        self.follows.append(request)
        self._note(request)
        async for found in self._play(self.follow, request):
            yield found

    async def _play(self, script: Script, request: Any) -> Batches:
        try:
            async for found in script(request):
                yield found
        except (asyncio.CancelledError, GeneratorExit):  # while it waited, or while a batch was being sent
            self.cancelled.set()
            raise

    def _note(self, request: Any) -> None:
        self.requests.append(request)
        self.asked.set()
        self.callers.append(current_caller.get())
        if self.failure is not None:
            raise self.failure

    async def CreateThread(self, request: pb.CreateThreadRequest, _: Any) -> pb.CreateThreadResponse:  # type: ignore[override]
        self._note(request)
        return pb.CreateThreadResponse(thread=_thread(request.title))

    async def ListThreads(self, request: pb.ListThreadsRequest, _: Any) -> pb.ListThreadsResponse:  # type: ignore[override]
        self._note(request)
        return pb.ListThreadsResponse(threads=[_thread("")], next_page_token="more")

    async def GetThread(self, request: pb.GetThreadRequest, _: Any) -> pb.GetThreadResponse:  # type: ignore[override]
        self._note(request)
        return pb.GetThreadResponse(thread=_thread("Title"))

    async def UpdateThread(self, request: pb.UpdateThreadRequest, _: Any) -> pb.UpdateThreadResponse:  # type: ignore[override]
        self._note(request)
        return pb.UpdateThreadResponse(thread=_thread(request.title))

    async def DeleteThread(self, request: pb.DeleteThreadRequest, _: Any) -> pb.DeleteThreadResponse:  # type: ignore[override]
        self._note(request)
        return pb.DeleteThreadResponse()

    async def ListMessages(self, request: pb.ListMessagesRequest, _: Any) -> pb.ListMessagesResponse:  # type: ignore[override]
        self._note(request)
        return pb.ListMessagesResponse()

    async def ListTraces(self, request: pb.ListTracesRequest, _: Any) -> pb.ListTracesResponse:  # type: ignore[override]
        self._note(request)
        return pb.ListTracesResponse()

    async def CancelRun(self, request: pb.CancelRunRequest, _: Any) -> pb.CancelRunResponse:  # type: ignore[override]
        self._note(request)
        return pb.CancelRunResponse(run=Run(id=RUN_ID, thread_id=THREAD_ID, status=RUN_STATUS_RUNNING))

    async def ResolveProject(self, request: ResolveProjectRequest, _: Any) -> ResolveProjectResponse:  # type: ignore[override]
        self.resolves += 1
        slug, kind = request.slug, KeyKind.KEY_KIND_UNSPECIFIED
        if request.WhichOneof("by") == "key":
            slug, kind = KEYS.get(request.key, ("", kind))
        if slug not in PROJECTS:
            raise not_found("project")
        project = Project()
        project.CopyFrom(PROJECTS[slug])
        if slug in self.identities:
            project.identity.CopyFrom(self.identities[slug])
        return ResolveProjectResponse(project=project, key_kind=kind)

    async def SetIdentity(self, request: SetIdentityRequest, _: Any) -> SetIdentityResponse:  # type: ignore[override]
        self._note(request)
        kept = Identity()
        kept.CopyFrom(request.identity)
        kept.update_time.FromSeconds(60)
        return SetIdentityResponse(identity=kept)

    async def DeleteIdentity(self, request: DeleteIdentityRequest, _: Any) -> DeleteIdentityResponse:  # type: ignore[override]
        self._note(request)
        return DeleteIdentityResponse()

    async def SetProviderKey(self, request: SetProviderKeyRequest, _: Any) -> SetProviderKeyResponse:  # type: ignore[override]
        self._note(request)
        kept = ProviderKey(provider=request.provider, update_time=Timestamp(seconds=60))
        return SetProviderKeyResponse(provider_key=kept)

    async def DeleteProviderKey(  # type: ignore[override]
        self, request: DeleteProviderKeyRequest, _: Any
    ) -> DeleteProviderKeyResponse:
        self._note(request)
        return DeleteProviderKeyResponse()

    async def CreateStreamTicket(  # type: ignore[override]
        self, request: CreateStreamTicketRequest, _: Any
    ) -> CreateStreamTicketResponse:
        self._note(request)
        self.tickets.add("a-ticket")
        return CreateStreamTicketResponse(ticket="a-ticket", expire_time=Timestamp(seconds=60))

    async def RedeemStreamTicket(  # type: ignore[override]
        self, request: RedeemStreamTicketRequest, _: Any
    ) -> RedeemStreamTicketResponse:
        if request.ticket not in self.tickets:
            raise unauthenticated("This ticket is unknown, used or expired.")
        self.tickets.discard(request.ticket)
        return RedeemStreamTicketResponse(project_id=PROJECT_ID, user_id="alice", role="user")


def _thread(title: str) -> Thread:
    stamp = Timestamp(seconds=1_772_359_200, nanos=5_000)
    return Thread(id=THREAD_ID, user_id="alice", title=title, create_time=stamp, update_time=stamp)
