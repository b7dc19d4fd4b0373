"""Two readers drop and resume at random points of a fast answer: nothing is lost, doubled or out of order."""

import asyncio
import random
import time

import pytest

from tests.chaos.figures import FIGURES, SEED
from tests.chaos.record import check_answer, check_order
from tests.chaos.stack import Stack
from tests.support.http import Answer, Client

TOKENS = 2000
READERS = 2
# `c17w1234 `: drops are spread over the whole text.
TOKEN_CHARS = 9
# About one event of the provider's stream, so that its tokens arrive one by one.
EVENT_BYTES = 200


@pytest.mark.parametrize("pace", ["", "delay=1"], ids=["without pause", "a token a millisecond"])
@pytest.mark.parametrize("resumes", [30, pytest.param(200, marks=pytest.mark.long)])
async def test_readers_that_resume_at_random_points_get_the_exact_text(stack: Stack, resumes: int, pace: str) -> None:
    await stack.whole()
    async with stack.client() as client:
        conversation = await client.create_conversation()
        answers = [Answer() for _ in range(READERS)]
        # Where a reader drops: once it has so many characters.
        places = random.Random(SEED)
        drops = [sorted(places.randrange(TOKENS * TOKEN_CHARS) for _ in range(resumes // READERS)) for _ in answers]
        script = f"[fake chunks={TOKENS} split={EVENT_BYTES} {pace}]"
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(read_with_drops(client, conversation, answers[0], drops[0], script=script))
            # From the run's first event, not from "what runs now": without a pause that may be over by then.
            start = f"{(await stack.run_of(conversation)).id}:1.1"
            group.create_task(read_with_drops(client, conversation, answers[1], drops[1], start=start))
        seconds = time.monotonic() - begun
        for answer in answers:
            run = await check_answer(stack.record, client, conversation, answer)
            assert answer.withdrawals == 0
    (call,) = stack.calls_of(run.id)
    assert all(answer.text == call.text for answer in answers)
    connections = sum(answer.connections for answer in answers)
    events = len(stack.record.events(run.id))
    FIGURES[f"{resumes} resumes, {pace or 'without pause'}"].add(seconds, events=events, connections=connections)


async def read_with_drops(
    client: Client, conversation: str, answer: Answer, drops: list[int], *, script: str = "", start: str = ""
) -> None:
    """Reads to the end, leaving at each drop and coming back with the last id.

    A reader that comes back at the very end is told again that this was the end.
    """
    for place in [*drops, None]:
        answer.connections += 1
        opened = (
            client.resume(conversation, answer.last_id or start)
            if answer.last_id or not script
            else client.post(conversation, script, key=conversation)
        )
        async with opened as frames:
            async for frame in frames:
                if answer.end is None or frame != answer.end:
                    answer.add(frame)
                if place is not None and len(answer.text) >= place:
                    break
        check_order(answer)
