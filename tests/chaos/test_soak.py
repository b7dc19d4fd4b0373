"""A minute of many clients that post, drop, resume and cancel while replicas are killed: the record stays whole."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.chaos.figures import FIGURES, SEED
from tests.chaos.record import check_order
from tests.chaos.stack import REPLICAS, Stack, until
from tests.support.http import Answer, Broken, Client, Refused

CLIENTS, THREADS = 30, 10
SOAK_SECONDS = 60.0
KILL_EVERY_SECONDS = 10.0
REST_SECONDS = 20.0
# What may meet a client whose server was just killed.
PASSING = (Broken, aiohttp.ClientError, OSError)


@dataclass
class Soak:
    """What all clients share, and what they saw to the end."""

    stack: Stack
    threads: list[str]
    ends_at: float
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """Counts something that happened."""
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def is_over(self) -> bool:
        """Whether nothing new is begun any more."""
        return time.monotonic() > self.ends_at


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_the_record_stays_whole_through_a_minute_of_everything_at_once(supervised: Stack) -> None:
    await supervised.cluster.ready()
    async with supervised.client() as client:
        threads = [await client.create_conversation() for _ in range(THREADS)]
        soak = Soak(supervised, threads, time.monotonic() + SOAK_SECONDS)
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_now_and_then(soak))
            for number in range(CLIENTS):
                group.create_task(be_a_client(soak, client, random.Random(f"{SEED}-{number}")))
        await until(lambda: is_at_rest(supervised), REST_SECONDS)
        await supervised.cluster.ready()
        for thread in threads:
            check_thread(await client.insist(lambda: all_messages(client, thread)), soak)  # noqa: B023
    supervised.record.check_at_rest()
    # A cancel may come between the record of a call and its request, too.
    unseen = supervised.record.check_ledger(supervised.provider.calls, unseen_statuses={"cut", "cancelled"})
    soak.counts["calls_the_provider_never_saw"] = unseen
    FIGURES["soak"].add(SOAK_SECONDS, **soak.counts)
    assert soak.counts["ends"] > CLIENTS


async def kill_now_and_then(soak: Soak) -> None:
    chance = random.Random(SEED)
    while not soak.is_over:
        await asyncio.sleep(KILL_EVERY_SECONDS)
        soak.stack.cluster.settle()
        soak.stack.cluster.kill("conversation", chance.choice(REPLICAS))
        soak.count("kills")


async def be_a_client(soak: Soak, client: Client, chance: random.Random) -> None:
    while not soak.is_over:
        thread = chance.choice(soak.threads)
        try:
            await do_something(soak, client, thread, chance)
        except Refused as refused:
            if refused.status not in (409, 503):
                raise
            soak.count(f"answered_{refused.status}")
            await asyncio.sleep(chance.uniform(0.02, 0.2))
        except PASSING:
            soak.count("broken_transfers")


async def do_something(soak: Soak, client: Client, thread: str, chance: random.Random) -> None:
    match chance.choices(("post", "attach", "cancel"), (6, 3, 1))[0]:
        case "post":
            script = (
                f"[fake chunks={chance.randint(1, 80)} delay={chance.randint(0, 30)} reasoning={chance.randint(0, 5)}]"
            )
            answer = Answer()
            async with client.post(thread, script, key=str(chance.getrandbits(64))) as frames:
                soak.count("posts")
                await read_some(frames, answer, chance)
            await come_back(soak, client, thread, answer, chance)
        case "attach":
            answer = Answer()
            async with client.resume(thread) as frames:
                await read_some(frames, answer, chance)
            await come_back(soak, client, thread, answer, chance)
        case _:
            await client.cancel(thread)
            soak.count("cancels")


async def read_some(frames: Any, answer: Answer, chance: random.Random) -> None:
    """Reads to the end, or drops after some frames."""
    left = chance.choice((0, 1, 5, 30, 10_000))
    async for frame in frames:
        answer.add(frame)
        left -= 1
        if left < 0:
            return


async def come_back(soak: Soak, client: Client, thread: str, answer: Answer, chance: random.Random) -> None:
    """Resumes with the last id until the end, dropping again now and then; some clients never come back."""
    while answer.end is None and answer.last_id and chance.random() < 0.9:
        soak.count("resumes")
        try:
            async with client.resume(thread, answer.last_id) as frames:
                await read_some(frames, answer, chance)
        except (Refused, *PASSING) as error:
            if isinstance(error, Refused) and error.status != 503:
                raise
            soak.count("broken_resumes")
            await asyncio.sleep(chance.uniform(0.02, 0.2))
    if answer.end is not None:
        soak.count("ends")
        soak.answers.setdefault(answer.last_id.partition(":")[0], []).append(answer)


def is_at_rest(stack: Stack) -> bool:
    return stack.record.rows("SELECT id FROM conversation.ai_runs WHERE status = 'running'") == []


async def all_messages(client: Client, thread: str) -> list[dict[str, Any]]:
    found, cursor = [], ""
    while True:
        page = await client.call("GET", f"/v1/conversations/{thread}/messages?limit=200&cursor={cursor}")
        found += page["data"]
        cursor = page["next_cursor"]
        if not cursor:
            return found


def check_thread(messages: list[dict[str, Any]], soak: Soak) -> None:
    """Questions and replies alternate; whoever read a reply to its end has its text."""
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"] * (len(messages) // 2)
    for reply in messages[1::2]:
        assert reply["status"] in ("complete", "cancelled"), reply
        for answer in soak.answers.get(reply["run_id"], []):
            check_order(answer)
            assert answer.text == reply["content"]
            assert answer.end is not None
            assert answer.end.data.get("text", answer.text) == answer.text
    soak.counts["superseded"] = sum(answer.withdrawals for answers in soak.answers.values() for answer in answers[:1])
