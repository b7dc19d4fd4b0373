"""The command `migration`: drafts one from the difference between the newest migration and schema.py."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from deploy.local import postgres
from deploy.local.placement import temporary_folder
from deploy.local.ports import free_port
from deploy.local.postgres import new_password
from deploy.local.processes import StackError
from deploy.local.service_programs import ROOT
from kit.db import sqlalchemy_url

STOP_SECONDS = 5.0


def draft(service: str, name: str) -> None:
    """Writes a draft into the service's versions and prints where. Raises StackError."""
    scripts = ROOT / "services" / service / "migrations"
    if not re.fullmatch(r"[a-z]+", service) or not scripts.is_dir():
        known = ", ".join(sorted(path.parent.name for path in ROOT.glob("services/*/migrations")))
        raise StackError(f"Whose migration? One of: {known}. make migration SERVICE=conversation NAME=add_x")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise StackError("Name it in small letters, digits and _: make migration SERVICE=conversation NAME=add_x")
    print("Starting a Postgres for the comparison ...", flush=True)
    with _database() as url:
        importlib.import_module(f"services.{service}.migrate").migrate(url, new_password(), new_password())
        written = _write(scripts, url, name)
    print(f"Drafted {written.relative_to(ROOT)}. Read it: grants, policies and data are not in it.")


def _write(scripts: Path, url: str, name: str) -> Path:
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    number = len(list(ScriptDirectory.from_config(config).walk_revisions())) + 1
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            made = command.revision(config, name, autogenerate=True, rev_id=f"{number:04d}")
    finally:
        engine.dispose()
    if made is None or isinstance(made, list):
        raise StackError("Alembic wrote no single draft.")
    return Path(made.path)


@contextmanager
def _database() -> Iterator[str]:
    with temporary_folder() as folder:
        log = folder / "postgres.log"
        server = postgres.prepare(folder, free_port(), new_password(), log, print)
        child = server.start(log)
        try:
            yield server.url()
        finally:
            child.stop(STOP_SECONDS)
