"""A fresh, migrated database for every test: migrated once, cloned afterwards."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from deploy.local.service_programs import ENGINE_ROLE, REQUEST_ROLE, as_role

REQUEST_PASSWORD = "request-password-of-tests"
ENGINE_PASSWORD = "engine-password-of-tests"
TEMPLATE = "threadloom_template"

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """One database: its name and its address for the superuser and both roles of conversation."""

    name: str
    admin_url: str

    @property
    def request_url(self) -> str:
        """Its address for the request role."""
        return as_role(self.admin_url, REQUEST_ROLE, REQUEST_PASSWORD)

    @property
    def engine_url(self) -> str:
        """Its address for the engine role."""
        return as_role(self.admin_url, ENGINE_ROLE, ENGINE_PASSWORD)


def at_port(url: str, port: int) -> str:
    """The same database through a proxy on another port of this machine."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}"))


def in_database(url: str, name: str) -> str:
    """Another database of the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def make_template(server_url: str) -> None:
    """Creates the template database and migrates it to head."""
    from services.conversation.migrate import migrate  # slow to import; only needed once a session

    _execute(server_url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    migrate(in_database(server_url, TEMPLATE), REQUEST_PASSWORD, ENGINE_PASSWORD)


@contextlib.contextmanager
def fresh_database(server_url: str) -> Iterator[Database]:
    """A clone of the template, dropped at the end even when somebody is still connected."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    names = {"name": sql.Identifier(name), "template": sql.Identifier(TEMPLATE)}
    _execute(server_url, sql.SQL("CREATE DATABASE {name} TEMPLATE {template}").format(**names))
    try:
        yield Database(name, in_database(server_url, name))
    finally:
        _execute(server_url, sql.SQL("DROP DATABASE {name} WITH (FORCE)").format(**names))


def _execute(url: str, statement: sql.Composed) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
