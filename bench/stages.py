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
from pathlib import Path

from bench import load
from bench.processes import thread_seconds
from bench.shape import Shape
from bench.subjects.ours import Stack
from bench.subjects.subject import ENVIRONMENTS
from bench.workloads import PACED_50, STARTS_50, STREAMS_50

PROFILER = ENVIRONMENTS / "tools/bin/py-spy"
SAMPLES_PER_SECOND = 100
# The profiler needs about this long to attach, and the same to write at the end.
ATTACH_SECONDS, WRITE_SECONDS = 1.0, 10.0
LOADS: dict[str, tuple[Shape, int, float, float]] = {
    # Shape, streams, starts a second, seconds of profiling.
    "50 x 50/s": (PACED_50, STREAMS_50, STARTS_50, 5.0),
    "burst": (Shape(10_000), 12, 2.0, 5.0),
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
            (r"/grpc|/google/|kit/(interceptors|serving|channels)\.py|/conversation/following\.py|relay", GRPC),
            (r"/conversation/|/bpe_openai/|/tiktoken/", REQUEST),
        ],
        "gateway": [
            (r"/gateway/wire/", ENCODE),
            (r"/grpc|/google/|kit/(clients|channels)\.py|/gateway/(following|clients)\.py|relay", GRPC),
            (r"/gateway/(auth|projects|incoming|context|problems|routes/)|/jwt/|/msgspec", REQUEST),
            (r"/uvicorn/|/starlette/|/gateway/", WRITE),
        ],
    }.items()
}
Say = Callable[[str], None]


async def shares(running: object, folder: Path, say: Say) -> dict[str, dict[str, float]]:
    """The share of each stage by load; nothing when the profiler is missing or may not look."""
    if not isinstance(running, Stack):
        return {}
    if not PROFILER.exists():
        say("no shares of stages: the profiler is not installed (make bench-peers)")
        return {}
    found = {}
    for name, (shape, streams, per_second, seconds) in LOADS.items():
        requests = running.requests(shape, streams)
        seconds_by_stage = await _profile(
            running, folder, seconds, lambda requests=requests, rate=per_second: load.spread(requests, rate)
        )
        total = sum(seconds_by_stage.values())
        if not total:
            say("no shares of stages: the profiler may not look at other processes here (it needs root)")
            return {}
        found[name] = {stage: seconds_by_stage[stage] / total for stage in STAGES if seconds_by_stage[stage]}
    return found


async def _profile(stack: Stack, folder: Path, seconds: float, work: Callable[[], Awaitable[object]]) -> Counter[str]:
    """CPU seconds by stage while the load runs."""
    profilers = {}
    for service in RULES:
        out = folder / f"{service}.samples"
        profilers[service] = (await _attach(stack.pid(service), out, seconds), out)
    await asyncio.sleep(ATTACH_SECONDS)
    before = {service: thread_seconds(stack.pid(service)) for service in RULES}
    processes = stack.tree.cpu()
    await work()
    spent = stack.tree.cpu().since(processes)
    by_stage: Counter[str] = Counter()
    for service, (profiler, out) in profilers.items():
        pid = stack.pid(service)
        threads = {key: used - before[service].get(key, 0.0) for key, used in thread_seconds(pid).items()}
        main = sum(used for (thread, _), used in threads.items() if thread == pid)
        by_stage[GRPC] += sum(threads.values()) - main
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + WRITE_SECONDS):
                await profiler.wait()
        samples = _classify(out, RULES[service])
        if not samples:
            return Counter()
        for stage, count in samples.items():
            by_stage[stage] += main * count / samples.total()
    by_stage[COMMIT] += spent.get("postgres", 0.0)
    by_stage[BUS] += spent.get("nats", 0.0)
    by_stage[MONEY] += spent.get("billing", 0.0)
    return by_stage


async def _attach(pid: int, out: Path, seconds: float) -> asyncio.subprocess.Process:
    arguments = ("record", "--pid", str(pid), "--rate", str(SAMPLES_PER_SECOND), "--format", "raw", "--full-filenames")
    return await asyncio.create_subprocess_exec(
        str(PROFILER),
        *(*arguments, "--duration", f"{seconds + ATTACH_SECONDS:.0f}", "--output", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


def _classify(out: Path, rules: Sequence[tuple[re.Pattern[str], str]]) -> Counter[str]:
    """Samples by stage. A line is `outermost;…;innermost count`."""
    found: Counter[str] = Counter()
    if not out.exists():
        return found
    for line in out.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        found[_stage_of(stack.split(";"), rules)] += int(count)
    return found


def _stage_of(stack: Sequence[str], rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for frame in reversed(stack):
        for pattern, stage in rules:
            if pattern.search(frame):
                return stage
    return LOOP
