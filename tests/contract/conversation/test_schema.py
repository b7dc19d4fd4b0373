"""The migrations make what schema.py says, and every table keeps the house rules."""

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from kit.db import sqlalchemy_url
from services.conversation.migrate import main
from services.conversation.schema import SCHEMA, Base
from tests.contract.conversation.harness import Sql
from tests.support import databases
from tests.support.databases import Database

VERSION_TABLE = "schema_version"


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def is_ours(name: str | None, kind: str, _parent: object) -> bool:
    return name == SCHEMA if kind == "schema" else True


def test_all_migrations_together_are_the_schema(database: Database) -> None:
    engine = create_engine(sqlalchemy_url(database.admin_url))
    options = {
        "include_schemas": True,
        "include_name": is_ours,
        "version_table": VERSION_TABLE,
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


def test_migrating_again_changes_nothing(database: Database) -> None:
    look = (
        "SELECT c.relname, c.relkind, c.relacl::text, c.reloptions::text FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'conversation' ORDER BY 1"
    )
    policies = "SELECT * FROM pg_policies WHERE schemaname = 'conversation' ORDER BY tablename, policyname"
    before = rows(database.admin_url, look), rows(database.admin_url, policies)
    databases.migrate(database.admin_url)
    assert (rows(database.admin_url, look), rows(database.admin_url, policies)) == before


def test_a_migration_without_its_settings_says_which(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONVERSATION_MIGRATION_URL", "CONVERSATION_ROLE_PASSWORD", "CONVERSATION_ENGINE_ROLE_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert main() == 1
    assert "CONVERSATION_ROLE_PASSWORD" in capsys.readouterr().err


async def test_every_table_forces_row_level_security_and_has_a_policy(sql: Sql) -> None:
    found = await sql.rows(
        "SELECT c.relname, c.relrowsecurity, c.relforcerowsecurity,"
        " EXISTS (SELECT FROM pg_policies p WHERE p.schemaname = 'conversation' AND p.tablename = c.relname)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = 'conversation' AND c.relkind IN ('r', 'p') AND c.relname <> %s",
        VERSION_TABLE,
    )
    assert len(found) == len(Base.metadata.tables)
    assert [name for name, *kept in found if not all(kept)] == []


async def test_every_table_but_workers_names_its_project(sql: Sql) -> None:
    columns = await sql.rows(
        "SELECT table_name, column_name FROM information_schema.columns"
        " WHERE table_schema = 'conversation' AND is_nullable = 'NO'"
    )
    exempt = {"workers", VERSION_TABLE, "projects"}
    without = [name for name in await sql.tables() if (name, "project_id") not in columns and name not in exempt]
    assert without == []
    assert ("projects", "id") in columns


async def test_every_id_is_a_uuid_and_every_time_has_a_zone(sql: Sql) -> None:
    wrong = await sql.rows(
        "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'conversation'"
        " AND ((column_name IN ('id', 'project_id', 'thread_id', 'run_id') AND data_type <> 'uuid')"
        " OR data_type = 'timestamp without time zone' OR data_type = 'integer')"
    )
    assert wrong == []


async def test_no_policy_names_everybody(sql: Sql) -> None:
    policies = await sql.rows("SELECT tablename, roles::text[] FROM pg_policies WHERE schemaname = 'conversation'")
    assert [table for table, roles in policies if "public" in roles] == []
    open_to_all = await sql.rows(
        "SELECT table_name, privilege_type FROM information_schema.table_privileges"
        " WHERE table_schema = 'conversation' AND grantee = 'PUBLIC'"
    )
    assert open_to_all == []
