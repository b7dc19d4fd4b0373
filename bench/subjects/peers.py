"""The peers, each in an environment of its own that `make bench-peers` made."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.processes import Tree
from bench.subjects.subject import ENVIRONMENTS, MODEL, Server, process
from deploy.local.ports import free_port
from deploy.local.service_programs import ROOT

SOURCES = ROOT / "bench" / "peers"
INSTALL = "is not installed. Run: make bench-peers"


class AiSdk:
    """The AI SDK's streamText behind node:http, of one major version."""

    def __init__(self, name: str, version: str, brings_node: bool) -> None:
        """`brings_node`: it runs on a Node that was installed with it, not on the machine's."""
        self.name, self._version, self._brings_node = name, version, brings_node
        self._folder = ENVIRONMENTS / version

    def missing(self) -> str:
        """See Subject.missing."""
        if not (self._folder / "node_modules/ai").is_dir():
            return f"The AI SDK {INSTALL}"
        return "" if self._node() else "There is no Node. Install Node 18 or newer, then: make bench-peers"

    def versions(self) -> str:
        """The versions installed."""
        node = subprocess.run([self._node(), "--version"], capture_output=True, text=True, check=False)
        locked = (SOURCES / "node" / self._version / "package.json").read_text()
        packages = re.findall(r'"(ai|@ai-sdk/[\w-]+)": "([\d.]+)"', locked)
        return f"node {node.stdout.strip()}, " + ", ".join(f"{name} {version}" for name, version in packages)

    @contextmanager
    def start(self, provider_url: str, folder: Path) -> Iterator[Server]:
        """See Subject.start."""
        port = free_port()
        # Beside its packages: a module finds them from where it lies.
        script = str(shutil.copy(SOURCES / "node/server.mjs", self._folder))
        environ = {
            "NODE_ENV": "production",
            "BENCH_PORT": str(port),
            "BENCH_MODEL": MODEL,
            "BENCH_PROVIDER_URL": f"{provider_url}/v1",
        }
        with process(self.name, (self._node(), script), folder, self._folder, environ, port) as child:
            yield Server(Tree(child.pid, {child.pid: "node"}), port)

    def _node(self) -> str:
        if not self._brings_node:
            return shutil.which("node") or ""
        found = sorted(self._folder.glob("node_modules/node-linux-*/bin/node"))
        return str(found[0]) if found else ""


class PydanticAi:
    """pydantic-ai's Vercel adapter behind uvicorn."""

    name = "pydantic-ai"
    _folder = ENVIRONMENTS / "pydantic_ai"

    def missing(self) -> str:
        """See Subject.missing."""
        return "" if (self._folder / "bin/uvicorn").exists() else f"pydantic-ai {INSTALL}"

    def versions(self) -> str:
        """The versions installed."""
        locked = (SOURCES / "pydantic_ai/requirements.in").read_text().split()
        return ", ".join(re.sub(r"(\[.*\])?==", " ", line) for line in locked)

    @contextmanager
    def start(self, provider_url: str, folder: Path) -> Iterator[Server]:
        """See Subject.start."""
        port = free_port()
        command = (
            str(self._folder / "bin/uvicorn"),
            *("server:app", "--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"),
            *("--log-level", "warning", "--no-access-log"),
        )
        environ = {"BENCH_MODEL": MODEL, "BENCH_PROVIDER_URL": f"{provider_url}/v1", "PYTHONDONTWRITEBYTECODE": "1"}
        with process(self.name, command, folder, SOURCES / "pydantic_ai", environ, port) as child:
            yield Server(Tree(child.pid, {child.pid: "uvicorn"}), port)
