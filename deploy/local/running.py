"""Commands that talk to a running stack: `stop`, `project`, `token`."""

import os
import signal
from typing import Any

from deploy.local.data_folder import DataFolder
from deploy.local.private_files import read_json
from deploy.local.processes import StackError, wait_until
from deploy.local.projects import ProjectExists, Projects, user_token
from threadloom.conversation.v1 import project_service_pb2 as pb

# The stack itself keeps to 10 s; the rest is slack for a busy machine.
STOP_SECONDS = 20.0


def stop(folder: DataFolder) -> None:
    """Stops the stack that runs on the folder and waits for its end. Raises StackError when it does not end."""
    pid = folder.running()
    if pid is None:
        print(f"Nothing runs on {folder.path}.")
        return
    print(f"Stopping the stack (pid {pid}) ...", flush=True)
    os.kill(pid, signal.SIGTERM)
    if not wait_until(lambda: folder.running() is None, STOP_SECONDS):
        raise StackError(f"The stack (pid {pid}) still runs after {STOP_SECONDS:.0f} s.")
    print("Stopped.")


def create_project(folder: DataFolder, slug: str) -> None:
    """Creates a project and prints its keys. Raises StackError."""
    if not slug:
        raise StackError("Name the project: make project NAME=acme")
    try:
        made = _projects(_running_stack(folder)).create(slug)
    except ProjectExists:
        raise StackError(f"The project {slug} exists already; its keys were printed when it was made.") from None
    print(f"project      {made.slug}")
    print(f"anon key     {made.anon_key}")
    print(f"service key  {made.service_key}")
    print(f"JWT secret   {made.jwt_secret}")


def mint_token(folder: DataFolder, user: str, slug: str) -> None:
    """Prints a token of a user of a project. Raises StackError."""
    if not user:
        raise StackError("Name the user: make token USER=carol")
    project = _projects(_running_stack(folder)).resolve(pb.ResolveProjectRequest(slug=slug))
    if project is None:
        raise StackError(f"There is no project {slug}. Create it: make project NAME={slug}")
    print(user_token(project.jwt_secret, project.slug, user))


def _running_stack(folder: DataFolder) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder.stack)
    if folder.running() is None or not found:
        raise StackError(f"No stack is ready on {folder.path}. Start it in another terminal: make run")
    return found


def _projects(stack: dict[str, Any]) -> Projects:
    return Projects(stack["grpc"]["conversation"][0], stack["service_credential"])
