"""JSON files only their owner can read, replaced whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file of mode 0600 in one step: a reader sees the old content or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_json(path: Path) -> dict[str, object]:
    """The file's content; empty when there is no file. Raises ValueError when it is not a JSON object."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found
