"""Everything that may happen to money, in any order: the rules of a schedule, and what holds at its end.

Each schedule has a project of its own in a `World` that many share. No rule's choice depends on
what happened before, so that Hypothesis can draw a whole schedule whatever the timing.
"""

import asyncio
import functools
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kit.errors import ServiceError
from tests.contract.conversation.harness import Person, Reading
from tests.contract.money.asks import ASKS, Ask
from tests.contract.money.faults import METHODS, Fault
from tests.contract.money.reconciliation import CALLS, Booked, differences
from tests.contract.money.world import PATIENT, Tenant, World, alarms, unexpected
from tests.support.books import BREACHES
from threadloom.conversation.v1.conversation_service_pb2 import RunRequest

STEPS = 10  # of a schedule at most: enough for three runs and what befalls them
SCHEDULES_KEPT = 40  # rows of so many are looked over together, so that what happens late is seen too
REACH_SECONDS = 0.1  # a run that does not reach its gate was refused, or ended before it
GIVE_UP_SECONDS = 0.8  # an impatient service gives up all attempts of a run in this time
FINISH_SECONDS = 30.0  # far more than any schedule needs
START_SECONDS = 10.0

# Its owner is gone: whoever looks next claims the run, while the old owner does not know yet.
CRASH = """
UPDATE conversation.ai_runs SET epoch = epoch + 1, worker_id = gen_random_uuid()
WHERE thread_id = %s AND status = 'running'
"""
EXPIRE = """
UPDATE billing.holds SET expires_at = clock_timestamp() - interval '1 s'
WHERE project_id = %s AND status = 'open' RETURNING api_call_id::text
"""
POSTPONE = "UPDATE conversation.outbox SET due_at = clock_timestamp() + interval '1 hour' WHERE project_id = %s"
# Also of rows that are on their way at this moment: both services send them then.
HURRY = "UPDATE conversation.outbox SET due_at = clock_timestamp() WHERE project_id = %s"
LATE_ROWS = HURRY + " AND due_at > clock_timestamp() + interval '2 s'"
RUNNING = "SELECT id::text FROM conversation.ai_runs WHERE project_id = %s AND status = 'running'"
WAITING = "SELECT count(*) FROM conversation.outbox WHERE project_id = %s"
KNOWN = "SELECT id::text FROM conversation.api_calls"
ACCOUNTS = "SELECT user_id, period, held_nano, spent_nano FROM billing.accounts WHERE project_id = %s"
OPEN_HOLDS = "SELECT api_call_id FROM billing.holds WHERE project_id = %s AND status = 'open'"

# Asked after every step, not only at the end.
PASSED_LIMITS = "more was held and spent than a limit allows"

# A question costs about 50,000 nano-USD and an answer of 10 tokens 20,000.
MONEY = st.integers(0, 12).map(lambda steps: steps * 50_000)
LIMITS = st.one_of(st.none(), MONEY, MONEY)
THREADS = st.integers(0, 2)
SERVICES = st.integers(0, 1)
# Of the next requests of a kind.
LOSSES = st.tuples(st.sampled_from(METHODS), st.sampled_from(list(Fault)), st.integers(1, 2))
# When something befalls a run.
MOMENTS = st.sampled_from(["now", "gate", "retry"])
# Gates and failures are named so, over all schedules.
_names = (f"g{number}" for number in itertools.count(1))


@dataclass
class Talk:
    """A thread of a schedule; `thread` is empty until something is asked in it."""

    user: str
    thread: str = ""
    request: RunRequest | None = None
    reading: Reading | None = None
    gate: str = ""
    run_id: str = ""
    service: int = 0  # where it was asked


@dataclass
class Seen:
    """What a schedule did that excuses something."""

    expired: set[str] = field(default_factory=set)
    hanging: bool = False
    stopped: set[str] = field(default_factory=set)  # runs that hang, cancelled at the end
    resting: float = 0.0  # when it ended, by the monotonic clock
    gates: list[str] = field(default_factory=list)


