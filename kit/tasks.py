"""Tasks a process cannot do without."""

import asyncio
import os
import signal
from collections.abc import Coroutine

from kit.telemetry import UNEXPECTED_ERRORS, log


def spawn_essential(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Starts a loop that must run as long as its process.

    Should it ever end by an error, the process drains and ends, to be started again:
    without its lane or its lease it would look alive and hang every run.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_end_process_on_error)
    return task


async def stop_task(task: asyncio.Task[None] | None) -> None:
    """Cancels a task, if there is one, and waits for its end."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _end_process_on_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        UNEXPECTED_ERRORS.labels("essential task").inc()
        log.critical("essential task ended", task=task.get_name(), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
