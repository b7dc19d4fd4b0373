"""The workloads, each run against a subject that is up; what they measure."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from bench import load
from bench.load import GAP_SECONDS, Turn
from bench.shape import Shape
from bench.subjects.subject import Running

BURST, BURSTS = Shape(2_000), 6
BURST_SECONDS = 2.0  # a slow subject is known after that long
SHORT, SHORTS = Shape(50), 30
# One begins every 0.1 s and takes half of one: about five at a time.
LIGHT, LIGHTS, LIGHTS_PER_SECOND = Shape(50, 10), 36, 10.0
# 50 and 200 streams of 50 deltas a second each.
PACED_50, STREAMS_50, STARTS_50 = Shape(200, 20), 50, 50.0
PACED_200, STREAMS_200, STARTS_200 = Shape(100, 20), 200, 100.0
# 100 streams that are open and nearly idle.
OPEN, OPENED, OPENED_PER_SECOND = Shape(8, 500), 100, 50.0
# Within this time of the last start all are open, and none has ended.
LOOK_SECONDS = 1.0
# Short ones, enough at once to open every pool to its bound.
WARM_UPS, WARM_UPS_PER_SECOND = 40, 200.0
# What a subject does behind the end of a turn (settling, closing) belongs to the turn.
AFTER_SECONDS = 0.3


@dataclass
class Figures:
    """What one workload measured in one round: numbers by name, samples by name, and by process."""

    numbers: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    # CPU microseconds a delta; where memory is measured, KiB an open stream.
    by_process: dict[str, float] = field(default_factory=dict)


async def burst(subject: Running) -> Figures:
    """One stream at a time, 2,000 deltas each, written as fast as they are read."""
    requests = subject.requests(BURST, BURSTS)
    turns, cpu = await _with_cpu(subject, lambda: load.in_order(requests, enough_seconds=BURST_SECONDS))
    rates = [BURST.deltas / (turn.last_at - turn.sent_at) for turn in turns]
    return Figures({"rate": statistics.median(rates)}, {}, cpu)


async def short(subject: Running) -> Figures:
    """Short answers without a pause: what a whole turn costs."""
    requests = subject.requests(SHORT, SHORTS)
    turns, cpu = await _with_cpu(subject, lambda: load.in_order(requests, 0.02))
    return Figures({}, {"whole": [turn.whole for turn in turns]}, cpu)


async def light(subject: Running) -> Figures:
    """About five streams at a time: the time to the first token, and of a whole paced turn."""
    requests = subject.requests(LIGHT, LIGHTS)
    turns, cpu = await _with_cpu(subject, lambda: load.spread(requests, LIGHTS_PER_SECOND))
    samples = {"ttft": [turn.ttft for turn in turns], "whole": [turn.whole for turn in turns]}
    return Figures({}, samples, cpu)


async def paced_50(subject: Running) -> Figures:
    """50 streams, 50 deltas a second each."""
    return await _paced(subject, PACED_50, STREAMS_50, STARTS_50)


async def paced_200(subject: Running) -> Figures:
    """200 streams, 50 deltas a second each."""
    return await _paced(subject, PACED_200, STREAMS_200, STARTS_200)


async def memory(subject: Running) -> Figures:
    """PSS of all processes with 100 open streams and without, by stream."""
    requests = subject.requests(OPEN, OPENED)
    before, during = subject.tree.pss_kib(), Counter[str]()

    async def look() -> None:
        await asyncio.sleep(OPENED / OPENED_PER_SECOND + LOOK_SECONDS)
        during.update(subject.tree.pss_kib())

    await load.spread(requests, OPENED_PER_SECOND, look)
    grown = {name: (kib - before[name]) / OPENED for name, kib in during.items()}
    return Figures({"idle_mib": before.total() / 1024}, {}, grown)


WORKLOADS: dict[str, Callable[[Running], Awaitable[Figures]]] = {
    # Memory first: a process that was under load has room left over.
    "memory": memory,
    "burst": burst,
    "short": short,
    "light": light,
    "paced-50": paced_50,
    "paced-200": paced_200,
}


async def warm_up(subject: Running) -> None:
    """Imports, connections and their pools, caches: what a server that has been up for a minute has."""
    await load.in_order(subject.requests(Shape(20), 5))
    await load.spread(subject.requests(Shape(5), WARM_UPS), WARM_UPS_PER_SECOND)


async def warm_up_for_speed(subject: Running) -> None:
    """So that code which is compiled as it runs is."""
    await load.in_order(subject.requests(BURST, 3))


def ideal_rate(shape: Shape, streams: int, per_second: float) -> float:
    """Deltas a second when each stream begins on time and none of its deltas is late."""
    return streams * shape.deltas / ((streams - 1) / per_second + shape.seconds)


async def _paced(subject: Running, shape: Shape, streams: int, per_second: float) -> Figures:
    requests = subject.requests(shape, streams)
    turns, cpu = await _with_cpu(subject, lambda: load.spread(requests, per_second))
    span = max(turn.last_at for turn in turns) - min(turn.sent_at for turn in turns)
    rate = streams * shape.deltas / span
    gaps = [gap for turn in turns for gap in turn.gaps]
    numbers = {
        "rate": rate,
        "ratio": rate / ideal_rate(shape, streams, per_second),
        "gaps": float(sum(gap > GAP_SECONDS for gap in gaps)),
        "gap_max": max(gaps, default=0.0),
    }
    return Figures(numbers, {"ttft": [turn.ttft for turn in turns]}, cpu)


async def _with_cpu(subject: Running, work: Callable[[], Awaitable[list[Turn]]]) -> tuple[list[Turn], dict[str, float]]:
    before = subject.tree.cpu()
    turns = await work()
    await asyncio.sleep(AFTER_SECONDS)
    spent = subject.tree.cpu().since(before)
    deltas = sum(turn.shape.deltas for turn in turns)
    return turns, {name: seconds * 1e6 / deltas for name, seconds in spent.items()}
