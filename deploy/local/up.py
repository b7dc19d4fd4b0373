"""The command `up`: takes the data folder, starts the stack, keeps it running, stops it."""

import contextlib
import time
from collections.abc import Mapping

from deploy.local import ports
from deploy.local.data_folder import DataFolder
from deploy.local.private_files import read_json
from deploy.local.processes import StackError, listener
from deploy.local.settings import StackSettings
from deploy.local.stack import Stack
from deploy.local.supervisor import Stopping, StopRequests, end_leftovers
from kit.settings import load

TEND_SECONDS = 0.1


def say(line: str) -> None:
    """Shows a line at once. A terminal that was closed is no reason to stop in the middle of stopping."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def up(environ: Mapping[str, str]) -> int:
    """Runs a stack until it is asked to stop. Raises SettingsError or StackError."""
    stops = StopRequests()
    stops.listen()
    settings = load(StackSettings, environ)
    folder = DataFolder(settings.data_dir)
    folder.make()
    lock = folder.lock()
    if lock is None:
        raise StackError(_already_running(folder))
    with lock:
        end_leftovers(folder.children, say)
        folder.stack.unlink(missing_ok=True)
        _check_port(settings.port)
        _run(Stack(settings, folder, environ, say, stops), stops)
    return 0


def _run(stack: Stack, stops: StopRequests) -> None:
    try:
        stack.start()
        say(stack.announcement())
        while True:
            stops.check()
            stack.supervisor.tend()
            time.sleep(TEND_SECONDS)
    except Stopping:
        say("Stopping ... (Ctrl-C again: at once)")
    finally:
        asked = stops.count
        stack.supervisor.stop(lambda: stops.count > asked)
        stack.folder.stack.unlink(missing_ok=True)
    say("Stopped. The data stays; make run finds it again.")


def _already_running(folder: DataFolder) -> str:
    addresses = read_json(folder.stack).get("http")
    where = f"on {addresses[0]}" if isinstance(addresses, list) and addresses else "and is starting"
    return (
        f"A stack runs on {folder.path} already, {where} (pid {folder.running()}). "
        "Stop it with make stop, or start a second one with another THREADLOOM_DATA_DIR and THREADLOOM_PORT."
    )


def _check_port(port: int) -> None:
    try:
        if ports.is_free(port):
            return
    except PermissionError:
        raise StackError(f"Port {port} needs root. Choose one above 1023: THREADLOOM_PORT=8080 make run") from None
    holder = listener(port) or "a process this user may not see"
    raise StackError(f"Port {port} is taken by {holder}. Choose another: THREADLOOM_PORT={ports.free_port()} make run")
