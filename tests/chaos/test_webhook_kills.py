"""kill -9 of a conversation process between a run's end, the delivery and its record: each event arrives, signed."""

import time
from collections.abc import AsyncIterator

import pytest

from services.conversation.limits import WEBHOOK_LEASE_SECONDS
from tests.chaos.figures import FIGURES
from tests.chaos.points import FINISH, WEBHOOK_RECORD, WEBHOOK_TAKE, Point, placed
from tests.chaos.stack import Stack, until
from tests.fakes.receiver import Receiver, running_receiver
from tests.support.http import Client

WEBHOOKS = "/v1/admin/webhooks"
# A lease, and the takeover of a run that was cut.
ARRIVES_SECONDS = WEBHOOK_LEASE_SECONDS + 15.0


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as found:
        yield found


# Most wait for a lease of half a minute: one of them runs every time.
CASES = [
    pytest.param(point, arrives, marks=[] if (point, arrives) == (FINISH, True) else [pytest.mark.long])
    for point in (FINISH, WEBHOOK_TAKE, WEBHOOK_RECORD)
    for arrives in (False, True)
]


@pytest.mark.parametrize(("point", "arrives"), CASES, ids=str)
async def test_an_event_outlives_the_process_that_was_to_tell_it(
    stack: Stack, receiver: Receiver, point: Point, arrives: bool
) -> None:
    """`arrives`: the write at which the process is killed still happens."""
    cluster = stack.cluster
    await cluster.ready()
    name = f"hooks-{point}-{arrives}".replace(" ", "-").lower()
    project = cluster.create_project(name)
    async with stack.client(project=project) as client, Client(cluster.http, {"apikey": project.service_key}) as admin:
        made = await admin.call("POST", WEBHOOKS, {"url": receiver.url, "events": ["run.finished", "run.failed"]})
        deliveries = f"{WEBHOOKS}/{made['webhook']['id']}/deliveries"
        conversation = await client.insist(client.create_conversation)
        async with placed(stack, point) as place:
            body = {"content": place.script, "background": True}
            run = (await client.call("POST", f"/v1/conversations/{conversation}/messages", body))["run_id"]
            await place.held()
            replica, tries = place.replica(), len(receiver.got)
            killed = time.monotonic()
            cluster.kill("conversation", replica)
            place.let_go(arrives)
            assert tries == (1 if point is WEBHOOK_RECORD else 0)
            query = "SELECT state FROM conversation.webhook_deliveries WHERE run_id = %s"
            await until(lambda: stack.record.rows(query, run) == [("delivered",)], ARRIVES_SECONDS)
        seconds = time.monotonic() - killed
        (row,) = (await admin.insist(lambda: admin.call("GET", deliveries)))["data"]
    assert (row["run_id"], row["type"], row["state"]) == (run, "run.finished", "delivered")
    assert {got.id for got in receiver.got} == {row["id"]}
    assert all(got.is_signed(made["secret"]) for got in receiver.got)
    assert len(receiver.got) == (2 if point is WEBHOOK_RECORD and not arrives else 1)
    FIGURES[f"kill of a webhook's sender {point}"].add(seconds)
