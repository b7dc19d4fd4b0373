"""The provider itself: what no chain can be faster than."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.load import OPENAI, Request
from bench.processes import Tree
from bench.shape import Shape
from bench.subjects.subject import MODEL, post


@dataclass
class _Provider:
    tree: Tree
    port: int

    def requests(self, shape: Shape, count: int) -> list[Request]:
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": str(shape)}]}
        return [post(self.port, "/v1/chat/completions", body, OPENAI, shape)] * count


class Direct:
    """The fake provider, asked without anything between."""

    name = "direct"

    def __init__(self, provider_pid: int) -> None:
        self._pid = provider_pid

    def missing(self) -> str:
        """Nothing."""
        return ""

    def versions(self) -> str:
        """It is a part of the bench."""
        return "the fake provider of bench/"

    @contextmanager
    def start(self, provider_url: str, folder: Path) -> Iterator[_Provider]:
        """It runs already."""
        yield _Provider(Tree(self._pid, {self._pid: "provider"}), urlsplit(provider_url).port or 0)
