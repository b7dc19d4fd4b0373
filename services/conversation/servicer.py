"""The RPCs of ConversationService: check, call, translate. No rules, no SQL."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from uuid import UUID

from grpc import aio
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kit import pages
from kit.callers import Caller, Role, current_caller, is_user_id
from kit.db import transaction
from kit.errors import ServiceError, invalid, not_found, thread_not_found, unavailable
from kit.ids import new_id, parse_id
from services.conversation import limits, translate
from services.conversation.admission import Admission, check_known, followed
from services.conversation.cancelling import CANCEL_SECONDS, Cancelling
from services.conversation.domain import checks
from services.conversation.following import Followed, Hub, cursor_expired
from services.conversation.ownership import Ownership
from services.conversation.runner import Runner
from services.conversation.store import messages, runs, starts, threads
from services.conversation.store.runs import RunRow
from services.conversation.store.starts import RequestKey
from services.conversation.watching import Watching
from threadloom.conversation.v1 import conversation_service_pb2 as api
from threadloom.conversation.v1 import conversation_service_pb2_grpc as api_grpc
from threadloom.conversation.v1.message_pb2 import Message
from threadloom.conversation.v1.run_pb2 import RunEventBatch, Trace
from threadloom.conversation.v1.thread_pb2 import Thread

Context = aio.ServicerContext[object, object]


def caller() -> Caller:
    """The calling user or service role; another service of ours has no threads to see."""
    found = current_caller.get()
    if found.project is None:
        raise ServiceError("FORBIDDEN", "Call this on behalf of a user or of a project's service role.")
    return found


def thread_id_of(text: str) -> UUID:
    """The id, or THREAD_NOT_FOUND: what cannot be an id names no thread."""
    found = parse_id(text)
    if found is None:
        raise thread_not_found()
    return found


class ConversationServicer(api_grpc.ConversationServiceServicer):
    """See conversation_service.proto."""

    def __init__(
        self,
        engine: AsyncEngine,
        admission: Admission,
        cancelling: Cancelling,
        hub: Hub,
        watching: Watching,
        runner: Runner,
        ownership: Ownership,
    ) -> None:
        self._watching = watching
        self._engine, self._admission, self._cancelling, self._hub = engine, admission, cancelling, hub
        self._runner, self._ownership = runner, ownership

    # ------------------------------------------------------------------ threads

    async def CreateThread(self, request: api.CreateThreadRequest, context: Context) -> api.CreateThreadResponse:
        """Creates a thread."""
        who = caller()
        checks.check_word("title", request.title, limits.TITLE_CHARS)
        checks.check_text("system_prompt", request.system_prompt, limits.TEXT_CHARS)
        checks.check_model("default_model", request.default_model)
        checks.check_word("request_id", request.request_id, limits.REQUEST_ID_CHARS)
        owner = _owner(who, request.user_id)
        try:
            return await self._create_thread(who, owner, request)
        except IntegrityError:
            return await self._created_before(who, request)

    async def _create_thread(
        self, who: Caller, owner: str, request: api.CreateThreadRequest
    ) -> api.CreateThreadResponse:
        assert who.project is not None
        id, key = new_id(), _create_key(who, request)
        async with transaction(self._engine, who) as tx:
            if key is not None:
                await starts.insert_key(tx, key, _create_digest(request), id)
            row = await threads.insert_thread(
                tx,
                id=id,
                project=who.project,
                user=owner,
                title=request.title,
                system_prompt=request.system_prompt,
                default_model=request.default_model,
            )
        return api.CreateThreadResponse(thread=translate.thread(row))

    async def _created_before(self, who: Caller, request: api.CreateThreadRequest) -> api.CreateThreadResponse:
        key = _create_key(who, request)
        async with transaction(self._engine, who) as tx:
            known = await starts.find_key(tx, key) if key is not None else None
            if known is None or known.resource is None:
                raise thread_not_found()  # its project is gone
            check_known(known, _create_digest(request))
            row = await threads.get_thread(tx, known.resource)
        if row is None:
            raise thread_not_found()
        return api.CreateThreadResponse(thread=translate.thread(row))

    async def ListThreads(self, request: api.ListThreadsRequest, context: Context) -> api.ListThreadsResponse:
        """Lists threads."""
        size = checks.page_size(request.page_size, limits.THREADS_PAGE, limits.THREADS_PAGE_MAX)
        before = pages.decode_time(request.page_token)
        async with transaction(self._engine, caller()) as tx:
            rows = await threads.list_threads(tx, before=before, limit=size + 1)
        found = [translate.thread(row) for row in rows]
        count = _page(found, size)
        last = rows[count - 1] if len(rows) > count else None
        token = pages.encode_time(last.updated_at, last.id) if last is not None else ""
        return api.ListThreadsResponse(threads=found[:count], next_page_token=token)

    async def GetThread(self, request: api.GetThreadRequest, context: Context) -> api.GetThreadResponse:
        """Reads a thread."""
        async with transaction(self._engine, caller()) as tx:
            row = await threads.get_thread(tx, thread_id_of(request.thread_id))
        if row is None:
            raise thread_not_found()
        return api.GetThreadResponse(thread=translate.thread(row))

    async def UpdateThread(self, request: api.UpdateThreadRequest, context: Context) -> api.UpdateThreadResponse:
        """Changes a thread."""
        checks.check_word("title", request.title, limits.TITLE_CHARS)
        checks.check_text("system_prompt", request.system_prompt, limits.TEXT_CHARS)
        checks.check_model("default_model", request.default_model)
        async with transaction(self._engine, caller()) as tx:
            row = await threads.update_thread(
                tx,
                id=thread_id_of(request.thread_id),
                title=request.title if request.HasField("title") else None,
                system_prompt=request.system_prompt if request.HasField("system_prompt") else None,
                default_model=request.default_model if request.HasField("default_model") else None,
            )
        if row is None:
            raise thread_not_found()
        return api.UpdateThreadResponse(thread=translate.thread(row))

    async def DeleteThread(self, request: api.DeleteThreadRequest, context: Context) -> api.DeleteThreadResponse:
        """Cancels the thread's run and deletes the thread."""
        who, id = caller(), thread_id_of(request.thread_id)
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline:
            async with transaction(self._engine, who) as tx:
                if await threads.get_thread(tx, id) is None:
                    raise thread_not_found()
                active = await threads.delete_idle_thread(tx, id)
            if active is None:
                return api.DeleteThreadResponse()
            await self._cancelling.clear_queue(who, id)
            if not await self._runner.cancel(active, CANCEL_SECONDS):
                # Whoever owns it loses it now, also a process that is frozen.
                claimed = await self._ownership.seize(active, only_unowned=False)
                if claimed is not None:
                    self._runner.take_over(claimed)
                    await self._runner.cancel(active, CANCEL_SECONDS)
        raise unavailable("The conversation is busy. Try again in a moment.")

    # ------------------------------------------------------------------ messages and traces

    async def ListMessages(self, request: api.ListMessagesRequest, context: Context) -> api.ListMessagesResponse:
        """Lists messages."""
        thread = thread_id_of(request.thread_id)
        size = checks.page_size(request.page_size, limits.MESSAGES_PAGE, limits.MESSAGES_PAGE_MAX)
        (after,) = pages.decode_numbers(request.page_token, 1)
        async with transaction(self._engine, caller()) as tx:
            await _require_thread(tx, thread)
            rows = await messages.list_messages(tx, thread=thread, after=after, limit=size + 1)
            shown = [await _shown(tx, row) for row in rows]
        count = _page(shown, size)
        token = pages.encode(rows[count - 1].position) if len(rows) > count else ""
        found = [message for message in shown[:count] if message is not None]
        return api.ListMessagesResponse(messages=found, next_page_token=token)

    async def ListTraces(self, request: api.ListTracesRequest, context: Context) -> api.ListTracesResponse:
        """Lists traces: of finished runs as stored, of the active one from its log."""
        thread = thread_id_of(request.thread_id)
        message = parse_id(request.message_id) if request.message_id else None
        if request.message_id and message is None:
            raise not_found("message")
        size = checks.page_size(request.page_size, limits.TRACES_PAGE, limits.TRACES_PAGE_MAX)
        position, ordinal = pages.decode_numbers(request.page_token, 2)
        async with transaction(self._engine, caller()) as tx:
            await _require_thread(tx, thread)
            active = await messages.active_run(tx, thread)
            rows = await messages.list_traces(
                tx, thread=thread, message=message, after=(position, ordinal), limit=size + 1
            )
            found = [
                (translate.recorded_trace(row.payload, str(row.run_id), str(row.message_id)), row.position, row.ordinal)
                for row in rows
            ]
            if len(found) <= size and active is not None and message in (None, active[1]):
                log = await messages.log_tail(tx, run=active[0], after_seq=0)
                live = translate.live_traces(log, str(active[0]), str(active[1]))
                # The run may have ended since the stored traces were read, or before: each place once.
                stored = {place[1:] for place in found}
                places = ((trace, active[2], at) for at, trace in enumerate(live, 1))
                found += [one for one in places if one[1:] > (position, ordinal) and one[1:] not in stored]
        traces = [trace for trace, *_ in found]
        count = _page(traces, size)
        token = pages.encode(*found[count - 1][1:]) if len(found) > count else ""
        return api.ListTracesResponse(traces=traces[:count], next_page_token=token)

    # ------------------------------------------------------------------ runs

    async def Run(self, request: api.RunRequest, context: Context) -> AsyncIterator[api.RunResponse]:
        """Starts a run and follows it."""
        async for batch in self.start(request):
            yield api.RunResponse(batch=batch)

    async def StartRun(self, request: api.StartRunRequest, context: Context) -> api.StartRunResponse:
        """Starts a run."""
        admitted = await self._admission.start(caller(), thread_id_of(request.run.thread_id), request.run)
        row = await self._find_run("", str(admitted.run.run_id))
        return api.StartRunResponse(run=translate.run(row))

    async def Follow(self, request: api.FollowRequest, context: Context) -> AsyncIterator[api.FollowResponse]:
        """Follows a run."""
        async for batch in self.follow(request):
            yield api.FollowResponse(batch=batch)

    async def start(self, request: api.RunRequest) -> AsyncGenerator[RunEventBatch, None]:
        """Starts a run for the current caller; what Run and a relay tell of it."""
        who = caller()
        admitted = await self._admission.start(who, thread_id_of(request.thread_id), request)
        with self._counted(who, admitted.run):
            async for batch in self._hub.follow(admitted.run, 0, admitted.first):
                yield batch

    async def follow(self, request: api.FollowRequest) -> AsyncGenerator[RunEventBatch, None]:
        """What Follow and a relay tell the current caller of a run."""
        row = await self._find_run(request.thread_id, request.run_id)
        after = _checked_after(row, request.after_seq)
        run = followed(row)
        with self._counted(caller(), run):
            async for batch in self._hub.follow(run, after):
                yield batch

    def _counted(self, who: Caller, run: Followed) -> AbstractContextManager[None]:
        """Counts a follower who keeps the run going; a project's own services do not."""
        counts = run.ends_without and who.role is Role.USER
        return self._watching.follower(run.run_id) if counts else nullcontext()

    async def CancelRun(self, request: api.CancelRunRequest, context: Context) -> api.CancelRunResponse:
        """Cancels a run and waits, within bounds, for its end."""
        who = caller()
        if request.include_queued and request.run_id:
            raise invalid("include_queued", "include_queued cancels all runs of a thread: leave run_id out.")
        row = await self._find_run(request.thread_id, request.run_id)
        if request.include_queued:
            await self._cancelling.clear_queue(who, row.thread_id)
        return api.CancelRunResponse(run=translate.run(await self._cancelling.cancel(who, row)))

    async def GetRun(self, request: api.GetRunRequest, context: Context) -> api.GetRunResponse:
        """Reads a run."""
        return api.GetRunResponse(run=translate.run(await self._find_run("", request.run_id)))

    async def _find_run(self, thread_text: str, run_text: str) -> RunRow:
        """A run the caller may see: the one named, or the active one of the thread."""
        run_id = parse_id(run_text)
        if run_text and run_id is None:
            raise not_found("run")
        async with transaction(self._engine, caller()) as tx:
            thread = None
            if thread_text or run_id is None:
                thread = thread_id_of(thread_text)
                await _require_thread(tx, thread)
            if run_id is not None:
                row = await runs.get_run(tx, run_id)
            else:
                assert thread is not None
                row = await runs.get_active_run(tx, thread)
        if row is None or (thread is not None and row.thread_id != thread):
            raise not_found("run")
        return row


