"""A service's schema and roles, made or brought to their newest form. Safe to run again."""

from collections.abc import Mapping
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from psycopg import sql
from sqlalchemy import create_engine, text

from kit.db import sqlalchemy_url

# Any number: one migration at a time in a database.
MIGRATION_LOCK = 7_400_001


# transaction_timeout, which bounds what a frozen process can lock, is new in 17.
OLDEST_POSTGRES = 170_000


class PostgresTooOld(Exception):
    """The server lacks something the services stand on."""


def migrate(url: str, schema: str, passwords: Mapping[str, str], scripts: Path) -> None:
    """Connects as the owner at `url`, makes or updates the roles (name to password) and migrates to head."""
    ensure_roles(url, passwords)
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({MIGRATION_LOCK})"))
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {schema}"))
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(scripts))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
    finally:
        engine.dispose()


def ensure_roles(url: str, passwords: Mapping[str, str]) -> None:
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
