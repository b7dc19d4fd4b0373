"""Each written run, byte for byte. `GOLDEN=write` (make golden) writes the files anew; review the diff."""

import os

import pytest

from services.gateway.wire import sse
from tests.wire.scripts import FOLDER, NAMES, frames_of, script

GOLDEN = FOLDER / "golden" / "conversations"


@pytest.mark.parametrize("name", NAMES)
def test_conversations_frames_are_the_golden_ones(name: str) -> None:
    found = b"".join(sse.to_bytes(frame) for frame in frames_of(script(name)))
    path = GOLDEN / f"{name}.sse"
    if os.environ.get("GOLDEN") == "write":
        path.write_bytes(found)
    assert found == path.read_bytes()


def test_every_golden_file_has_its_script() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.sse")) == NAMES
