"""Who is calling, and how that travels between services.

The Caller rides in gRPC metadata and is believed only beside the service
credential (`kit.interceptors`). User ids may hold any text, metadata only ASCII:
the user id is percent-encoded.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote
from uuid import UUID

from kit.errors import ServiceError, invalid
from kit.ids import parse_id

CREDENTIAL_KEY = "x-threadloom-credential"
PROJECT_KEY = "x-threadloom-project"
USER_KEY = "x-threadloom-user"
ROLE_KEY = "x-threadloom-role"
REQUEST_ID_KEY = "x-request-id"

# A user id is a JWT subject: 255 characters is the bound OpenID Connect gives it.
USER_ID_CHARS = 255


class Role(StrEnum):
    """What a caller may be."""

    USER = "user"  # sees what it owns
    SERVICE = "service"  # sees its project
    SYSTEM = "system"  # another service of ours, on nobody's behalf


@dataclass(frozen=True)
class Caller:
    """An authenticated principal. `project` is None only for SYSTEM; `user` is set only for USER."""

    role: Role
    project: UUID | None = None
    user: str = ""

    @property
    def key(self) -> str:
        """Names the caller within its project, for idempotency keys."""
        return f"{self.role}:{self.user}"


SYSTEM = Caller(Role.SYSTEM)

current_caller: ContextVar[Caller] = ContextVar("current_caller")


def require_system() -> None:
    """Raises FORBIDDEN for a call on behalf of somebody outside."""
    if current_caller.get().role is not Role.SYSTEM:
        raise ServiceError("FORBIDDEN", "Only a service of ours may call this.")


def to_metadata(caller: Caller) -> tuple[tuple[str, str], ...]:
    """The caller as gRPC metadata."""
    found = [(ROLE_KEY, caller.role.value)]
    if caller.project is not None:
        found.append((PROJECT_KEY, str(caller.project)))
    if caller.user:
        found.append((USER_KEY, quote(caller.user, safe="")))
    return tuple(found)


def from_metadata(metadata: dict[str, str]) -> Caller:
    """The caller of a call. Raises as `checked` does."""
    user = unquote(metadata.get(USER_KEY, ""))
    return checked(metadata.get(ROLE_KEY, ""), metadata.get(PROJECT_KEY, ""), user)


def checked(role_name: str, project_id: str, user: str) -> Caller:
    """The caller of these parts. Fails closed, with INVALID_OPTIONS: nothing missing or empty widens the view."""
    try:
        role = Role(role_name)
    except ValueError:
        raise invalid(ROLE_KEY, f"The caller's role ({ROLE_KEY}) must be user, service or system.") from None
    if role is Role.SYSTEM:
        return SYSTEM
    project = parse_id(project_id)
    if project is None:
        raise invalid(PROJECT_KEY, f"The caller's project ({PROJECT_KEY}) must be an id, a UUID.")
    if role is Role.SERVICE:
        return Caller(role, project)
    if not is_user_id(user):
        raise invalid(USER_KEY, f"The caller's user id ({USER_KEY}) must be 1 to 255 printable characters.")
    return Caller(role, project, user)


def is_user_id(text: str) -> bool:
    """1 to 255 printable characters."""
    return 0 < len(text) <= USER_ID_CHARS and text.isprintable() and bool(text.strip())
