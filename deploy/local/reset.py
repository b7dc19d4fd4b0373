"""The command `reset`: deletes what a stack wrote, and nothing else that lies in the folder."""

import shutil
from pathlib import Path

from deploy.local import placement
from deploy.local.data_folder import ENTRIES, DataFolder
from deploy.local.processes import StackError


def reset(folder: DataFolder) -> None:
    """Deletes the data. Raises StackError while a stack runs on it."""
    pid = folder.running()
    if pid is not None:
        raise StackError(f"A stack runs on {folder.path} (pid {pid}). Stop it first: make stop")
    found = placement.outside(folder.path)
    outside = [found] if found is not None and found.exists() else []
    inside = [path for path in (folder.path / name for name in ENTRIES) if path.exists() or path.is_symlink()]
    for path in (*outside, *inside):
        _delete(path)
    if folder.path.is_dir() and not any(folder.path.iterdir()):
        folder.path.rmdir()
    names = ", ".join(path.name for path in inside)
    print(f"Deleted in {folder.path}: {names}" if inside else f"Nothing to delete in {folder.path}.")
    for path in outside:
        print(f"Deleted {path}")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
