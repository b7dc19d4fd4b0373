"""Makes the two roles and brings the schema to its newest form. Safe to run again.

python -m services.conversation.migrate
"""

import os
import sys
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from psycopg import sql
from sqlalchemy import create_engine, text

from kit.db import sqlalchemy_url
from services.conversation.schema import SCHEMA

REQUEST_ROLE = "threadloom_conversation"
ENGINE_ROLE = "threadloom_conversation_engine"
# Any number: one migration at a time in a database.
MIGRATION_LOCK = 7_400_001


# transaction_timeout, which bounds what a frozen owner can lock, is new in 17.
OLDEST_POSTGRES = 170_000


class PostgresTooOld(Exception):
    """The server lacks something the service stands on."""


def migrate(url: str, request_password: str, engine_password: str) -> None:
    """Connects as the owner at `url`, makes or updates the roles and migrates to head."""
    ensure_roles(url, {REQUEST_ROLE: request_password, ENGINE_ROLE: engine_password})
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({MIGRATION_LOCK})"))
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
    finally:
        engine.dispose()


def ensure_roles(url: str, passwords: dict[str, str]) -> None:
    """Creates the login roles that are missing and sets their passwords. Raises PostgresTooOld."""
    with psycopg.connect(url, autocommit=True) as connection:
        version = connection.info.server_version
        if version < OLDEST_POSTGRES:
            raise PostgresTooOld(f"This is PostgreSQL {version // 10_000}; Threadloom needs 17 or newer.")
        connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
        for role, password in passwords.items():
            name = sql.Identifier(role)
            if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone():
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN NOBYPASSRLS").format(name))
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, sql.Literal(password)))


def main() -> int:
    """Reads CONVERSATION_MIGRATION_URL and the two roles' passwords; says what is missing."""
    names = ("CONVERSATION_MIGRATION_URL", "CONVERSATION_ROLE_PASSWORD", "CONVERSATION_ENGINE_ROLE_PASSWORD")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        print(f"Set {', '.join(missing)}: the owner's address and the passwords of both roles.", file=sys.stderr)
        return 1
    try:
        migrate(*(os.environ[name] for name in names))
    except PostgresTooOld as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