def _page(entries: Sequence[Thread | Message | Trace | None], most: int) -> int:
    """How many of the entries go out together."""
    return pages.fitting([entry.ByteSize() if entry is not None else 0 for entry in entries], most, limits.LIST_BYTES)


async def _require_thread(tx: AsyncConnection, id: UUID) -> None:
    if await threads.get_thread(tx, id) is None:
        raise thread_not_found()


async def _shown(tx: AsyncConnection, row: messages.MessageRow) -> Message | None:
    if row.status != "streaming":
        return translate.message(row)
    return translate.streaming_message(row, await messages.log_tail(tx, run=row.run_id, after_seq=row.text_seq))


def _owner(who: Caller, asked: str) -> str:
    """For whom a thread is created: a user for itself, the service role for whom it names."""
    if who.role is Role.USER:
        if asked and asked != who.user:
            raise invalid("user_id", "Only the service role creates conversations for somebody else.")
        return who.user
    if not is_user_id(asked):
        raise invalid("user_id", "The service role must name the user the conversation is for.")
    return asked


def _create_key(who: Caller, request: api.CreateThreadRequest) -> RequestKey | None:
    if not request.request_id or who.project is None:
        return None
    return RequestKey(who.project, who.key, "CreateThread", "", request.request_id)


def _create_digest(request: api.CreateThreadRequest) -> bytes:
    bare = api.CreateThreadRequest()
    bare.CopyFrom(request)
    bare.request_id = ""
    return sha256(bare.SerializeToString(deterministic=True)).digest()


def _checked_after(row: RunRow, after: int) -> int:
    """Where following begins; a cursor at the end of a finished run gets its terminal event again."""
    if after < 0:
        raise invalid("after_seq", "after_seq must not be negative.")
    if row.status in ("running", "queued"):
        if after > row.last_seq:
            raise invalid("after_seq", "This run has not come that far.")
        return after
    after = min(after, row.last_seq - 1)
    if row.log_trimmed and after < row.last_seq - 1:
        raise cursor_expired(row.thread_id)
    return after
