"""What a raw connection of each role can see and write (durability.md 28), and that the migrations are the schema."""

import psycopg
import pytest
import pytest_asyncio
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from psycopg import sql as pg
from sqlalchemy import create_engine

from kit.callers import Caller
from kit.db import sqlalchemy_url
from services.billing.migrate import main
from services.billing.schema import SCHEMA, Base
from tests.contract.billing.harness import Service
from tests.support import databases
from threadloom.billing.v1.billing_service_pb2 import SetQuotaRequest, SetTermsRequest
from threadloom.billing.v1.price_pb2 import Terms
from threadloom.common.v1.money_pb2 import Money

SETTINGS = (
    "SELECT set_config('app.project', %s, false), set_config('app.user', %s, false), set_config('app.role', %s, false)"
)
TABLES = sorted(table.name for table in Base.metadata.tables.values())


@pytest_asyncio.fixture
async def filled(service: Service) -> Service:
    """Rows of alice's in every table."""
    request = service.ask()
    await service.place(request)
    await service.settle(request.api_call_id, 1, 1)
    await service.quota(10**9)
    await service.cap(10**9)
    await service.role.call(service.role.billing.SetTerms, SetTermsRequest(terms=Terms(credits_per_usd=5)))
    return service


def seen(connection: psycopg.Connection, caller: Caller | None) -> dict[str, int | None]:
    """How many rows of each table a caller sees; None where the role may not look."""
    if caller is not None:
        connection.execute(SETTINGS.encode(), [str(caller.project or ""), caller.user, caller.role.value])
    found: dict[str, int | None] = {}
    for table in TABLES:
        try:
            row = connection.execute(pg.SQL("SELECT count(*) FROM billing.{}").format(pg.Identifier(table))).fetchone()
            found[table] = row[0] if row else None
        except psycopg.errors.InsufficientPrivilege:
            found[table] = None
    return found


def refusal(connection: psycopg.Connection, statement: str) -> str:
    """The error a statement ends with; `n rows` when it worked."""
    try:
        return f"{connection.execute(statement.encode()).rowcount} rows"
    except psycopg.Error as error:
        return type(error).__name__


async def test_each_caller_sees_its_own_and_nobody_without_settings(
    filled: Service, request_url: str, callers: dict[str, Caller]
) -> None:
    with psycopg.connect(request_url, autocommit=True) as connection:
        assert set(seen(connection, None).values()) == {0}
        for who in ("alice elsewhere", "role elsewhere", "bob"):
            found = seen(connection, callers[who])
            assert found.pop("model_prices") == 1  # of every project
            assert set(found.values()) == {0}, who
        alice = seen(connection, callers["alice"])
        assert alice["accounts"] == 3
        assert [alice[table] for table in ("holds", "cost_ledger", "quotas")] == [1, 1, 1]
        assert [alice[table] for table in ("spend_caps", "rate_windows", "project_terms")] == [0, 0, 0]
        role = seen(connection, callers["role"])
        assert [role[table] for table in ("accounts", "spend_caps", "project_terms", "rate_windows")] == [6, 1, 1, 0]
        connection.execute(SETTINGS.encode(), ["", "", "service"])
        assert seen(connection, None)["accounts"] == 0


FORBIDDEN = [
    "UPDATE billing.cost_ledger SET cost_nano = 0",
    "DELETE FROM billing.cost_ledger",
    "DELETE FROM billing.accounts",
    "DELETE FROM billing.holds",
    "UPDATE billing.holds SET amount_nano = 0",
    "UPDATE billing.accounts SET user_id = 'x'",
    "ALTER TABLE billing.accounts DISABLE ROW LEVEL SECURITY",
    "DROP POLICY request_read ON billing.holds",
]
# Allowed to the role, not to a user or a project's service role: no row is theirs to change.
WITHOUT_EFFECT = [
    "UPDATE billing.accounts SET spent_nano = 0",
    "UPDATE billing.holds SET status = 'released'",
    "UPDATE billing.rate_windows SET used = 0",
]


@pytest.mark.parametrize("who", ["alice", "role"])
async def test_no_caller_from_outside_moves_money(
    filled: Service, request_url: str, callers: dict[str, Caller], who: str
) -> None:
    with psycopg.connect(request_url, autocommit=True) as connection:
        seen(connection, callers[who])
        for statement in FORBIDDEN:
            assert refusal(connection, statement) == "InsufficientPrivilege", statement
        for statement in WITHOUT_EFFECT:
            assert refusal(connection, statement) == "0 rows", statement
        for table in ("accounts", "holds", "cost_ledger"):
            copied = f"INSERT INTO billing.{table} SELECT * FROM billing.{table}"
            assert refusal(connection, copied) == "InsufficientPrivilege", table


