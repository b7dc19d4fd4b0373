"""The secrets of a stack that must survive it: passwords, the service credential, project keys."""

import base64
import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.postgres import new_password
from deploy.local.private_files import read_json, write_json
from deploy.local.processes import StackError

PASSWORDS = ("postgres", "nats", "request_role", "engine_role", "billing_request_role", "billing_engine_role")
KEY_BYTES = 32  # AES-256


@dataclass(frozen=True)
class ProjectKeys:
    """A project as its creator sees it. The keys are told once, at its creation."""

    id: str
    slug: str
    anon_key: str
    service_key: str
    jwt_secret: str


class SecretFile:
    """Reads the secrets, makes those that are missing, keeps them in a file of mode 0600."""

    def __init__(self, path: Path) -> None:
        """Raises StackError when the file is damaged."""
        self._path = path
        try:
            self._content: dict[str, Any] = read_json(path)
        except ValueError as error:
            raise StackError(f"{path} is damaged ({error}). It is needed to open the data; restore it.") from None
        for name in PASSWORDS:
            self._content.setdefault(name, new_password())
        self._content.setdefault("service_credential", secrets.token_urlsafe(32))
        self._content.setdefault("secret_keys", f"k1:{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}")
        write_json(path, self._content)

    def password(self, name: str) -> str:
        """One of PASSWORDS, or the service_credential."""
        return str(self._content[name])

    @property
    def key_ring(self) -> str:
        """What the projects' provider keys are encrypted with. Lost with this file, they must be set again."""
        return str(self._content["secret_keys"])

    def project(self, database: str) -> ProjectKeys | None:
        """The project `default` of a database."""
        found = self._content.get("projects", {}).get(database)
        return ProjectKeys(**found) if found else None

    def keep_project(self, database: str, project: ProjectKeys) -> None:
        """Remembers it. Keyed by database: a data folder may be used with an outside one in between."""
        self._content.setdefault("projects", {})[database] = dataclasses.asdict(project)
        write_json(self._path, self._content)

    def thread(self, database: str) -> str | None:
        """The conversation the printed command continues."""
        found = self._content.get("threads", {}).get(database)
        return str(found) if found else None

    def keep_thread(self, database: str, thread: str) -> None:
        """Remembers it."""
        self._content.setdefault("threads", {})[database] = thread
        write_json(self._path, self._content)
