"""What a raw connection of each role can see and write (durability.md 28)."""

from collections.abc import AsyncIterator

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql as pg

from kit.callers import Caller
from kit.ids import new_id
from tests.contract.conversation.harness import Reading, Service, Sql, project_id
from tests.support.databases import Database
from threadloom.conversation.v1 import project_service_pb2 as projects

SETTINGS = "SELECT set_config('app.project', %s, {0}), set_config('app.user', %s, {0}), set_config('app.role', %s, {0})"
WAITING = (
    "INSERT INTO conversation.outbox (id, topic, project_id, payload, due_at)"
    " VALUES (gen_random_uuid(), 'billing.release', %s, '', clock_timestamp() + interval '1 day')"
)
QUEUED = (
    "INSERT INTO conversation.queued_runs"
    " (run_id, project_id, user_id, thread_id, ordinal, parts, text, title, is_kept)"
    " SELECT id, project_id, user_id, thread_id, 1, '', 'x', 'x', false FROM conversation.ai_runs"
)
WATCHED = "INSERT INTO conversation.run_watch SELECT id, project_id, 1000, now() FROM conversation.ai_runs"
# Tables no request has business in: the role may not even ask.
CLOSED = {"workers", "outbox", "run_watch", "schema_version"}
# Disabled: nothing is sent.
WEBHOOK = (
    "INSERT INTO conversation.webhooks (id, project_id, url, events, enabled, sealed, key_id)"
    " VALUES (gen_random_uuid(), %s, 'https://example.com/', '{}', false, '', 'k1')"
)
DELIVERY = (
    "INSERT INTO conversation.webhook_deliveries (id, webhook_id, project_id, type, payload)"
    " SELECT gen_random_uuid(), id, project_id, 'ping', '{}' FROM conversation.webhooks"
)


@pytest_asyncio.fixture
async def filled(service: Service, sql: Sql) -> Reading:
    """Rows of alice's in every table of the schema."""
    thread = await service.alice.thread(request_id="a")
    run = await service.alice.run(thread, "hello [fake reasoning=1]", key="b").end()
    await service.alice.call(service.alice.projects.CreateStreamTicket, projects.CreateStreamTicketRequest())
    await service.system.call(service.system.projects.CreateProject, projects.CreateProjectRequest(slug="third"))
    await service.role.set_provider_key("a-key-of-the-project")
    await service.role.set_identity(projects.Identity(jwks_url="https://id.example/jwks.json"))
    await sql.rows(WAITING, project_id(service.alice.caller))
    await sql.rows(QUEUED)
    await sql.rows(WATCHED)
    await sql.rows(WEBHOOK, project_id(service.alice.caller))
    await sql.rows(DELIVERY)
    return run


