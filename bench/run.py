"""One run: every subject in turn, round after round, and at last the stages of our own chain."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from bench import stages
from bench.load import Void
from bench.results import DIRECT, Results
from bench.subjects.ours import Stack
from bench.subjects.subject import Running, Subject
from bench.workloads import WORKLOADS, warm_up, warm_up_for_speed

SETTLE_SECONDS = 0.5  # between two workloads

Say = Callable[[str], None]


def run(
    subjects: Sequence[Subject], workloads: Sequence[str], rounds: int, provider_url: str, folder: Path, say: Say
) -> Results:
    """Measures. Raises StackError when a subject does not start."""
    results = Results()
    began = time.monotonic()
    # The load client must not stop for its own garbage in the middle of a figure.
    gc.collect()
    gc.freeze()
    for number in range(1, rounds + 1):
        for subject in subjects:
            own = folder / subject.name
            own.mkdir(exist_ok=True)
            with subject.start(provider_url, own) as running:

                def tell(words: str, round_: int = number, name: str = subject.name) -> None:
                    say(f"{time.monotonic() - began:4.0f} s  round {round_}/{rounds}  {name}: {words}")

                uvloop.run(_measure(running, subject.name, workloads, results, tell))
                if number == rounds and isinstance(running, Stack):
                    tell("stages")
                    try:
                        results.shares = uvloop.run(stages.shares(running, own, tell))
                    except (Void, TimeoutError) as error:
                        tell(f"no shares of stages: {error or 'it took too long'}")
    return results


async def _measure(running: Running, name: str, workloads: Sequence[str], results: Results, tell: Say) -> None:
    await warm_up(running)
    is_warm = False
    for workload in workloads:
        if workload == "memory" and name == DIRECT:
            continue  # there is nothing between
        if workload != "memory" and not is_warm:
            await warm_up_for_speed(running)
            is_warm = True
        tell(workload)
        try:
            results.add(name, workload, await WORKLOADS[workload](running))
        except (Void, TimeoutError) as error:
            tell(f"{workload} is void: {error or 'it took too long'}")
            results.add_void(name, workload, str(error) or "it took too long")
        await asyncio.sleep(SETTLE_SECONDS)
