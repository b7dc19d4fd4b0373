"""One conversation replica asked by gRPC, for what a gateway would leave to chance: which replica answers."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from deploy.local.secret_file import ProjectKeys
from kit.callers import Caller, Role
from kit.channels import Replica, call_metadata
from tests.chaos.stack import Stack
from tests.support.cluster import CREDENTIAL
from threadloom.conversation.v1.conversation_service_pb2 import CancelRunRequest, FollowRequest, RunRequest
from threadloom.conversation.v1.conversation_service_pb2_grpc import ConversationServiceStub
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_event_pb2 import RunEvent


@dataclass
class Direct:
    """A replica and who asks it. `stub` is a ConversationServiceStub."""

    stub: Any
    metadata: tuple[tuple[str, str], ...]

    async def start(self, conversation: str, text: str) -> UUID:
        """Starts a run that this replica owns, and leaves it to its readers."""
        request = RunRequest(thread_id=conversation, parts=[ContentPart(text=text)])
        call = self.stub.Run(request, metadata=self.metadata)
        first = await call.read()
        call.cancel()
        return UUID(first.batch.run_id)

    async def cancel(self, conversation: str) -> None:
        """Cancels the thread's run."""
        await self.stub.CancelRun(CancelRunRequest(thread_id=conversation), metadata=self.metadata)

    async def follow(self, run: UUID) -> list[RunEvent]:
        """The whole run, over one call."""
        call = self.stub.Follow(FollowRequest(run_id=str(run)), metadata=self.metadata)
        return [event async for answer in call for event in answer.batch.events]


@contextlib.asynccontextmanager
async def direct(
    stack: Stack, replica: int, user: str = "alice", project: ProjectKeys | None = None
) -> AsyncIterator[Direct]:
    """A user at one replica, of the project `default` unless another is named."""
    chosen = UUID((project or stack.cluster.project).id)
    at = Replica(stack.cluster.grpc[replica - 1])
    try:
        metadata = call_metadata(CREDENTIAL, Caller(Role.USER, chosen, user), "chaos")
        yield Direct(ConversationServiceStub(at.channel), metadata)
    finally:
        await at.channel.close()
