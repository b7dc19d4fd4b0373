"""Commands that talk to a running stack: `stop`, `project`, `token`, `provider-key`."""

import contextlib
import os
import signal
import sys
from getpass import getpass
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
        made = _projects(running_stack(folder)).create(slug)
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
    project = project_called(running_stack(folder), slug)
    print(user_token(project.jwt_secret, project.slug, user))


def set_provider_key(folder: DataFolder, provider: str, slug: str) -> None:
    """Keeps a key that is typed without an echo, or comes through stdin. Raises StackError.

    It is never an argument: those are in the shell's history and in everybody's list of processes.
    """
    stack = running_stack(folder)
    project = _project_for_key(stack, provider, slug)
    key = _read_key(provider)
    if not key:
        raise StackError("No key came. Type it when asked, or send it: make provider-key PROVIDER=openai < file")
    _projects(stack).set_provider_key(project.id, provider, key)
    print(f"Kept encrypted: the {provider} key of the project {slug}. With REMOVE=1 the same command deletes it.")


def delete_provider_key(folder: DataFolder, provider: str, slug: str) -> None:
    """Deletes a project's key of a provider. Raises StackError."""
    stack = running_stack(folder)
    _projects(stack).delete_provider_key(_project_for_key(stack, provider, slug).id, provider)
    print(f"The project {slug} has no {provider} key.")


def running_stack(folder: DataFolder) -> dict[str, Any]:
    """What stack.json says of a stack that runs and is ready. Raises StackError."""
    found: dict[str, Any] = read_json(folder.stack)
    if folder.running() is None or not found:
        raise StackError(f"No stack is ready on {folder.path}. Start it in another terminal: make run")
    return found


def project_called(stack: dict[str, Any], slug: str) -> pb.Project:
    """A project of a running stack. Raises StackError when there is none."""
    project = _projects(stack).resolve(pb.ResolveProjectRequest(slug=slug))
    if project is None:
        raise StackError(f"There is no project {slug}. Create it: make project NAME={slug}")
    return project


def _project_for_key(stack: dict[str, Any], provider: str, slug: str) -> pb.Project:
    if not provider:
        raise StackError("Name the provider: make provider-key PROVIDER=openai")
    return project_called(stack, slug)


def _read_key(provider: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.read().strip()
    with contextlib.suppress(EOFError):
        return getpass(f"Key of {provider} (it is not shown): ").strip()
    return ""


def _projects(stack: dict[str, Any]) -> Projects:
    return Projects(stack["grpc"]["conversation"][0], stack["service_credential"])
