"""However a provider cuts its bytes, the text is what it said."""

import pytest

from tests.contract.conversation.harness import Service, Sql
from tests.fakes.provider import FakeProvider

# Four scripts, two-, three- and four-byte characters, joiners, and marks that stand on another character.
SCRIPTS = "Grüße 한국어 العَرَبِيَّة हिन्दी 👨‍👩‍👧‍👦🇩🇪\n"
MIB = 1024 * 1024

BYTES = {
    "a byte at a time": {"text": SCRIPTS, "chunks": 7, "split": 1},
    "three bytes at a time": {"text": SCRIPTS, "chunks": 1, "split": 3},
    "CRLF": {"text": SCRIPTS, "crlf": 1},
    "CRLF a byte at a time": {"text": "Grüße", "chunks": 2, "crlf": 1, "split": 1},
    "comments": {"text": SCRIPTS, "comments": 1},
    "comments, CRLF, seven bytes at a time": {"text": SCRIPTS, "comments": 1, "crlf": 1, "split": 7},
    "one character a delta": {"text": SCRIPTS * 3, "chunks": len(SCRIPTS) * 3},
}


@pytest.mark.parametrize("name", BYTES)
async def test_text_of_four_scripts_arrives_whole(service: Service, provider: FakeProvider, name: str) -> None:
    script = BYTES[name]
    provider.script(**script)
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello").end()
    assert run.text == script["text"]
    assert (await service.alice.reply(thread)).text == script["text"]
    assert "\ufffd" not in run.text


async def test_thinking_a_byte_at_a_time_arrives_whole(service: Service, provider: FakeProvider) -> None:
    provider.script(reasoning=20, split=1)
    thread = await service.alice.thread()
    await service.alice.run(thread, "hello").end()
    thinking = (await service.alice.traces(thread))[0]
    number = provider.calls[0].id
    assert thinking.text == "".join(f"c{number}r{index} " for index in range(20))


async def test_a_delta_of_a_megabyte_arrives_and_is_stored_whole(service: Service, provider: FakeProvider) -> None:
    provider.script(chunks=1, size=1_000_000)
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", max_output_tokens=1_000_000).end()
    assert len(run.text) == 1_000_000
    assert (await service.alice.reply(thread)).text == run.text == provider.calls[0].text


async def test_no_batch_is_larger_than_a_mebibyte(service: Service, provider: FakeProvider) -> None:
    provider.script(chunks=1, text="\U0001f600" * 700_000)  # 2.8 MB of UTF-8 in one delta
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello", max_output_tokens=1_000_000).end()
    again = await service.alice.follow(run.run_id).end()
    assert again.text == run.text == "\U0001f600" * 700_000
    assert max(batch.ByteSize() for batch in again.batches) < MIB + 64 * 1024
    assert max(batch.ByteSize() for batch in run.batches) < MIB + 64 * 1024


async def test_halves_of_a_character_are_joined_and_lone_ones_replaced(
    service: Service, provider: FakeProvider
) -> None:
    provider.script(chunks=2, surrogates=1)
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "hello").end()
    number = provider.calls[0].id
    assert run.text == f"c{number}w0 \U0001f600\ufffdc{number}w1 "
    assert (await service.alice.reply(thread)).text == run.text
    await service.alice.run(thread, "hello again").end()  # the history holds nothing a strict provider refuses


async def test_nul_from_a_provider_is_replaced_and_spares_its_neighbours(
    service: Service, provider: FakeProvider, sql: Sql
) -> None:
    provider.script(chunks=3, text="a\x00b\x00c", split=5)
    threads = [await service.alice.thread() for _ in range(3)]
    runs = [service.alice.run(thread, "hello") for thread in threads]
    assert [(await run.end()).text for run in runs] == ["a\ufffdb\ufffdc"] * 3
    assert await sql.value("SELECT count(*) FROM conversation.ai_runs WHERE takeovers > 0") == 0
