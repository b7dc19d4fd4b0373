"""What Postgres holds, read as its superuser, and what must be true of it after any failure."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from tests.fakes.calls import Call
from tests.support.http import Answer, Client
from threadloom.conversation.v1.run_event_pb2 import RunEvent

SCHEMAS = ("conversation", "billing")
# Leases are renewed all the time; everything else may only change when something happens.
RESTLESS = (("conversation", "workers"),)
CUT = frozenset(("cut",))

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class RunFacts:
    """The newest run of a thread."""

    id: UUID
    status: str
    worker_id: UUID | None
    epoch: int
    takeovers: int


class Record:
    """One database. `url` must reach it whatever a test does to proxies."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, statement: LiteralString | sql.Composed, *parameters: Any) -> Rows:
        """What a query finds."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            return connection.execute(statement, parameters).fetchall()

    def run(self, thread: str) -> RunFacts | None:
        """The newest run of a thread."""
        found = self.rows(
            "SELECT id, status, worker_id, epoch, takeovers FROM conversation.ai_runs WHERE thread_id = %s"
            " ORDER BY created_at DESC LIMIT 1",
            thread,
        )
        return RunFacts(*found[0]) if found else None

    def events(self, run: UUID) -> list[RunEvent]:
        """A run's log."""
        found = self.rows("SELECT payload FROM conversation.run_events WHERE run_id = %s ORDER BY seq", run)
        return [RunEvent.FromString(payload) for (payload,) in found]

    def calls(self) -> dict[str, tuple[str, bool]]:
        """{id: (status, whether it was recorded as about to be made)} of every attempt at the provider."""
        found = self.rows("SELECT id::text, status, rates IS NOT NULL FROM conversation.api_calls")
        return {id: (status, is_sent) for id, status, is_sent in found}

    def snapshot(self) -> dict[str, Counter[str]]:
        """Every row of every table of both services, except leases."""
        query = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname = ANY(%s) ORDER BY 1, 2"
        names = [name for name in self.rows(query, list(SCHEMAS)) if name not in RESTLESS]
        return {".".join(name): self._table(*name) for name in names}

    def _table(self, *name: str) -> Counter[str]:
        statement = sql.SQL("SELECT t::text FROM {} AS t").format(sql.Identifier(*name))
        return Counter(row for (row,) in self.rows(statement))

    def check_at_rest(self) -> None:
        """Nothing runs, streams or is on its way to the provider any more, and no log has a gap."""
        assert (
            self.rows("SELECT id, worker_id, epoch FROM conversation.ai_runs WHERE status IN ('running', 'queued')")
            == []
        )
        assert self.rows("SELECT id FROM conversation.ai_messages WHERE status = 'streaming'") == []
        assert self.rows("SELECT id, run_id FROM conversation.api_calls WHERE status IN ('started', 'sent')") == []
        gaps = self.rows(
            "SELECT r.id, r.last_seq, count(e.seq), min(e.seq), max(e.seq) FROM conversation.ai_runs r"
            " LEFT JOIN conversation.run_events e ON e.run_id = r.id GROUP BY r.id"
            " HAVING count(e.seq) <> r.last_seq OR min(e.seq) <> 1 OR max(e.seq) <> r.last_seq"
        )
        assert gaps == []

    def check_ledger(self, calls: list[Call], unseen_statuses: Set[str] = CUT) -> int:
        """The provider's list of calls is ours; returns how many of ours it never saw.

        Those were never about to be made, or they are of `unseen_statuses`: cut just before the request.
        """
        seen = [call.client_request_id or "" for call in calls]
        assert len(set(seen)) == len(seen), "a call was made twice"
        recorded = self.calls()
        assert set(seen) <= set(recorded), "a call that is not recorded"
        assert all(recorded[id][1] for id in seen), "a call was made before it was recorded as sent"
        unseen = {id: call for id, call in recorded.items() if id not in set(seen)}
        assert {status for status, is_sent in unseen.values() if is_sent} <= unseen_statuses, unseen
        return len(unseen)

    def check_shown(self, run: UUID, answer: Answer) -> None:
        """Everything a client saw is in the log, byte for byte, superseded or not."""
        log = {event.seq: event for event in self.events(run)}
        for frame in answer.frames:
            name, _, place = frame.id.rpartition(":")
            assert name == str(run)
            event = log[int(place.partition(".")[0])]
            if frame.event == "delta":
                assert frame.data["text"] == event.text_delta.text


def check_order(answer: Answer) -> None:
    """No frame came twice or out of order."""
    order = answer.order()
    assert order == sorted(set(order))


async def check_answer(record: Record, client: Client, conversation: str, answer: Answer) -> RunFacts:
    """The client ended with the stored text, saw nothing that is not recorded, and all is at rest."""
    assert answer.end is not None
    assert answer.end.event == "done", answer.end
    check_order(answer)
    question, reply = await client.insist(lambda: client.messages(conversation))
    assert (question["role"], reply["role"], reply["status"]) == ("user", "assistant", "complete")
    assert reply["content"] == answer.text
    assert answer.end.data.get("text", answer.text) == answer.text
    run = record.run(conversation)
    assert run is not None
    assert run.status == "succeeded"
    record.check_shown(run.id, answer)
    return run
