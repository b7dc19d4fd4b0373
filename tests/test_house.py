"""Rules of the house that no other tool checks."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from threadloom.billing.v1 import billing_service_pb2
from threadloom.conversation.v1 import (
    conversation_service_pb2,
    project_service_pb2,
    relay_service_pb2,
    webhook_service_pb2,
)

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "kit", "deploy", "bench", "tests")
LOCKS = ("requirements.lock", "bench/tools.txt", "bench/peers/pydantic_ai/requirements.txt")
LINES_MAX = 800
# They name nothing, so everything ends up in them.
NAMELESS = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "base", "misc"}
# Who may read the environment: the places where a process starts.
READERS = re.compile(
    r"services/\w+/(__main__|migrate)\.py|deploy/local/(__main__|commands)\.py|bench/peers/\w+/server\.py"
)
READS = {"environ", "environb", "getenv"}
SERVICES = [
    service
    for module in (
        billing_service_pb2,
        conversation_service_pb2,
        project_service_pb2,
        relay_service_pb2,
        webhook_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]
RPCS = [method.name for service in SERVICES for method in service.methods]


def modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))


def test_no_module_is_too_long() -> None:
    sizes = {str(path): (ROOT / path).read_text().count("\n") for path in modules()}
    assert {path: size for path, size in sizes.items() if size > LINES_MAX} == {}


def test_every_module_is_named_for_what_it_holds() -> None:
    assert [str(path) for path in modules() if NAMELESS & {*path.parent.parts, path.stem}] == []


def test_stubs_are_not_committed() -> None:
    # The tree may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--", "*_pb2*", "gen"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git work tree")
    assert listed.stdout.split() == []


def test_only_entry_points_read_the_environment() -> None:
    ours = (path for path in modules() if path.parts[0] != "tests" and not READERS.fullmatch(path.as_posix()))
    assert [f"{path}:{line}" for path in ours for line in environment_reads(ROOT / path)] == []


def environment_reads(path: Path) -> list[int]:
    """The lines that name os.environ or one of its kin."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in READS:
                found.append(node.lineno)
            case ast.ImportFrom(module="os", names=names) if READS & {alias.name for alias in names}:
                found.append(node.lineno)
    return found


def test_every_rpc_is_called_in_a_contract_test() -> None:
    # As in `stub.GetRun(request)`, or `stub.GetRun` handed to what calls it.
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests" / "contract").rglob("*.py"))
    named = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [rpc for rpc in RPCS if rpc not in named] == []


@pytest.mark.parametrize("name", [*LOCKS, "pyproject.toml"])
def test_no_package_is_bound_to_an_address(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    bound = re.compile(r"://|^\s*(-i|-f|--(extra-)?index-url|--find-links|--trusted-host)\b")
    assert [line for line in lines if bound.search(line)] == []


@pytest.mark.parametrize("name", ["ai-6", "ai-7"])
def test_no_package_of_a_peer_is_bound_to_an_address(name: str) -> None:
    locked = json.loads((ROOT / "bench" / "peers" / "node" / name / "package-lock.json").read_text())["packages"]
    packages = {path: package for path, package in locked.items() if path}
    assert packages
    assert [path for path, package in packages.items() if "resolved" in package or "integrity" not in package] == []


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_its_hashes(name: str) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", (ROOT / name).read_text().strip())
    packages = [entry for entry in entries if re.match(r"[a-z0-9]", entry)]
    assert packages
    assert [entry.split("\n")[0] for entry in packages if "--hash=sha256:" not in entry] == []
