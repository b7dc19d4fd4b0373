"""Our own chain, as a user of it has it: the stack of `make run` on a fresh data folder.

Nothing is switched off: tokens, row-level security, holds and the ledger, idempotency keys.
One process of each service, as the peers are one process each.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as counter
from pathlib import Path
from typing import Any

from bench.load import CONVERSATIONS, Request
from bench.processes import Tree
from bench.shape import Shape
from bench.subjects.subject import MODEL, READY_SECONDS, post, process, python
from deploy.local.data_folder import DataFolder
from deploy.local.ports import free_port
from deploy.local.prices import PriceWish, price_model
from deploy.local.processes import StackError, wait_until
from deploy.local.projects import user_token
from deploy.local.readiness import post_json
from deploy.local.service_programs import ROOT

REPLICAS = "billing=1,conversation=1,gateway=1"
_users = counter(1)


@dataclass
class Stack:
    """A stack that is up. `file` is its stack.json."""

    tree: Tree
    port: int
    file: Mapping[str, Any]

    def requests(self, shape: Shape, count: int) -> list[Request]:
        """See Running. Each is the first message of a conversation that was made just now."""
        return [self._request(shape) for _ in range(count)]

    def pid(self, service: str) -> int:
        """The first process of a service."""
        return int(self.file["pids"][service][0])

    def _request(self, shape: Shape) -> Request:
        token = user_token(self.file["jwt_secret"], self.file["project"], f"user-{next(_users)}")
        headers = {"apikey": self.file["anon_key"], "Authorization": f"Bearer {token}"}
        made = post_json(f"{self.file['http'][0]}/v1/conversations", {}, headers)
        path = f"/v1/conversations/{made['id']}/messages"
        headers["Idempotency-Key"] = str(uuid.uuid4())
        return post(self.port, path, {"content": str(shape)}, CONVERSATIONS, shape, headers)


class Ours:
    """Threadloom."""

    name = "threadloom"

    def __init__(self) -> None:
        self._is_priced = False

    def missing(self) -> str:
        """Nothing: the stack is a part of the development environment."""
        return ""

    def versions(self) -> str:
        """Its shape."""
        return f"this tree; {REPLICAS}, own Postgres and NATS"

    @contextmanager
    def start(self, provider_url: str, folder: Path) -> Iterator[Stack]:
        """The stack; a later start in the same folder finds its data."""
        port, data = free_port(), DataFolder(folder / "data")
        environ = {
            "THREADLOOM_DATA_DIR": str(data.path),
            "THREADLOOM_PORT": str(port),
            "THREADLOOM_REPLICAS": REPLICAS,
            "THREADLOOM_MODEL": MODEL,
            "OPENAI_BASE_URL": f"{provider_url}/v1",
            "OPENAI_API_KEY": "key-of-the-bench",
        }
        with process("threadloom", python("deploy.local", "up"), folder, ROOT, environ, port) as child:
            if not wait_until(lambda: data.stack.exists() or child.exit_code is not None, READY_SECONDS):
                raise StackError(f"The stack is not ready:\n{child.log_tail()}")
            if child.exit_code is not None:
                raise StackError(f"The stack did not start:\n{child.log_tail()}")
            file = json.loads(data.stack.read_text())
            if not self._is_priced:
                price_model(data, PriceWish(MODEL, "0.15", "0.60"))
                self._is_priced = True
            names = {pid: service for service, pids in file["pids"].items() for pid in pids}
            yield Stack(Tree(child.pid, names), port, file)