async def test_a_user_sets_no_limit_and_a_project_none_of_another(
    filled: Service, request_url: str, callers: dict[str, Caller]
) -> None:
    with psycopg.connect(request_url, autocommit=True) as connection:
        seen(connection, callers["alice"])
        assert refusal(connection, "UPDATE billing.quotas SET limit_nano = 0") == "0 rows"
        assert refusal(connection, "DELETE FROM billing.quotas") == "0 rows"
        seen(connection, callers["role"])
        other = callers["role elsewhere"].project
        for statement in (
            f"INSERT INTO billing.spend_caps VALUES ('{other}', 'day', 1)",
            f"INSERT INTO billing.quotas VALUES ('{other}', 'alice', 'day', 1)",
            f"INSERT INTO billing.project_terms VALUES ('{other}', 1, 1)",
            "INSERT INTO billing.model_prices VALUES ('00000000-0000-0000-0000-000000000000', 'm', '')",
        ):
            assert refusal(connection, statement) == "InsufficientPrivilege", statement


async def test_a_user_sees_the_quota_of_everybody_and_changes_it_no_more_than_its_own(
    filled: Service, request_url: str, callers: dict[str, Caller]
) -> None:
    request = SetQuotaRequest(period=1, limit=Money(nano_usd=7))  # type: ignore[arg-type]
    await filled.role.call(filled.role.billing.SetQuota, request)
    with psycopg.connect(request_url, autocommit=True) as connection:
        assert [seen(connection, callers[who])["quotas"] for who in ("alice", "bob", "alice elsewhere")] == [2, 1, 0]
        seen(connection, callers["bob"])
        assert refusal(connection, "UPDATE billing.quotas SET limit_nano = 0") == "0 rows"
        assert refusal(connection, "DELETE FROM billing.quotas") == "0 rows"


async def test_the_engine_role_reads_the_books_and_writes_no_entry(filled: Service, engine_url: str) -> None:
    with psycopg.connect(engine_url, autocommit=True) as connection:
        found = seen(connection, None)
        assert {table for table, rows in found.items() if rows} == {"accounts", "cost_ledger", "holds"}
        assert {table for table, rows in found.items() if rows is None} == set(TABLES) - {
            "accounts", "cost_ledger", "holds",
        }  # fmt: skip
        assert refusal(connection, "DELETE FROM billing.holds WHERE status <> 'open'") == "1 rows"
        await filled.place(filled.ask())
        assert refusal(connection, "DELETE FROM billing.holds") == "0 rows"  # an open one is money
        for statement in (
            *(statement for statement in FORBIDDEN if statement != "DELETE FROM billing.holds"),
            "INSERT INTO billing.cost_ledger SELECT * FROM billing.cost_ledger",
            "UPDATE billing.accounts SET spent_nano = 0",
            "SET ROLE threadloom_billing",
            "SELECT billing.enter_project(gen_random_uuid())",  # nor any function that moves money
        ):
            assert refusal(connection, statement) == "InsufficientPrivilege", statement


async def test_every_table_forces_row_level_security_and_neither_role_is_above_it(filled: Service) -> None:
    tables = await filled.rows(
        "SELECT c.relname, c.relrowsecurity, c.relforcerowsecurity FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'billing' AND c.relkind = 'r'"
        " AND c.relname <> 'schema_version' ORDER BY 1"
    )
    assert tables == [(table, True, True) for table in TABLES]
    roles = await filled.rows(
        "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname LIKE 'threadloom_b%%'"
    )
    assert roles == [(False,) * 4] * 2


def is_ours(name: str | None, kind: str, _parent: object) -> bool:
    return name == SCHEMA if kind == "schema" else True


def test_all_migrations_together_are_the_schema_and_may_run_again(url: str) -> None:
    databases.migrate(url)
    engine = create_engine(sqlalchemy_url(url))
    options = {
        "include_schemas": True,
        "include_name": is_ours,
        "version_table": "schema_version",
        "version_table_schema": SCHEMA,
        "compare_type": True,
        "compare_server_default": True,
    }
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, Base.metadata) == []
    finally:
        engine.dispose()


def test_a_migration_without_its_settings_says_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BILLING_MIGRATION_URL", "BILLING_ROLE_PASSWORD", "BILLING_ENGINE_ROLE_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert main() == 1
    assert "BILLING_ROLE_PASSWORD" in capsys.readouterr().err
