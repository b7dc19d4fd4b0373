"""Starting a run: one message, one run, one effect per request (durability.md 22, 23)."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from uuid import UUID

import psycopg
import psycopg_pool
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kit.callers import Caller
from kit.db import commit_as, transaction
from kit.errors import ServiceError, thread_not_found, unavailable
from kit.ids import new_id
from services.conversation import limits
from services.conversation.cancelling import Cancelling
from services.conversation.domain import checks, events
from services.conversation.domain.titles import derive_title
from services.conversation.following import Followed
from services.conversation.ownership import Ownership
from services.conversation.runner import Runner
from services.conversation.store import queue, runs, starts, watch
from services.conversation.store.owning import ClaimedRun
from services.conversation.store.runs import RunRow
from services.conversation.store.starts import KnownKey, NewRun, RequestKey, Started
from threadloom.conversation.v1.conversation_service_pb2 import RunRequest
from threadloom.conversation.v1.run_event_pb2 import RunEvent
from threadloom.conversation.v1.run_pb2 import IfRunning, RunEventBatch, RunOptions

RUN_METHOD = "Run"
# Each round lost to another request has left a key or a run that decides the next one.
ROUNDS = 5


@dataclass(frozen=True)
class Admitted:
    """The run to follow from its start; `first` when it was started by this very call."""

    run: Followed
    first: RunEventBatch | None = None


def body_digest(request: RunRequest) -> bytes:
    """What tells two bodies under one key apart."""
    bare = RunRequest()
    bare.CopyFrom(request)
    bare.request_id = ""
    return sha256(bare.SerializeToString(deterministic=True)).digest()


def check_known(known: KnownKey, body: bytes) -> None:
    """Raises IDEMPOTENCY_KEY_REUSED when the key came with another body."""
    if known.body_sha256 != body:
        raise ServiceError(
            "IDEMPOTENCY_KEY_REUSED", "This Idempotency-Key was used for another request. Use a new key."
        )


class Admission:
    """Lets runs in. `default_model` serves threads and requests that name none.

    `engine` and `pool` are of the request role.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        pool: psycopg_pool.AsyncConnectionPool,
        runner: Runner,
        ownership: Ownership,
        cancelling: Cancelling,
        default_model: str,
    ) -> None:
        self._engine, self._pool, self._runner, self._cancelling = engine, pool, runner, cancelling
        self._ownership, self._default_model = ownership, default_model
        self._starting: set[asyncio.Task[Admitted]] = set()

    async def start(self, caller: Caller, thread_id: UUID, request: RunRequest) -> Admitted:
        """Saves the message and starts its run, or finds the run an equal request started before."""
        if self._runner.is_draining:
            raise unavailable("This process is shutting down. Try again.", retry_after=0.1)
        if not self._ownership.holds_lease:
            raise unavailable("This process has lost touch with the database. Try again.", retry_after=0.5)
        text = checks.check_parts(list(request.parts))
        checks.check_options(request.options)
        body = body_digest(request)
        key = self._key(caller, request)
        kept: UUID | None = None
        for _ in range(ROUNDS):
            new = self._new_run(caller, thread_id, request, text, kept)
            try:
                return await self._start_whole(caller, new, key, body)
            except IntegrityError as error:
                found = await self._after_conflict(caller, new, key, body, error)
            if isinstance(found, Admitted):
                return found
            kept = found
        raise unavailable("Too many requests for this conversation at once. Try again.")

    def _key(self, caller: Caller, request: RunRequest) -> RequestKey | None:
        checks.check_word("request_id", request.request_id, limits.REQUEST_ID_CHARS)
        if not request.request_id or caller.project is None:
            return None
        return RequestKey(caller.project, caller.key, RUN_METHOD, request.thread_id, request.request_id)

    def _new_run(self, caller: Caller, thread_id: UUID, request: RunRequest, text: str, kept: UUID | None) -> NewRun:
        user_message_id = kept or new_id()
        first = events.run_started(str(user_message_id), request.options.model)
        events.number([first], 1)
        assert caller.project is not None
        return NewRun(
            run_id=new_id(),
            project_id=caller.project,
            thread_id=thread_id,
            worker_id=self._ownership.worker_id,
            user_message_id=user_message_id,
            reply_message_id=new_id(),
            api_call_id=new_id(),
            model=request.options.model,
            default_model=self._default_model,
            options=request.options.SerializeToString(),
            parts=RunRequest(parts=request.parts).SerializeToString(),
            text=text,
            title=derive_title(text),
            first_event=first.SerializeToString(),
            is_kept=kept is not None,
            may_wait=request.options.if_running in (IfRunning.IF_RUNNING_ENQUEUE, IfRunning.IF_RUNNING_INTERRUPT),
            is_interrupt=request.options.if_running == IfRunning.IF_RUNNING_INTERRUPT,
            cancel_after_ms=request.options.cancel_after_disconnect.ToMilliseconds(),
        )

    async def _start_whole(self, caller: Caller, new: NewRun, key: RequestKey | None, body: bytes) -> Admitted:
        """A caller that leaves must not stop a start half-way: committed, but begun by nobody."""
        task = asyncio.create_task(self._start(caller, new, key, body))
        self._starting.add(task)
        task.add_done_callback(self._started)
        return await asyncio.shield(task)

    def _started(self, task: "asyncio.Task[Admitted]") -> None:
        self._starting.discard(task)
        if not task.cancelled():
            task.exception()  # the caller got it, or has left

    async def _start(self, caller: Caller, new: NewRun, key: RequestKey | None, body: bytes) -> Admitted:
        if not new.may_wait and not new.is_kept:
            started = await self._start_at_once(caller, new, key, body)
            return self._begun(new, started)
        active: UUID | None = None
        async with transaction(self._engine, caller) as tx:
            await self._take_key(tx, new, key, body)
            if new.may_wait:
                active = await self._enqueue(tx, new)
            found = await starts.start_run(tx, new) if active is None else None
            if found is None and active is None:
                raise thread_not_found()
            if new.cancel_after_ms:
                await watch.insert(tx, new, limits.WATCH_LEASE_SECONDS)
        if found is None:
            return await self._queued(caller, new, active)
        return self._begun(new, found)

    async def _start_at_once(self, caller: Caller, new: NewRun, key: RequestKey | None, body: bytes) -> Started:
        """The usual start, in one round trip: nothing in it depends on an answer. Without the thread it writes nothing.

        Raises IntegrityError when an equal request or an active run is in the way.
        """
        statements = [starts.start(new)]
        if key is not None:
            statements.insert(0, starts.take_key(new, key, body))
        if new.cancel_after_ms:
            statements.append(watch.begin(new, limits.WATCH_LEASE_SECONDS))
        try:
            rows = await commit_as(self._pool, caller, statements)
        except psycopg.IntegrityError as error:
            raise IntegrityError("a start", None, error) from error
        if not rows:
            raise thread_not_found()
        return Started(*rows[0])

    def _begun(self, new: NewRun, started: Started) -> Admitted:
        row = ClaimedRun(
            id=new.run_id,
            project_id=new.project_id,
            user_id=started.user_id,
            thread_id=new.thread_id,
            user_message_id=new.user_message_id,
            reply_message_id=new.reply_message_id,
            model=started.model,
            options=new.options,
            epoch=1,
            takeovers=0,
            is_cancelled=False,
            created_at=datetime.now(UTC),
            age_seconds=0.0,
            system_prompt=started.system_prompt,
        )
        first = self._runner.begin(row, RunEvent.FromString(new.first_event), new.api_call_id)
        return Admitted(_new(new), first)

    async def _enqueue(self, tx: AsyncConnection, new: NewRun) -> UUID | None:
        """Puts the run behind the thread's active one, whose id it returns; without one the run may start."""
        is_seen, active = await queue.active_run(tx, new.thread_id)
        if not is_seen:
            raise thread_not_found()
        if active is None:
            return None
        if await queue.length(tx, new.thread_id) >= limits.QUEUED_RUNS:
            message = f"{limits.QUEUED_RUNS} messages wait in this conversation already. Wait for an answer."
            raise ServiceError("RUN_IN_PROGRESS", message, {"run_id": str(active)})
        await queue.enqueue(tx, new, is_head=new.is_interrupt)
        return active

    async def _queued(self, caller: Caller, new: NewRun, active: UUID | None) -> Admitted:
        """The run waits; in the way of an interrupt stands the active one. A cancel is a transaction of its own:

        it locks the run's row, and whoever ends the run locks the thread's after that.
        """
        if new.is_interrupt and active is not None:
            await self._cancelling.interrupt(caller, active)
        return Admitted(_new(new))

    async def _take_key(self, tx: AsyncConnection, new: NewRun, key: RequestKey | None, body: bytes) -> None:
        """Binds the key to the run, so that of two equal requests one waits here and then conflicts."""
        if key is None:
            return
        if not new.is_kept:
            await starts.insert_key(tx, key, body, new.run_id)
        elif not await starts.retake_key(tx, key, new.run_id):
            # Another retry of the same request took it first: the next round finds its run.
            raise IntegrityError("the key was retaken", None, LookupError(starts.ONE_KEY))

    async def _after_conflict(
        self, caller: Caller, new: NewRun, key: RequestKey | None, body: bytes, error: IntegrityError
    ) -> Admitted | UUID | None:
        """What decided against the start: an equal request's run, its kept message, or another run (raised)."""
        async with transaction(self._engine, caller) as tx:
            active = await runs.get_active_run(tx, new.thread_id)
            known = await starts.find_key(tx, key) if key is not None else None
            if known is not None:
                check_known(known, body)
                if known.resource is None and _constraint(error) != starts.ONE_ACTIVE_RUN:
                    return known.kept_message_id
            made = await runs.get_run(tx, known.resource) if known is not None and known.resource is not None else None
        if known is not None and known.resource is not None:
            if made is None:
                raise thread_not_found()
            if made.status == "queued" and new.is_interrupt and active is not None:
                await self._cancelling.interrupt(caller, active.id)  # the first time may have been cut off before
            return Admitted(followed(made))
        if active is not None and not new.may_wait:
            raise ServiceError(
                "RUN_IN_PROGRESS",
                "This conversation is being answered. Wait for the end, or cancel it.",
                {"run_id": str(active.id)},
            )
        if _constraint(error) in (starts.ONE_ACTIVE_RUN, starts.ONE_KEY):
            # What stood in the way ended a moment ago.
            return known.kept_message_id if known is not None else None
        raise error


def followed(row: RunRow) -> Followed:
    """A stored run as its followers name it."""
    ends_without = RunOptions.FromString(row.options).HasField("cancel_after_disconnect")
    return Followed(row.id, row.project_id, row.thread_id, row.reply_message_id, ends_without)


def _new(run: NewRun) -> Followed:
    return Followed(run.run_id, run.project_id, run.thread_id, run.reply_message_id, run.cancel_after_ms > 0)


def _constraint(error: IntegrityError) -> str:
    diagnostics = getattr(error.orig, "diag", None)
    return getattr(diagnostics, "constraint_name", None) or str(error.orig)
