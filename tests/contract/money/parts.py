"""Schedules by the thousand, in several processes: each has services and a database of its own."""

import os
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from multiprocessing.util import Finalize

from tests.contract.money.schedule import run_schedules
from tests.contract.money.world import World, running_world
from tests.fakes.provider import FakeProvider
from tests.support import databases

PART = 100  # schedules of one seed: a failure can be run again alone, and progress is told after each
PROCESSES = 3  # a schedule waits about a third of its time

_world: World


def run_parts(template_url: str, nats_url: str, seeds: range) -> Iterator[int]:
    """Runs a part for each seed, and gives the seed of each that went well; raises what the first bad one raised."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), _open, (template_url, nats_url)) as pool:
        running = [pool.submit(_run, seed) for seed in seeds]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _open(template_url: str, nats_url: str) -> None:
    """Starts what the process keeps for all of its parts; nobody stops it but the process's end."""
    global _world
    stack = ExitStack()
    database = stack.enter_context(databases.fresh_database(template_url))
    provider = stack.enter_context(FakeProvider())
    _world = stack.enter_context(running_world(database, nats_url, provider))
    Finalize(None, stack.close, exitpriority=0)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A pool's process does not notice that whoever started it was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(seed: int) -> int:
    try:
        run_schedules(_world, PART, seed)
    except BaseException as error:
        # An error of Hypothesis's may not survive the way to the other process; its words do.
        raise AssertionError("".join(traceback.format_exception(error))) from None
    return seed
