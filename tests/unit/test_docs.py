"""The documents say what is there: generated ones are up to date, links resolve, targets exist."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = {"node_modules", "gen"}
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TARGETS = re.compile(r"\bmake((?: +(?:[a-z][a-z-]*|[A-Z_]+=\S*))+)")


def documents() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not any(part in NOT_OURS or part[0] == "." for part in path.parts[:-1]))


DOCUMENTS = documents()


def test_the_configuration_is_generated_from_the_settings() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generator["CONFIGURATION"].read_text() == generator["configuration"](), "run make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_resolve(document: Path) -> None:
    assert [link for link in links(ROOT / document) if not resolves(ROOT / document, link)] == []


def links(document: Path) -> Iterator[str]:
    """The links to other files and to headings."""
    for link in LINK.findall(CODE.sub("", document.read_text())):
        if not re.match(r"[a-z]+:", link):
            yield link


def resolves(document: Path, link: str) -> bool:
    """Whether the file exists in the tree, and the heading in it."""
    name, _, heading = link.partition("#")
    target = (document.parent / name).resolve() if name else document
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not heading or heading in map(anchor, re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE))


def anchor(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_make_targets_exist(document: Path) -> None:
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert sorted(targets((ROOT / document).read_text()) - known) == []


def targets(text: str) -> set[str]:
    """The targets of every `make …` that stands in code."""
    lines = (line for code in CODE.findall(text) for line in code.split("\n"))
    words = (word for line in lines for found in TARGETS.findall(line) for word in found.split())
    return {word for word in words if word.islower()}
