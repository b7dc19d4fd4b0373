"""A fresh, migrated database for every test: migrated once, cloned afterwards."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from deploy.local.service_programs import BILLING, CONVERSATION, RolePasswords, engine_url, request_url

# All different: a service with the password of another one's role is found out.
PASSWORDS = {
    CONVERSATION: RolePasswords("request-password-of-tests", "engine-password-of-tests"),
    BILLING: RolePasswords("billing-request-password-of-tests", "billing-engine-password-of-tests"),
}
TEMPLATE = "threadloom_template"

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """One database: its name and its address for the superuser and the roles of both services."""

    name: str
    admin_url: str

    @property
    def request_url(self) -> str:
        """Its address for conversation's request role."""
        return request_url(CONVERSATION, self.admin_url, PASSWORDS[CONVERSATION])

    @property
    def engine_url(self) -> str:
        """Its address for conversation's engine role."""
        return engine_url(CONVERSATION, self.admin_url, PASSWORDS[CONVERSATION])

    @property
    def billing_request_url(self) -> str:
        """Its address for billing's request role."""
        return request_url(BILLING, self.admin_url, PASSWORDS[BILLING])

    @property
    def billing_engine_url(self) -> str:
        """Its address for billing's engine role."""
        return engine_url(BILLING, self.admin_url, PASSWORDS[BILLING])


def at_port(url: str, port: int) -> str:
    """The same database through a proxy on another port of this machine."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}"))


def in_database(url: str, name: str) -> str:
    """Another database of the same server."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def make_template(server_url: str) -> None:
    """Creates the template database and migrates it to head."""
    _execute(server_url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    migrate(in_database(server_url, TEMPLATE))


def migrate(admin_url: str) -> None:
    """Makes all roles and brings the schemas of both services to head."""
    from services.billing.migrate import migrate as migrate_billing  # slow to import; only needed once a session
    from services.conversation.migrate import migrate as migrate_conversation

    migrate_conversation(admin_url, *astuple(PASSWORDS[CONVERSATION]))
    migrate_billing(admin_url, *astuple(PASSWORDS[BILLING]))


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
