"""kill -9 of an owner while messages wait for its answer: the queue goes on elsewhere, each is answered once."""

import time

import pytest

from tests.chaos.figures import FIGURES
from tests.chaos.points import CLAIM, FINISH, MID_TEXT, Point, placed
from tests.chaos.stack import Stack, until
from tests.support.http import Client

WAITING = 2
END_SECONDS = 20.0


async def start(client: Client, conversation: str, content: str) -> str:
    """The id of a run that is started without following it, and waits when another one runs."""
    body = {"content": content, "background": True, "if_running": "enqueue"}
    made = await client.call("POST", f"/v1/conversations/{conversation}/messages", body)
    return str(made["run_id"])


FAST = ((FINISH, False), (CLAIM, True))  # the others are long: each waits for a takeover
CASES = [
    pytest.param(
        point, arrives, marks=[] if (point, arrives) in ((FINISH, False), (CLAIM, True)) else [pytest.mark.long]
    )
    for point in (MID_TEXT, FINISH, CLAIM)
    for arrives in (False, True)
]


@pytest.mark.parametrize(("point", "arrives"), CASES, ids=str)
async def test_a_queue_outlives_its_owner(stack: Stack, point: Point, arrives: bool) -> None:
    """`arrives`: the write at which the owner is killed still happens."""
    cluster = stack.cluster
    await cluster.ready()
    unseen = stack.record.check_ledger(stack.provider.calls)
    async with stack.client() as client:
        conversation = await client.insist(client.create_conversation)
        async with placed(stack, point) as place:
            asked = [place.script, *(f"{number} [fake chunks=2]" for number in range(WAITING))]
            runs = [await start(client, conversation, text) for text in asked]
            await place.held()
            owner = place.replica()
            killed = time.monotonic()
            cluster.kill("conversation", owner)
            place.let_go(arrives)
            await until_ended(stack, runs)
        seconds = time.monotonic() - killed
        messages = await client.insist(lambda: client.messages(conversation))
    assert [message["content"] for message in messages if message["role"] == "user"] == asked
    assert [message["status"] for message in messages] == ["complete"] * (2 * len(asked))
    assert [message["run_id"] for message in messages[::2]] == runs
    rows = stack.record.rows("SELECT status FROM conversation.ai_runs WHERE id::text = ANY(%s)", runs)
    assert rows == [("succeeded",)] * len(runs)
    stack.record.check_at_rest()
    unseen = stack.record.check_ledger(stack.provider.calls) - unseen
    FIGURES[f"kill with a queue {point}"].add(seconds, calls_the_provider_never_saw=unseen)


async def until_ended(stack: Stack, runs: list[str]) -> None:
    query = "SELECT count(*) FROM conversation.ai_runs WHERE id::text = ANY(%s) AND finished_at IS NOT NULL"
    await until(lambda: stack.record.rows(query, runs) == [(len(runs),)], END_SECONDS)