def told(step: Callable[..., None]) -> Callable[..., None]:
    """A step that keeps within the limits, and is told when the schedule fails.

    Hypothesis would play it once more to tell it, and say only that it is flaky when it goes well then:
    timing decides too.
    """

    @functools.wraps(step)
    def play(self: "Schedule", **drawn: object) -> None:
        self.story.append(f"{step.__name__}({', '.join(f'{name}={value!r}' for name, value in drawn.items())})")
        try:
            step(self, **drawn)
            self.check_limits()
        except Exception as error:
            self.failures.append("\n".join([*self.story, *traceback.format_exception(error)]))
            raise

    return play


async def may_be_gone(work: Awaitable[object]) -> bool:
    """Does it; a run or thread that is gone is no fault. False when somebody else has it this moment."""
    try:
        await work
    except ServiceError as error:
        if error.reason not in ("NOT_FOUND", "UNAVAILABLE"):
            raise
        return error.reason != "UNAVAILABLE"
    return True


class Schedule(RuleBasedStateMachine):
    """One schedule. `failures` gets its story when it fails."""

    def __init__(self, world: World, failures: list[str]) -> None:
        super().__init__()
        self.story, self.failures = list[str](), failures
        self._world, self._do = world, world.do
        self._tenant: Tenant = self._do(world.tenant())
        self._talks = [Talk("alice"), Talk("alice"), Talk("bob")]
        self._limits: dict[str, int] = {}  # by user; '' is the whole project
        self._seen = Seen()
        self._alarms = alarms()

    @property
    def _project(self) -> UUID:
        return self._tenant.project

    # ------------------------------------------------------------------ money

    @initialize(
        limits=st.fixed_dictionaries(dict.fromkeys(("", "alice", "bob"), LIMITS)),
        lost=st.lists(LOSSES, max_size=2),
        asks=st.lists(st.tuples(THREADS, ASKS, SERVICES), min_size=1, max_size=3),
    )
    @told
    def begin(
        self, limits: dict[str, int | None], lost: list[tuple[str, Fault, int]], asks: list[tuple[int, Ask, int]]
    ) -> None:
        """Limits are there before anything is spent: one that is set below what was spent is passed already."""
        for user, nano in limits.items():
            if nano is not None:
                self._set_limit(user, nano)
        for loss in lost:
            self._world.faults.add(str(self._project), *loss)
        for talk, ask, service in asks:
            self._do(self._ask(self._talks[talk], ask, service))

    @rule(user=st.sampled_from(["", "alice", "bob"]), more=MONEY)
    @told
    def raise_limit(self, user: str, more: int) -> None:
        if user in self._limits:
            self._set_limit(user, self._limits[user] + more)

    def check_limits(self) -> None:
        """What is held counts too, so no limit is passed at any moment."""
        if self._limits:
            found = self._do(self._world.sql.rows(BREACHES[PASSED_LIMITS]))
            assert found == [], f"{PASSED_LIMITS}: {found}"

    def _set_limit(self, user: str, nano: int) -> None:
        self._limits[user] = nano
        books = self._world.books
        self._do(books.quota(self._project, user, nano) if user else books.cap(self._project, nano))

    # ------------------------------------------------------------------ runs

    @rule(talk=THREADS, ask=ASKS, service=SERVICES)
    @told
    def ask(self, talk: int, ask: Ask, service: int) -> None:
        self._do(self._ask(self._talks[talk], ask, service))

    @rule(talk=THREADS, service=SERVICES)
    @told
    def ask_again(self, talk: int, service: int) -> None:
        """The client never heard the answer and sends its request once more."""
        found = self._used(talk)
        if found.request is not None:
            self._do(self._send(found, found.request, service))

    @rule(talk=THREADS, service=SERVICES, moment=MOMENTS)
    @told
    def cancel(self, talk: int, service: int, moment: str) -> None:
        self._do(self._cancel(self._used(talk), service, moment))

    @rule(talk=THREADS, moment=MOMENTS)
    @told
    def crash(self, talk: int, moment: str) -> None:
        self._do(self._crash(self._used(talk), moment))

    @rule(talk=THREADS, service=SERVICES)
    @told
    def delete(self, talk: int, service: int) -> None:
        self._do(self._delete(self._used(talk), service))

    @rule(talk=THREADS)
    @told
    def finish(self, talk: int) -> None:
        self._do(self._finish(self._used(talk)))

    # ------------------------------------------------------------------ the way to billing

    @rule(is_up=st.booleans())
    @told
    def change_way(self, is_up: bool) -> None:
        way = self._world.way
        way.mend() if is_up else way.cut()

    @rule(loss=LOSSES)
    @told
    def lose(self, loss: tuple[str, Fault, int]) -> None:
        self._world.faults.add(str(self._project), *loss)

    # ------------------------------------------------------------------ clocks

    @rule(what=st.sampled_from(["holds expire", "outbox waits", "outbox is due"]))
    @told
    def change_clock(self, what: str) -> None:
        match what:
            case "holds expire":
                self._do(self._expire())
            case "outbox waits":
                self._do(self._world.sql.rows(POSTPONE, self._project))
            case "outbox is due":
                self._do(self._world.sql.rows(HURRY, self._project))

    # ------------------------------------------------------------------ how

    async def _ask(self, talk: Talk, ask: Ask, service: int) -> None:
        name = next(_names)
        if not talk.thread:
            talk.thread = await self._person(talk, service).thread()
        request = ask.request(talk.thread, name, f"key of {name}")
        self._seen.hanging |= ask.hangs
        self._seen.gates.append(name)
        if await self._send(talk, request, service):
            talk.request, talk.gate = request, name

    async def _send(self, talk: Talk, request: RunRequest, service: int) -> bool:
        """Whether there is a run; it goes on."""
        reading = self._person(talk, service).send(request)

        async def has_begun() -> bool:
            return bool(reading.events) or reading.task.done()

        assert await self._world.until(has_begun, START_SECONDS)
        if not reading.events:
            assert reading.error is not None
            # What a client may be told before its run began; a refusal for money comes with the run.
            assert reading.error.reason in ("RUN_IN_PROGRESS", "NOT_FOUND"), reading.error
            return False
        talk.reading, talk.run_id, talk.service = reading, reading.run_id, service
        return True

    async def _cancel(self, talk: Talk, service: int, moment: str) -> bool:
        if not talk.run_id:
            return False
        await self._reach(talk, moment)
        return await may_be_gone(self._person(talk, service).cancel(talk.run_id))

    async def _crash(self, talk: Talk, moment: str) -> None:
        if talk.thread:
            await self._reach(talk, moment)
            await self._world.sql.rows(CRASH, talk.thread)

    async def _delete(self, talk: Talk, service: int) -> None:
        if talk.thread and await may_be_gone(self._person(talk, service).delete(talk.thread)):
            talk.thread, talk.request, talk.run_id = "", None, ""

    async def _finish(self, talk: Talk) -> None:
        if talk.gate:
            self._world.provider.open_gate(talk.gate)

        async def is_over() -> bool:
            return talk.reading is None or talk.reading.task.done()

        await self._world.until(is_over, REACH_SECONDS)

    async def _expire(self) -> None:
        """An hour passes; a call under way goes on without its hold."""
        rows = await self._world.sql.rows(EXPIRE, self._project)
        self._seen.expired |= {id for (id,) in rows}
        await self._world.upkeep.sweep()

    async def _reach(self, talk: Talk, moment: str) -> None:
        """Waits until the run is held at its gate, or waits to make its call again; not for long."""
        reading = talk.reading
        if moment == "now" or reading is None:
            return

        async def is_there() -> bool:
            if moment == "retry":
                is_met = any(event.trace_started.HasField("retry") for event in reading.events)
            else:
                is_met = any(call.held == talk.gate for call in self._world.provider.calls)
            return is_met or reading.task.done()

        await self._world.until(is_there, REACH_SECONDS)

    def _used(self, number: int) -> Talk:
        """One of the threads in which something was asked."""
        used = [talk for talk in self._talks if talk.reading is not None]
        return used[number % len(used)] if used else self._talks[0]

    def _person(self, talk: Talk, service: int) -> Person:
        return self._tenant.people[service][talk.user]

    # ------------------------------------------------------------------ the end

    @told
    def teardown(self) -> None:
        self._do(self._end())

    async def _end(self) -> None:
        await self._come_to_rest()
        problems = [problem async for problem in self._problems()]
        assert problems == [], "\n".join(problems)

    async def _come_to_rest(self) -> None:
        world, project = self._world, self._project
        self._seen.resting = time.monotonic()
        world.way.mend()
        world.faults.clear(str(project))
        for gate in self._seen.gates:
            world.provider.open_gate(gate)
        assert await world.until(self._is_at_rest, FINISH_SECONDS), await self._left()
        for talk in self._talks:
            if talk.reading is not None:
                await asyncio.wait_for(asyncio.shield(talk.reading.task), START_SECONDS)

    async def _is_at_rest(self) -> bool:
        running = await self._world.sql.rows(RUNNING, self._project)
        if self._seen.hanging:
            for (run,) in running:
                await self._stop_hanging(run)
        if (
            running
            or self._world.faults.under_way
            or any(call.outcome == "open" for call in self._world.provider.calls)
        ):
            return False
        if await self._world.sql.value(WAITING, self._project) == 0:
            return True
        await self._world.sql.rows(LATE_ROWS, self._project)
        return False

    async def _stop_hanging(self, run: str) -> None:
        for talk in self._talks:
            is_its_turn = talk.service == PATIENT or time.monotonic() > self._seen.resting + GIVE_UP_SECONDS
            is_due = talk.run_id == run and is_its_turn and run not in self._seen.stopped
            if is_due and await self._cancel(talk, PATIENT, "now"):
                self._seen.stopped.add(run)

    async def _left(self) -> dict[str, Any]:
        return {
            "running": await self._world.sql.rows(RUNNING, self._project),
            "waiting": await self._world.sql.value(WAITING, self._project),
            "open": [call.id for call in self._world.provider.calls if call.outcome == "open"],
        }

    async def _problems(self) -> Any:
        sql, calls = self._world.sql, self._world.calls()
        for what, query in BREACHES.items():
            for row in await sql.rows(query):
                yield f"{what}: {row}"
        for row in await sql.rows(OPEN_HOLDS, self._project):
            yield f"a hold is open: {row}"
        for id in calls.keys() - {id for (id,) in await sql.rows(KNOWN)}:
            yield f"the provider was asked, and nobody knows: {id}"
        booked = [Booked(*row) for row in await sql.rows(CALLS, self._project)]
        words = {id: call.body["messages"][-1]["content"] for id, call in calls.items()}
        for difference in differences(booked, calls, self._seen.expired, words):
            yield difference
        for user, period, held, spent in await sql.rows(ACCOUNTS, self._project):
            excess = sum(entry.excess for entry in booked if user in ("", entry.user))
            if held or (user in self._limits and spent > self._limits[user] + excess):
                yield f"{user!r} {period}: {spent} spent and {held} held of {self._limits.get(user)}, {excess} excused"
        if (now := alarms()) != self._alarms:
            yield "\n".join([f"alarms: {now}, before: {self._alarms}", *unexpected])


def run_schedules(world: World, schedules: int, seed: int | None = None) -> None:
    """Runs so many, drawn by Hypothesis from the seed or that of the command line."""
    failures: list[str] = []
    make = _made(world, failures)
    if seed is not None:
        make = hypothesis.seed(seed)(make)
    try:
        run_state_machine_as_test(make, settings=_settings(schedules))
    except BaseException:
        if failures:
            raise AssertionError(failures[0]) from None
        raise


def _made(world: World, failures: list[str]) -> Any:
    """Makes schedules in this world, which is emptied now and then."""
    numbers = itertools.count(1)

    def make() -> Schedule:
        if next(numbers) % SCHEDULES_KEPT == 0:
            world.do(world.empty())
        return Schedule(world, failures)

    return make


def _settings(schedules: int) -> settings:
    """Only drawing: what fails depends on timing too, and is told whole, so shrinking it would only take time."""
    return settings(
        max_examples=schedules,
        stateful_step_count=STEPS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
