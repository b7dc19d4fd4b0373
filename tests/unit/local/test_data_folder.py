"""The data folder: its lock, its private files, its logs, its deletion."""

import base64
from pathlib import Path

import pytest

from deploy.local.data_folder import DataFolder
from deploy.local.logs import Tail
from deploy.local.private_files import read_json, write_json
from deploy.local.processes import StackError
from deploy.local.reset import reset
from deploy.local.secret_file import PASSWORDS, ProjectKeys, SecretFile

KEYS = ProjectKeys("id", "default", "anon", "service", "secret")


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    found = DataFolder(tmp_path / "data")
    found.make()
    return found


def test_one_stack_has_the_lock_and_its_end_frees_it(folder: DataFolder) -> None:
    lock = folder.lock()
    assert lock is not None
    assert folder.lock() is None
    assert folder.running() is not None
    lock.close()
    assert folder.running() is None


def test_secrets_survive_and_only_their_owner_reads_them(folder: DataFolder) -> None:
    first = SecretFile(folder.secrets)
    first.keep_project("own", KEYS)
    again = SecretFile(folder.secrets)
    assert again.password("postgres") == first.password("postgres")
    assert again.project("own") == KEYS
    assert again.key_ring == first.key_ring
    assert again.project("elsewhere:5432/db") is None
    assert folder.secrets.stat().st_mode & 0o777 == 0o600


def test_each_secret_is_another_and_the_key_ring_is_one_key_of_32_bytes(folder: DataFolder) -> None:
    found = SecretFile(folder.secrets)
    assert len({found.password(name) for name in (*PASSWORDS, "service_credential")}) == len(PASSWORDS) + 1
    name, _, key = found.key_ring.partition(":")
    assert (name, len(base64.b64decode(key, validate=True))) == ("k1", 32)


def test_secrets_that_came_later_are_added_to_an_older_file(folder: DataFolder) -> None:
    write_json(folder.secrets, {"postgres": "old", "request_role": "older"})
    found = SecretFile(folder.secrets)
    assert (found.password("postgres"), found.password("request_role")) == ("old", "older")
    assert found.password("billing_request_role") == SecretFile(folder.secrets).password("billing_request_role")


def test_a_damaged_secret_file_is_not_replaced(folder: DataFolder) -> None:
    folder.secrets.write_text('{"postgres": "half a passw')
    with pytest.raises(StackError, match="damaged"):
        SecretFile(folder.secrets)
    assert "half" in folder.secrets.read_text()


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    assert read_json(path) == {}
    write_json(path, {"a": 1})
    write_json(path, {"b": 2})
    assert read_json(path) == {"b": 2}
    assert [one.name for one in tmp_path.iterdir()] == ["stack.json"]


def test_reset_deletes_what_a_stack_wrote_and_nothing_else(
    folder: DataFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "elsewhere"
    (outside / "postgres").mkdir(parents=True)
    (folder.path / "outside").symlink_to(outside)
    (folder.path / "postgres").mkdir()
    SecretFile(folder.secrets)
    theirs = folder.path / "thesis.txt"
    theirs.write_text("years of work")
    reset(folder)
    assert list(folder.path.iterdir()) == [theirs]
    assert not outside.exists()
    said = capsys.readouterr().out
    assert all(word in said for word in ("postgres", "secrets.json", str(outside)))


def test_reset_refuses_while_a_stack_runs(folder: DataFolder) -> None:
    lock = folder.lock()
    assert lock is not None
    with lock, pytest.raises(StackError, match="make stop"):
        reset(folder)


def test_reset_of_nothing_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reset(DataFolder(tmp_path / "never"))
    assert "Nothing to delete" in capsys.readouterr().out


def test_a_log_is_followed_from_its_last_lines_over_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "gateway-1.log"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    tail = Tail(path)
    assert tail.lines() == [str(number) for number in range(80, 100)]
    with path.open("a") as log:
        log.write("whole\nhal")
    assert tail.lines() == ["whole"]
    with path.open("a") as log:
        log.write("f\n")
    assert tail.lines() == ["half"]
    path.write_text("new\n")
    assert tail.lines() == ["new"]
    tail.close()