@pytest_asyncio.fixture
async def request_role(database: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """A raw connection of the request role."""
    async with await psycopg.AsyncConnection.connect(database.request_url, autocommit=True) as connection:
        yield connection


@pytest_asyncio.fixture
async def engine_role(database: Database) -> AsyncIterator[psycopg.AsyncConnection]:
    """A raw connection of the engine role."""
    async with await psycopg.AsyncConnection.connect(database.engine_url, autocommit=True) as connection:
        yield connection


async def become(connection: psycopg.AsyncConnection, caller: Caller) -> None:
    """The settings of a caller, for the whole session."""
    values = [str(caller.project or ""), caller.user, caller.role.value]
    await connection.execute(SETTINGS.format("false").encode(), values)


async def seen(connection: psycopg.AsyncConnection, table: str) -> list[str] | None:
    """All rows of a table this connection sees; None when it may not look."""
    query = pg.SQL("SELECT t::text FROM conversation.{} t").format(pg.Identifier(table))
    try:
        return [row for (row,) in await (await connection.execute(query)).fetchall()]
    except psycopg.errors.InsufficientPrivilege:
        return None


async def check_sees_nothing(connection: psycopg.AsyncConnection, sql: Sql) -> None:
    for table in await sql.tables():
        found = await seen(connection, table)
        assert found == [] or (found is None and table in CLOSED), table


async def refusal(connection: psycopg.AsyncConnection, statement: str, *arguments: object) -> str:
    """The name of the error a statement ends with; empty when it worked."""
    try:
        await connection.execute(statement.encode(), arguments)
    except psycopg.Error as error:
        return type(error).__name__
    return ""


@pytest.mark.usefixtures("filled")
async def test_every_table_holds_something_for_these_tests(sql: Sql) -> None:
    for table in await sql.tables():
        assert await sql.value(f"SELECT count(*) FROM conversation.{table}"), table


@pytest.mark.usefixtures("filled")
async def test_others_see_no_row_in_any_table(
    request_role: psycopg.AsyncConnection, sql: Sql, callers: dict[str, Caller]
) -> None:
    for who in ("bob", "alice elsewhere", "role elsewhere"):
        await become(request_role, callers[who])
        await check_sees_nothing(request_role, sql)


@pytest.mark.usefixtures("filled")
async def test_without_settings_there_is_no_row_at_all(request_role: psycopg.AsyncConnection, sql: Sql) -> None:
    await check_sees_nothing(request_role, sql)


# P stands for alice's project.
PARTIAL: list[dict[str, str]] = [
    {"app.project": "P"},
    {"app.project": "P", "app.role": "user"},
    {"app.project": "P", "app.role": "user", "app.user": ""},
    {"app.project": "P", "app.role": "", "app.user": "alice"},
    {"app.project": "P", "app.role": "admin", "app.user": "alice"},
    {"app.project": "", "app.role": "service"},
    {"app.role": "user", "app.user": "alice"},
    {"app.role": "service"},
]


@pytest.mark.usefixtures("filled")
async def test_settings_with_a_part_missing_show_nothing(
    database: Database, sql: Sql, callers: dict[str, Caller]
) -> None:
    for settings in PARTIAL:
        async with await psycopg.AsyncConnection.connect(database.request_url, autocommit=True) as connection:
            for name, value in settings.items():
                shown = str(callers["alice"].project) if value == "P" else value
                await connection.execute("SELECT set_config(%s, %s, false)", [name, shown])
            await check_sees_nothing(connection, sql)


@pytest.mark.usefixtures("filled")
async def test_alice_and_her_projects_service_role_see_her_rows(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller]
) -> None:
    for who in ("alice", "role"):
        await become(request_role, callers[who])
        for table in (
            "ai_threads",
            "ai_messages",
            "ai_runs",
            "queued_runs",
            "run_events",
            "trace_events",
            "api_calls",
        ):
            assert await seen(request_role, table), (who, table)
        for table in ("projects", "project_keys", "stream_tickets"):
            assert await seen(request_role, table) == [], (who, table)
        for table in ("provider_keys", "identities", "webhooks", "webhook_deliveries"):
            assert len(await seen(request_role, table) or []) == (who == "role"), (who, table)


@pytest.mark.usefixtures("filled")
async def test_settings_end_with_their_transaction(
    request_role: psycopg.AsyncConnection, sql: Sql, callers: dict[str, Caller]
) -> None:
    alice = callers["alice"]
    for _ in range(2):  # the second round begins with settings that were emptied, not missing
        async with request_role.transaction():
            await request_role.execute(SETTINGS.format("true").encode(), [str(alice.project), "alice", "user"])
            assert await seen(request_role, "ai_messages")
        await check_sees_nothing(request_role, sql)


async def test_the_request_role_writes_no_event_but_the_first(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller], filled: Reading
) -> None:
    alice, end = callers["alice"], len(filled.events)
    await become(request_role, alice)
    insert = "INSERT INTO conversation.run_events (run_id, seq, project_id, kind, payload) VALUES (%s, %s, %s, 3, '')"
    assert await refusal(request_role, insert, filled.run_id, end + 1, alice.project) == "InsufficientPrivilege"
    assert await refusal(request_role, insert, new_id(), 2, alice.project) == "InsufficientPrivilege"
    assert await refusal(request_role, insert, new_id(), 1, new_id()) == "InsufficientPrivilege"
    assert await refusal(request_role, insert, filled.run_id, 1, alice.project) == "UniqueViolation"
    assert await refusal(request_role, "UPDATE conversation.run_events SET kind = 1") == "InsufficientPrivilege"


