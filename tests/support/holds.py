"""Holds an INSERT of ours at a named point inside Postgres, so that a test can kill exactly there.

A trigger made by the test waits for an advisory lock the test holds. Mind that a held
backend goes on after its client was killed: released, its statement still happens, as
in a real freeze; `drop` ends it instead. Our own sessions give up after their
`statement_timeout` (5 s).
"""

import contextlib
import itertools
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from deploy.local.processes import wait_until
from threadloom.conversation.v1.run_event_pb2 import RunEvent

SCHEMA = "conversation"
WAIT_SECONDS = 10.0

_keys = itertools.count(7_500_000)

CREATE_TRIGGER = """
CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_catalog.pg_advisory_lock_shared({key});
  PERFORM pg_catalog.pg_advisory_unlock_shared({key});
  IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;  -- NEW would be NULL, and the row would stay
  RETURN NEW;
END $$;
CREATE {kind} {name} {moment} {operation} ON {table} {timing} FOR EACH ROW WHEN ({condition})
EXECUTE FUNCTION {function}();
"""
# Before the row is written, or once all is written and the COMMIT has arrived: then only the answer is missing.
ROW = {"kind": "TRIGGER", "moment": "BEFORE", "timing": ""}
COMMIT = {"kind": "CONSTRAINT TRIGGER", "moment": "AFTER", "timing": "DEFERRABLE INITIALLY DEFERRED"}

# Who waits for our key: the two halves of a bigint key are classid and objid.
CAUGHT = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Hold:
    """Holds rows of a table that meet an SQL condition over NEW, of a DELETE over OLD; from `__enter__` to `release`.

    With `at_commit` it holds the COMMIT of a transaction that wrote such a row.
    """

    def __init__(
        self,
        admin_url: str,
        table: str,
        condition: str,
        operation: str = "INSERT",
        at_commit: bool = False,
        schema: str = SCHEMA,
    ) -> None:
        self._url, self._table, self._condition, self._operation = admin_url, table, condition, operation
        self._moment = COMMIT if at_commit else ROW
        self._key = next(_keys)
        self._function = sql.Identifier(schema, f"hold_{self._key}")
        self._names = {"name": sql.Identifier(f"hold_{self._key}"), "table": sql.Identifier(schema, table)}

    def __enter__(self) -> Self:
        self._connection = psycopg.connect(self._url, autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(%s)", [self._key])
        statement = sql.SQL(CREATE_TRIGGER).format(
            function=self._function,
            key=sql.Literal(self._key),
            operation=sql.SQL(self._operation),
            condition=sql.SQL(self._condition),
            **{part: sql.SQL(words) for part, words in self._moment.items()},
            **self._names,
        )
        self._connection.execute(statement)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # A Postgres the test killed took the lock with it; one that is still away is the test's own.
        with contextlib.suppress(psycopg.OperationalError):
            self._remove()
            return
        with contextlib.suppress(psycopg.OperationalError):
            self._connection = psycopg.connect(self._url, autocommit=True)
            self._remove()

    def _remove(self) -> None:
        self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.execute(sql.SQL("DROP TRIGGER {name} ON {table}").format(**self._names))
        self._connection.execute(sql.SQL("DROP FUNCTION {}()").format(self._function))
        self._connection.close()

    def caught(self) -> list[int]:
        """The backends that wait here."""
        return [pid for (pid,) in self._connection.execute(CAUGHT, [self._key]).fetchall()]

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Waits until a backend is held. Raises TimeoutError. Blocks: use `asyncio.to_thread` beside a client."""
        if not wait_until(lambda: bool(self.caught()), seconds):
            raise TimeoutError(f"nothing was held at {self._table} ({self._condition}) within {seconds} s")

    def release(self) -> None:
        """Lets what is held go on, and all that comes."""
        self._connection.execute("SELECT pg_advisory_unlock(%s)", [self._key])

    def drop(self) -> None:
        """Ends the held backends: what they were about to write is lost, as if it never arrived."""
        for pid in self.caught():
            self._connection.execute("SELECT pg_terminate_backend(%s)", [pid])


def hold_event(admin_url: str, kind: str, after_seq: int = 0) -> Hold:
    """Holds the insert of an event of a kind (`text_delta`, `run_finished`) that comes after a seq."""
    number = RunEvent.DESCRIPTOR.fields_by_name[kind].number
    return Hold(admin_url, "run_events", f"NEW.kind = {number} AND NEW.seq > {after_seq}")
