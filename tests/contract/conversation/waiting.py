"""Runs that wait, as tests make them and look at them."""

from collections.abc import Sequence

from tests.contract.conversation.harness import Person, Reading, eventually
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import IfRunning, Run, RunOptions

REJECT, ENQUEUE, INTERRUPT = (
    IfRunning.IF_RUNNING_REJECT,
    IfRunning.IF_RUNNING_ENQUEUE,
    IfRunning.IF_RUNNING_INTERRUPT,
)
HELD = "[fake chunks=2 gate=g gate_at=1]"


async def held(person: Person, thread: str, text: str = f"first {HELD}") -> Reading:
    """A run that waits at the gate `g`, with some text."""
    return await person.run(thread, text).until(lambda reading: reading.text)


async def enqueue(person: Person, thread: str, text: str, key: str = "") -> Reading:
    """A run that waits, or has begun when there was nothing to wait for."""
    run = person.run(thread, text, key, if_running=ENQUEUE)
    return await run.until(lambda reading: reading.batches)


async def start(person: Person, thread: str, text: str, key: str = "", if_running: IfRunning = ENQUEUE) -> Run:
    """A run nobody follows."""
    run = api.RunRequest(
        thread_id=thread,
        parts=[ContentPart(text=text)],
        options=RunOptions(if_running=if_running),
        request_id=key,
    )
    found: Run = (await person.call(person.conversation.StartRun, api.StartRunRequest(run=run))).run
    return found


def requests(provider: FakeProvider) -> list[list[str]]:
    """Of each request at the provider, what its messages say."""
    return [[str(message["content"]) for message in call.body["messages"]] for call in provider.calls]


async def texts(person: Person, thread: str) -> list[str]:
    """What the thread's messages say."""
    return [message.text for message in await person.messages(thread)]


async def ended(person: Person, runs: Sequence[str]) -> list[Run]:
    """The runs once all have ended."""

    async def look() -> list[Run] | None:
        found = [await person.get_run(run) for run in runs]
        return found if all(run.HasField("finish_time") for run in found) else None

    return await eventually(look)
