"""A project's runs use the project's own key of the provider, which is kept sealed and shown to nobody."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from kit.callers import Caller, Role
from kit.errors import ServiceError
from kit.ids import new_id
from kit.sealing import KeyRing, key_ring
from services.conversation import limits
from services.conversation.provider_keys import ProviderKeys, seal, seal_again
from services.conversation.providers.model import ModelRequest
from services.conversation.store import provider_keys as store
from tests.contract.conversation.harness import (
    PROVIDER_KEY,
    RING_1,
    RING_2,
    Launcher,
    Person,
    Reading,
    Service,
    Sql,
    eventually,
    project_id,
)
from tests.fakes.provider import FakeProvider
from tests.support.databases import Database
from threadloom.conversation.v1 import project_service_pb2 as projects

ACME, OTHER = "the-key-of-acme", "the-key-of-other"
CANARY = "canary-7f3a9c51-never-to-be-seen-anywhere-else"
UNREADABLE = "threadloom_unreadable_provider_keys_total"


@pytest_asyncio.fixture
async def engine(database: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection of the engine role, as the sweeper has."""
    async with await psycopg.AsyncConnection.connect(database.engine_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call reads its key."""
    monkeypatch.setattr(limits, "PROVIDER_KEY_CACHE_SECONDS", 0.0)


async def ask(person: Person, text: str = "hello") -> Reading:
    """One run in a new thread."""
    return await person.run(await person.thread(), text).end()


async def failure(person: Person, text: str = "hello") -> tuple[str, str]:
    """The code and message a run fails with."""
    error = (await ask(person, text)).events[-1].run_failed.error
    return error.code, error.message


def sent(provider: FakeProvider) -> list[str]:
    """The credential of each call, in order."""
    return [call.headers["authorization"] for call in provider.calls]


async def refused(call: Awaitable[object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


def unreadable() -> float:
    return REGISTRY.get_sample_value(UNREADABLE, {"provider": "openai"}) or 0.0


async def test_a_key_is_set_listed_without_itself_and_removed(service: Service, callers: dict[str, Caller]) -> None:
    acme = str(project_id(callers["role"]))
    assert await service.role.provider_keys() == []
    first = await service.role.set_provider_key(ACME)
    second = await service.system.set_provider_key(OTHER, acme)
    assert (first.provider, second.provider) == ("openai", "openai")
    assert second.update_time.ToNanoseconds() > first.update_time.ToNanoseconds()
    for person, named in ((service.role, ""), (service.role, acme), (service.system, acme)):
        assert await person.provider_keys(named) == [second]
    assert await service.people["role elsewhere"].provider_keys() == []
    for _ in range(2):
        await service.role.delete_provider_key(acme)
        assert await service.role.provider_keys() == []


async def test_only_the_projects_service_role_and_our_own_services_manage_keys(
    service: Service, callers: dict[str, Caller], sql: Sql
) -> None:
    acme, other = str(project_id(callers["role"])), str(project_id(callers["role elsewhere"]))
    await service.role.set_provider_key(ACME)
    before = await sql.contents()
    wrong = [(who, named) for who in ("alice", "bob", "alice elsewhere") for named in ("", acme, other)]
    wrong += [("role", other), ("role elsewhere", acme), ("role", "x"), ("role", str(new_id()))]
    for who, named in wrong:
        person = service.people[who]
        for call in (
            person.set_provider_key("somebody-elses", named),
            person.provider_keys(named),
            person.delete_provider_key(named),
        ):
            assert (await refused(call)).reason == "FORBIDDEN", (who, named)
    for named, reason in (("", "INVALID_OPTIONS"), ("x", "NOT_FOUND"), (str(new_id()), "NOT_FOUND")):
        for call in (
            service.system.set_provider_key("somebody-elses", named),
            service.system.provider_keys(named),
            service.system.delete_provider_key(named),
        ):
            error = await refused(call)
            assert (error.reason, error.metadata.get("kind")) == (reason, "project" if named else None)
    assert await sql.contents() == before


@pytest.mark.parametrize(
    "key",
    ["", "7-chars", CANARY + "x" * 4096, *(CANARY + end for end in (" ", "\n", "\t", "\x00", "\x7f", "ü", "\u200b"))],
)
async def test_a_key_no_provider_would_give_is_refused_without_repeating_it(service: Service, key: str) -> None:
    error = await refused(service.role.set_provider_key(key))
    assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": "api_key"})
    assert CANARY not in error.message
    assert await service.role.provider_keys() == []


async def test_keys_of_every_size_that_is_taken_reach_the_provider(
    service: Service, provider: FakeProvider, no_cache: None
) -> None:
    keys = ["8-chars!", "".join(chr(code) for code in range(0x21, 0x7F)), "k" * 4096]
    for key in keys:
        await service.role.set_provider_key(key)
        await ask(service.alice)
    assert sent(provider) == [f"Bearer {key}" for key in keys]


async def test_a_provider_there_is_no_adapter_for_is_refused_without_repeating_it(service: Service) -> None:
    stub = service.role.projects
    for provider in ("", "OpenAI", "anthropic", CANARY):
        for call in (
            service.role.call(stub.SetProviderKey, projects.SetProviderKeyRequest(provider=provider, api_key=CANARY)),
            service.role.call(stub.DeleteProviderKey, projects.DeleteProviderKeyRequest(provider=provider)),
        ):
            error = await refused(call)
            assert (error.reason, error.metadata) == ("INVALID_OPTIONS", {"field": "provider"})
            assert CANARY not in error.message
            assert "openai" in error.message


async def test_without_a_ring_no_key_is_kept_and_the_setting_is_named(launch: Launcher, sql: Sql) -> None:
    service = await launch(THREADLOOM_SECRET_KEYS="-")
    error = await refused(service.role.set_provider_key(CANARY))
    assert error.reason == "AI_PROVIDER_NOT_CONFIGURED"
    assert "THREADLOOM_SECRET_KEYS" in error.message
    assert CANARY not in error.message
    assert await service.role.provider_keys() == []
    await service.role.delete_provider_key()
    assert await sql.value("SELECT count(*) FROM conversation.provider_keys") == 0


async def test_each_project_calls_with_its_own_key_and_the_others_with_the_deployments(
    service: Service, provider: FakeProvider
) -> None:
    made = await service.system.call(service.system.projects.CreateProject, projects.CreateProjectRequest(slug="third"))
    people = {
        ACME: service.alice,
        OTHER: service.people["alice elsewhere"],
        PROVIDER_KEY: Person(service.channel, Caller(Role.USER, UUID(made.project.id), "alice")),
    }
    await service.role.set_provider_key(ACME)
    await service.people["role elsewhere"].set_provider_key(OTHER)
    expected = {}
    for _ in range(2):
        runs = [(key, person.run(await person.thread(), key)) for key, person in people.items() for _ in range(5)]
        for key, run in runs:
            await run.end()
            expected[run.run_id] = key
    used = [(call.body["messages"][-1]["content"], call.headers["authorization"]) for call in provider.calls]
    assert len(used) == len(expected) == 30
    assert all(authorization == f"Bearer {key}" for key, authorization in used)


async def test_what_belongs_to_one_key_is_never_sent_with_another(
    launch: Launcher, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-the-deployment")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-the-deployment")
    service = await launch()
    await service.role.set_provider_key(ACME)
    for who in ("alice", "alice elsewhere", "alice"):
        await ask(service.people[who])
    assert len(provider.calls) == 3
    for call in provider.calls:
        assert {"cookie", "openai-organization", "openai-project"} & set(call.headers) == set()


async def test_without_a_key_of_the_deployment_only_projects_with_one_are_answered(
    launch: Launcher, provider: FakeProvider
) -> None:
    service = await launch(OPENAI_API_KEY="-")
    await service.role.set_provider_key(ACME)
    assert (await ask(service.alice)).kinds[-1] == "run_finished"
    code, message = await failure(service.people["alice elsewhere"])
    assert code == "AI_PROVIDER_NOT_CONFIGURED"
    assert "make provider-key PROVIDER=openai" in message
    assert sent(provider) == [f"Bearer {ACME}"]


async def test_a_change_and_a_removal_take_effect(
    service: Service, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROVIDER_KEY_CACHE_SECONDS", 0.2)

    async def asked_with(key: str) -> bool:
        await ask(service.alice)
        return sent(provider)[-1] == f"Bearer {key}"

    await service.role.set_provider_key(ACME)
    assert await eventually(lambda: asked_with(ACME))
    for change, key in (
        (service.role.set_provider_key("a-newer-key"), "a-newer-key"),
        (service.role.delete_provider_key(), PROVIDER_KEY),
    ):
        await change
        changed = time.monotonic()
        assert await eventually(lambda key=key: asked_with(key))  # type: ignore[misc]
        late = [call for call in provider.calls if call.arrived > changed + 1.0]
        assert {call.headers["authorization"] for call in late} <= {f"Bearer {key}"}


async def test_a_key_is_remembered_for_five_seconds_and_no_longer(
    service: Service, engine: psycopg.AsyncConnection, callers: dict[str, Caller]
) -> None:
    project, now, reads = project_id(callers["role"]), 1000.0, 0

    async def insist(work: Callable[[psycopg.AsyncConnection], Awaitable[bytes | None]]) -> bytes | None:
        nonlocal reads
        reads += 1
        return await work(engine)

    keys = ProviderKeys(key_ring(RING_1), {"openai": PROVIDER_KEY}, lambda: now)
    assert await keys.key_for(project, "openai", insist) == PROVIDER_KEY
    await service.role.set_provider_key(ACME)
    now += 4.999
    assert await keys.key_for(project, "openai", insist) == PROVIDER_KEY  # that there is none is remembered too
    now += 0.001
    assert await keys.key_for(project, "openai", insist) == ACME
    await service.role.delete_provider_key()
    now += 4.999
    assert await keys.key_for(project, "openai", insist) == ACME
    now += 0.001
    assert await keys.key_for(project, "openai", insist) == PROVIDER_KEY
    assert reads == 3
    assert ACME not in repr(vars(keys))


async def test_a_process_remembers_a_bounded_number_of_keys(
    engine: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROVIDER_KEYS_CACHED", 10)
    keys = ProviderKeys(key_ring(RING_1), {"openai": PROVIDER_KEY})
    for _ in range(50):
        assert await keys.key_for(new_id(), "openai", lambda work: work(engine)) == PROVIDER_KEY
    assert 0 < len(keys._read) <= 10


@pytest.mark.parametrize("ring", [RING_2, RING_2.replace("k2", "k1"), "-"])
async def test_a_key_the_ring_does_not_open_fails_the_run_and_is_told_to_the_operator(
    launch: Launcher, provider: FakeProvider, ring: str
) -> None:
    before = await launch()
    await before.role.set_provider_key(ACME)
    await before.stop()
    service, count = await launch(THREADLOOM_SECRET_KEYS=ring), unreadable()
    with capture_logs() as logs:
        code, message = await failure(service.alice)
    assert code == "AI_PROVIDER_NOT_CONFIGURED"
    assert "set it again: make provider-key PROVIDER=openai" in message
    assert provider.calls == []  # the deployment's is not used instead
    assert unreadable() == count + 1
    (told,) = [entry for entry in logs if entry["event"] == "provider key does not open"]
    assert (told["log_level"], told["provider"]) == ("error", "openai")
    assert [entry for entry in logs if "unexpected" in entry["event"]] == []
    assert (await ask(service.people["alice elsewhere"])).kinds[-1] == "run_finished"


@pytest.mark.usefixtures("no_cache")
async def test_a_key_that_does_not_open_is_set_again(launch: Launcher, provider: FakeProvider) -> None:
    first = await launch()
    await first.role.set_provider_key(ACME)
    service = await launch(THREADLOOM_SECRET_KEYS=RING_2)
    assert (await failure(service.alice))[0] == "AI_PROVIDER_NOT_CONFIGURED"
    await service.role.set_provider_key(ACME)
    assert (await ask(service.alice)).kinds[-1] == "run_finished"
    assert sent(provider) == [f"Bearer {ACME}"]


@pytest.mark.usefixtures("no_cache")
async def test_a_row_that_was_copied_or_changed_does_not_open(
    service: Service, provider: FakeProvider, callers: dict[str, Caller], sql: Sql
) -> None:
    await service.role.set_provider_key(ACME)
    await sql.rows(
        "INSERT INTO conversation.provider_keys (project_id, provider, sealed, key_id)"
        " SELECT %s, provider, sealed, key_id FROM conversation.provider_keys",
        callers["role elsewhere"].project,
    )
    assert (await failure(service.people["alice elsewhere"]))[0] == "AI_PROVIDER_NOT_CONFIGURED"
    await sql.rows("UPDATE conversation.provider_keys SET sealed = set_byte(sealed, 30, get_byte(sealed, 30) # 1)")
    assert (await failure(service.alice))[0] == "AI_PROVIDER_NOT_CONFIGURED"
    await sql.rows("UPDATE conversation.provider_keys SET sealed = ''")
    assert (await failure(service.alice))[0] == "AI_PROVIDER_NOT_CONFIGURED"
    assert provider.calls == []


@pytest.mark.usefixtures("no_cache")
async def test_reading_a_key_waits_for_the_database(
    service: Service, provider: FakeProvider, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.role.set_provider_key(ACME)
    thread = await service.alice.thread()
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 0.5)

    async def has_waited_twice() -> bool:
        return len([entry for entry in logs if entry["event"] == "answer waits for the database"]) >= 2

    with capture_logs() as logs:
        await sql.rows("BEGIN")
        await sql.rows("LOCK TABLE conversation.provider_keys IN ACCESS EXCLUSIVE MODE")
        run = service.alice.run(thread, "hello")
        await eventually(has_waited_twice)
        assert provider.calls == []
        await sql.rows("COMMIT")
        assert (await run.end()).kinds[-1] == "run_finished"
    assert sent(provider) == [f"Bearer {ACME}"]


# --- rotation


async def sealed_under(sql: Sql) -> list[str]:
    return [key_id for (key_id,) in await sql.rows("SELECT key_id FROM conversation.provider_keys ORDER BY 1")]


@pytest.mark.usefixtures("no_cache")
async def test_a_ring_is_replaced_key_by_key_while_runs_go_on(
    launch: Launcher, provider: FakeProvider, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SWEEP_SECONDS", 0.05)
    first = await launch(THREADLOOM_SECRET_KEYS=RING_1)
    set_at = (await first.role.set_provider_key(ACME)).update_time
    await first.people["role elsewhere"].set_provider_key(OTHER)
    await ask(first.alice)
    assert await sealed_under(sql) == ["k1", "k1"]
    await first.stop()

    both = await launch(THREADLOOM_SECRET_KEYS=f"{RING_2},{RING_1}")
    await ask(both.alice)

    async def are_sealed_again() -> bool:
        return await sealed_under(sql) == ["k2", "k2"]

    assert await eventually(are_sealed_again)
    await ask(both.alice)
    assert (await both.role.provider_keys())[0].update_time == set_at
    await both.stop()

    last = await launch(THREADLOOM_SECRET_KEYS=RING_2)
    await ask(last.alice)
    await ask(last.people["alice elsewhere"])
    assert sent(provider) == [f"Bearer {ACME}"] * 4 + [f"Bearer {OTHER}"]


async def test_a_key_that_is_set_while_it_is_sealed_again_stays(
    service: Service, engine: psycopg.AsyncConnection, callers: dict[str, Caller], sql: Sql
) -> None:
    both = key_ring(f"{RING_2},{RING_1}")
    await service.role.set_provider_key(ACME)
    (row,) = await store.sealed_under(engine, both.older_ids, 10)
    await service.role.set_provider_key("a-newer-key")
    again = seal(both, row.project_id, row.provider, ACME)
    assert await store.replace_sealed(engine, row, again, "k2") == 0
    assert await seal_again(engine, both, 10) == 1
    assert await seal_again(engine, both, 10) == 0
    keys = ProviderKeys(both, {})
    assert await keys.key_for(project_id(callers["role"]), "openai", lambda work: work(engine)) == "a-newer-key"
    assert await sealed_under(sql) == ["k2"]


async def test_sealing_again_takes_a_bounded_number_and_passes_by_what_does_not_open(
    engine: psycopg.AsyncConnection, sql: Sql
) -> None:
    old, both = key_ring(RING_1), key_ring(f"{RING_2},{RING_1}")
    insert = (
        "INSERT INTO conversation.provider_keys (project_id, provider, sealed, key_id) VALUES (%s, 'openai', %s, %s)"
    )
    count = unreadable()
    for number in range(9):
        project = new_id()
        await sql.rows("INSERT INTO conversation.projects VALUES (%s, %s, 's')", project, f"p{number}")
        sealed = {0: b"broken", 1: seal(KeyRing({"k0": bytes(32)}), project, "openai", ACME)}
        key_id = {1: "k0"}.get(number, "k1")
        await sql.rows(insert, project, sealed.get(number, seal(old, project, "openai", ACME)), key_id)
    assert await seal_again(engine, old, 100) == 0
    done = [await seal_again(engine, both, 3) for _ in range(60)]
    assert max(done) <= 3
    assert sum(done) == 7
    assert await sealed_under(sql) == ["k0", "k1", *["k2"] * 7]
    assert unreadable() > count
    assert await seal_again(engine, key_ring("-"), 100) == 0


# --- the key is nowhere


def traces_of(text: str) -> list[str]:
    """How a key could stand in a dump: itself, its beginning alone, and either as bytes in hexadecimal."""
    return [form for part in (text, text[:12]) for form in (part, part.encode().hex())]


LEAKS = [
    "error=401 leak=1",
    "error=401 leak=453",  # the message is cut in the middle of the key
    "error=429 retry_after=0 leak=1",
    "error=500 leak=1",
    "chunks=3 error_at=2 leak=1",
    "chunks=3 error_at=0 leak=453",
]


async def test_the_clear_key_stands_nowhere(
    service: Service,
    provider: FakeProvider,
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr("services.conversation.domain.retries.RETRY_DELAY_SECONDS", 0.01)
    shown: list[object] = [await service.role.set_provider_key(CANARY), await service.role.provider_keys()]
    for script in ("chunks=2", *LEAKS):
        run = await ask(service.alice, f"[fake {script}]")
        shown += [run.batches, await service.alice.get_run(run.run_id)]
        thread = run.batches[0].thread_id
        shown += [await service.alice.messages(thread), await service.alice.traces(thread)]
    assert {f"Bearer {CANARY}"} == set(sent(provider))
    shown.append(ModelRequest("id", "model", [], api_key=CANARY))
    for wrong in (service.role.set_provider_key(CANARY, "x"), service.role.set_provider_key(CANARY + "\n")):
        shown.append(await refused(wrong))
    out, err = capsys.readouterr()
    places = {
        "answers": repr(shown),
        "out": out,
        "err": err,
        "log": caplog.text + repr([(record.args, record.exc_info) for record in caplog.records]),
    }
    for table in await sql.tables():
        rows = await sql.rows(f"SELECT t::text FROM conversation.{table} t")
        places[table] = "\n".join(row for (row,) in rows)
    assert places["provider_keys"]
    assert "attempt failed" in places["out"] + places["log"]
    assert "[key]" in places["answers"]
    found = [(place, form) for place, text in places.items() for form in traces_of(CANARY) if form in text]
    assert found == []