FORBIDDEN = [
    "UPDATE conversation.ai_messages SET text = 'x'",
    "UPDATE conversation.ai_messages SET status = 'complete'",
    "DELETE FROM conversation.ai_messages",
    "UPDATE conversation.ai_runs SET epoch = 9",
    "UPDATE conversation.ai_runs SET status = 'failed'",
    "UPDATE conversation.ai_runs SET worker_id = NULL",
    "DELETE FROM conversation.ai_runs",
    "UPDATE conversation.api_calls SET tokens_in = 0",
    "DELETE FROM conversation.api_calls",
    "UPDATE conversation.idempotency_keys SET body_sha256 = ''",
    "DELETE FROM conversation.idempotency_keys",
    "INSERT INTO conversation.trace_events SELECT * FROM conversation.trace_events",
    "UPDATE conversation.projects SET jwt_secret = ''",
    "UPDATE conversation.project_keys SET kind = 'service'",
    "UPDATE conversation.provider_keys SET project_id = project_id",
    "UPDATE conversation.queued_runs SET ordinal = 0",
    "DELETE FROM conversation.queued_runs",
    "UPDATE conversation.run_watch SET until = 'infinity'",
    "DELETE FROM conversation.run_watch",
    "UPDATE conversation.identities SET project_id = project_id",
    "SELECT * FROM conversation.workers",
    "UPDATE conversation.workers SET lease_until = 'infinity'",
    "ALTER TABLE conversation.ai_messages DISABLE ROW LEVEL SECURITY",
    "ALTER TABLE conversation.ai_messages NO FORCE ROW LEVEL SECURITY",
    "DROP POLICY request ON conversation.ai_messages",
    "CREATE TABLE conversation.mine (id int)",
    "SET ROLE threadloom_conversation_engine",
    "TRUNCATE conversation.ai_messages",
    "COPY conversation.ai_messages TO PROGRAM 'cat'",
]


@pytest.mark.usefixtures("filled")
async def test_the_request_role_cannot_write_what_is_the_engines_nor_get_around_the_rules(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller], sql: Sql
) -> None:
    before = await sql.contents()
    await become(request_role, callers["alice"])
    for statement in FORBIDDEN:
        assert await refusal(request_role, statement) == "InsufficientPrivilege", statement
    await request_role.execute("SET row_security = off")
    assert await refusal(request_role, "SELECT * FROM conversation.ai_messages") == "InsufficientPrivilege"
    assert await sql.contents() == before


async def test_nobody_makes_rows_for_somebody_else(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller], service: Service
) -> None:
    alices = await service.alice.thread()
    await become(request_role, callers["bob"])
    insert = "INSERT INTO conversation.ai_threads (id, project_id, user_id) VALUES (%s, %s, %s)"
    for project, user in ((callers["bob"].project, "alice"), (callers["role elsewhere"].project, "bob")):
        assert await refusal(request_role, insert, new_id(), project, user) == "InsufficientPrivilege"
    assert await refusal(request_role, "UPDATE conversation.ai_threads SET title = 'bob'") == ""
    found = await service.alice.get_thread(alices)
    assert (found.user_id, found.title) == ("alice", "")


@pytest.mark.usefixtures("filled")
async def test_a_request_writes_neither_owners_nor_costs(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller]
) -> None:
    await become(request_role, callers["alice"])
    for change in ("user_id = 'alice'", "cost_nano = 0", "tokens_in = 0"):
        assert await refusal(request_role, f"UPDATE conversation.ai_threads SET {change}") == "InsufficientPrivilege"
    insert = (
        "INSERT INTO conversation.api_calls (id, project_id, user_id, thread_id, run_id, message_id, step, attempt,"
        " model{0}) SELECT gen_random_uuid(), project_id, user_id, thread_id, run_id, message_id, 9, 9, model{1}"
        " FROM conversation.api_calls LIMIT 1"
    )
    assert await refusal(request_role, insert.format(", cost_nano", ", 0")) == "InsufficientPrivilege"
    assert await refusal(request_role, insert.format(", rates", ", NULL")) == "InsufficientPrivilege"
    assert await refusal(request_role, insert.format("", "")) == ""


