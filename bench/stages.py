"""Which stage of our own chain uses how much of its CPU, under a load that is not measured otherwise.

Processes and their threads are told apart by what the kernel counts; inside the Python
threads of the gateway and the conversation service a sampling profiler looks 100 times a
second at what they do. A sample belongs to the innermost frame that a rule knows.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from bench import load
from bench.processes import thread_seconds
from bench.shape import Shape
from bench.subjects.ours import Stack
from bench.subjects.subject import ENVIRONMENTS
from bench.workloads import PACED_50, SHORT, STARTS_50, STREAMS_50

MAIN_THREAD = "MainThread"
PROFILER = ENVIRONMENTS / "tools/bin/py-spy"
SAMPLES_PER_SECOND = 100
# The profiler needs about this long to attach, and the same to write at the end.
ATTACH_SECONDS, WRITE_SECONDS = 1.0, 10.0
LOADS: dict[str, tuple[Shape, int, float, float]] = {
    # Shape, streams, starts a second, seconds of profiling.
    "50 x 50/s": (PACED_50, STREAMS_50, STARTS_50, 5.0),
    # Longer would pass the output an answer is granted.
    "burst": (Shape(4_000), 20, 4.0, 5.0),
    "short turns": (SHORT, 60, 12.0, 5.0),
}
PARSE, JOURNAL, COMMIT, GRPC = "parse: read the provider, split, decode", "journal", "commit: Postgres", "gRPC"
ENCODE, WRITE, BUS = "encode: frames", "write: HTTP", "NATS"
REQUEST, MONEY, LOOP = "the request: admit, hold, settle, end", "billing", "event loops, reads from sockets"
STAGES = (PARSE, JOURNAL, COMMIT, GRPC, ENCODE, WRITE, BUS, REQUEST, MONEY, LOOP)
# By process: the stage of the innermost frame whose file matches.
RULES: dict[str, Sequence[tuple[re.Pattern[str], str]]] = {
    service: [(re.compile(pattern), stage) for pattern, stage in rules]
    for service, rules in {
        "conversation": [
            (r"/conversation/providers/|/openai/|/httpx2/|/httpcore2/|/aiohttp/", PARSE),
            (r"/conversation/store/|/psycopg|/sqlalchemy/|kit/db\.py", COMMIT),
            (r"/conversation/journal\w*\.py|/conversation/domain/(events|fold|endings)\.py", JOURNAL),
            (r"kit/bus\.py|/nats/", BUS),
            (r"/grpc|kit/(interceptors|serving|channels)\.py|/conversation/(following|relay)", GRPC),
            (r"/conversation/(?!__main__)|/bpe_openai/", REQUEST),
        ],
        "gateway": [
            (r"/gateway/wire/", ENCODE),
            (r"/grpc|kit/(clients|channels)\.py|/gateway/(following|clients|relay)", GRPC),
            (r"/gateway/(auth|projects|incoming|context|problems|routes/)|/jwt/|/msgspec", REQUEST),
            (r"/uvicorn/|/httptools/|/starlette/|/gateway/(?!__main__)", WRITE),
        ],
    }.items()
}
Say = Callable[[str], None]


async def shares(stack: Stack, folder: Path, say: Say) -> dict[str, dict[str, float]]:
    """The share of each stage by load; nothing when the profiler is missing or may not look. Raises Void."""
    if not PROFILER.exists():
        say("no shares of stages: the profiler is not installed (make bench-peers)")
        return {}
    found = {}
    for name, (shape, streams, per_second, seconds) in LOADS.items():
        work = partial(load.spread, stack.requests(shape, streams), per_second)
        seconds_by_stage = await _profile(stack, folder, seconds, work)
        total = sum(seconds_by_stage.values())
        if not total:
            say("no shares of stages: the profiler may not look at other processes here (it needs root)")
            return {}
        found[name] = {stage: seconds_by_stage[stage] / total for stage in STAGES if stage in seconds_by_stage}
    return found


async def _profile(
    stack: Stack, folder: Path, seconds: float, work: Callable[[], Awaitable[object]]
) -> dict[str, float]:
    """CPU seconds by stage while the load runs; nothing when there are no samples."""
    outs = {service: folder / f"{service}.samples" for service in RULES}
    profilers = [await _attach(stack.pid(service), out, seconds) for service, out in outs.items()]
    await asyncio.sleep(ATTACH_SECONDS)
    before = {service: thread_seconds(stack.pid(service)) for service in RULES}
    processes = stack.tree.cpu()
    await work()
    spent = stack.tree.cpu().since(processes)
    used = {service: thread_seconds(stack.pid(service)) for service in RULES}
    for profiler in profilers:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + WRITE_SECONDS):
                await profiler.wait()
    by_stage = {COMMIT: spent.get("postgres", 0.0), BUS: spent.get("nats", 0.0), MONEY: spent.get("billing", 0.0)}

    def add(stage: str, some: float) -> None:
        by_stage[stage] = by_stage.get(stage, 0.0) + some

    for service, out in outs.items():
        samples = _classify(out, RULES[service])
        if not samples:
            return {}
        threads = {key: now - before[service].get(key, 0.0) for key, now in used[service].items()}
        main = sum(some for (thread, _), some in threads.items() if thread == stack.pid(service))
        add(GRPC, sum(threads.values()) - main)
        for stage, count in samples.items():
            add(stage, main * count / samples.total())
    return by_stage


async def _attach(pid: int, out: Path, seconds: float) -> asyncio.subprocess.Process:
    arguments: tuple[str, ...] = ("record", "--pid", str(pid), "--rate", str(SAMPLES_PER_SECOND), "--format", "raw")
    # Native frames tell gRPC and libpq from the event loop that calls them; threads tell the main one.
    arguments += ("--full-filenames", "--native", "--threads")
    return await asyncio.create_subprocess_exec(
        str(PROFILER),
        *(*arguments, "--duration", f"{seconds + ATTACH_SECONDS:.0f}", "--output", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


def _classify(out: Path, rules: Sequence[tuple[re.Pattern[str], str]]) -> Counter[str]:
    """Samples of the main thread by stage. A line is `thread;outermost;…;innermost count`."""
    found: Counter[str] = Counter()
    if not out.exists():
        return found
    for line in out.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        if MAIN_THREAD in stack:
            found[_stage_of(stack.split(";"), rules)] += int(count)
    return found


def _stage_of(stack: Sequence[str], rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for frame in reversed(stack):
        for pattern, stage in rules:
            if pattern.search(frame):
                return stage
    return LOOP