@pytest.mark.usefixtures("filled")
async def test_a_provider_key_is_written_for_its_project_by_its_service_role_or_a_service_of_ours(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller], sql: Sql
) -> None:
    before = await sql.contents()
    insert = "INSERT INTO conversation.provider_keys (project_id, provider, sealed, key_id) VALUES (%s, %s, '', '')"
    for who in ("alice", "bob", "role elsewhere", "alice elsewhere"):
        await become(request_role, callers[who])
        assert await refusal(request_role, insert, callers["role"].project, "x") == "InsufficientPrivilege", who
        assert await refusal(request_role, "UPDATE conversation.provider_keys SET sealed = '', key_id = ''") == ""
        assert await refusal(request_role, "DELETE FROM conversation.provider_keys") == ""
    assert await sql.contents() == before
    for who in ("role", "system"):
        await become(request_role, callers[who])
        assert await refusal(request_role, insert, callers["role"].project, who) == ""
        assert await seen(request_role, "provider_keys")


@pytest.mark.usefixtures("filled")
async def test_an_identity_is_written_for_its_project_by_its_service_role_or_a_service_of_ours(
    request_role: psycopg.AsyncConnection, callers: dict[str, Caller], sql: Sql
) -> None:
    before = await sql.contents()
    insert = "INSERT INTO conversation.identities (project_id, jwks) VALUES (%s, '{}')"
    for who in ("alice", "bob", "role elsewhere", "alice elsewhere"):
        await become(request_role, callers[who])
        assert await refusal(request_role, insert, callers["role"].project) == "InsufficientPrivilege", who
        assert await refusal(request_role, "UPDATE conversation.identities SET issuer = 'x'") == ""
        assert await refusal(request_role, "DELETE FROM conversation.identities") == ""
    assert await sql.contents() == before
    for who in ("role", "system"):
        await become(request_role, callers[who])
        assert await seen(request_role, "identities")
        assert await refusal(request_role, "DELETE FROM conversation.identities") == ""
        assert await refusal(request_role, insert, callers["role"].project) == ""


@pytest.mark.usefixtures("filled")
async def test_the_engine_role_reads_runs_and_no_project_or_key(engine_role: psycopg.AsyncConnection) -> None:
    for table in (
        "ai_threads",
        "ai_messages",
        "ai_runs",
        "run_events",
        "trace_events",
        "api_calls",
        "workers",
        "provider_keys",
        "queued_runs",
        "run_watch",
        "webhooks",
        "webhook_deliveries",
    ):
        assert await seen(engine_role, table), table
    for table in ("projects", "project_keys", "identities", "schema_version"):
        assert await seen(engine_role, table) is None, table
    for statement in (
        "INSERT INTO conversation.ai_threads SELECT * FROM conversation.ai_threads",
        "UPDATE conversation.ai_threads SET user_id = 'x'",
        "DELETE FROM conversation.ai_threads",
        "DELETE FROM conversation.api_calls",
        "UPDATE conversation.run_events SET kind = 1",
        "INSERT INTO conversation.queued_runs SELECT * FROM conversation.queued_runs",
        "UPDATE conversation.queued_runs SET ordinal = 0",
        "INSERT INTO conversation.run_watch SELECT * FROM conversation.run_watch",
        "UPDATE conversation.run_watch SET cancel_after_ms = 0",
        "INSERT INTO conversation.provider_keys SELECT * FROM conversation.provider_keys",
        "UPDATE conversation.provider_keys SET updated_at = now()",
        "UPDATE conversation.provider_keys SET project_id = project_id",
        "DELETE FROM conversation.provider_keys",
        "UPDATE conversation.webhooks SET url = ''",
        "DELETE FROM conversation.webhooks",
        "UPDATE conversation.webhook_deliveries SET payload = ''",
        "SET ROLE threadloom_conversation",
    ):
        assert await refusal(engine_role, statement) == "InsufficientPrivilege", statement


async def test_neither_role_is_above_the_rules(sql: Sql) -> None:
    rows = await sql.rows(
        "SELECT rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles"
        " WHERE rolname LIKE 'threadloom_conversation%%' ORDER BY 1"
    )
    assert [name for name, *_ in rows] == ["threadloom_conversation", "threadloom_conversation_engine"]
    assert all(powers == (False,) * 4 for _, *rest in rows if (powers := tuple(rest)))
    owned = "SELECT count(*) FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner WHERE r.rolname LIKE 'threadloom%%'"
    assert await sql.value(owned) == 0
