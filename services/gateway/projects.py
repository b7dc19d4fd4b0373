"""Projects as the gateway knows them: looked up over gRPC, remembered briefly."""

import time
from dataclasses import dataclass, field
from uuid import UUID

from kit.callers import SYSTEM
from kit.clients import Service
from kit.errors import ServiceError
from kit.jwks import KeySet, read_jwks
from services.gateway.clients import ConversationStubs
from services.gateway.limits import PROJECT_ENTRIES, PROJECT_KEY_CHARS, PROJECT_MISS_SECONDS, PROJECT_SECONDS
from threadloom.conversation.v1 import project_service_pb2 as pb
from threadloom.conversation.v1.project_service_pb2 import KeyKind, ResolveProjectRequest, ResolveProjectResponse


@dataclass(frozen=True)
class Identity:
    """How tokens of a project's identity provider are verified. `keys` are those of the project when there is no URL.

    An empty issuer or audience is not looked at.
    """

    jwks_url: str | None
    keys: KeySet
    issuer: str = ""
    audience: str = ""
    refuses_hs256: bool = False


@dataclass(frozen=True)
class Project:
    """A tenant. `is_service_key` says what the key was by which it was found."""

    id: UUID
    slug: str
    jwt_secret: str = field(repr=False)
    is_service_key: bool = False
    identity: Identity | None = None


class Projects:
    """Finds projects by key or slug. What was found, and what was not, is remembered for seconds."""

    def __init__(self, conversation: Service[ConversationStubs]) -> None:
        self._conversation = conversation
        # (how it was named, name) → (good until, monotonic seconds; what was found)
        self._known: dict[tuple[str, str], tuple[float, Project | None]] = {}

    async def by_key(self, key: str, request_id: str) -> Project | None:
        """The project that gave out `key`; raises ServiceError when nobody can tell."""
        return await self._find("key", key, ResolveProjectRequest(key=key), request_id)

    async def by_slug(self, slug: str, request_id: str) -> Project | None:
        """The project called `slug`; raises ServiceError when nobody can tell."""
        return await self._find("slug", slug, ResolveProjectRequest(slug=slug), request_id)

    async def _find(self, how: str, name: str, request: ResolveProjectRequest, request_id: str) -> Project | None:
        if not 0 < len(name) <= PROJECT_KEY_CHARS:
            return None
        good_until, found = self._known.get((how, name), (0.0, None))
        if time.monotonic() < good_until:
            return found
        found = await self._resolve(request, request_id)
        self._remember((how, name), found)
        return found

    async def _resolve(self, request: ResolveProjectRequest, request_id: str) -> Project | None:
        try:
            answer = await self._conversation.call(lambda to: to.projects.ResolveProject, request, SYSTEM, request_id)
        except ServiceError as error:
            # A name that breaks the rules of names is simply no project's.
            if error.reason in ("NOT_FOUND", "INVALID_OPTIONS"):
                return None
            raise
        return _project(answer)

    def _remember(self, name: tuple[str, str], found: Project | None) -> None:
        self._known.pop(name, None)
        while len(self._known) >= PROJECT_ENTRIES:
            self._known.pop(next(iter(self._known)))  # the one remembered longest ago
        seconds = PROJECT_MISS_SECONDS if found is None else PROJECT_SECONDS
        self._known[name] = (time.monotonic() + seconds, found)


def _project(answer: ResolveProjectResponse) -> Project:
    project = answer.project
    identity = _identity(project.identity) if project.HasField("identity") else None
    is_service_key = answer.key_kind == KeyKind.KEY_KIND_SERVICE
    return Project(UUID(project.id), project.slug, project.jwt_secret, is_service_key, identity)


def _identity(found: pb.Identity) -> Identity:
    has_url = found.WhichOneof("keys") == "jwks_url"
    # It was read before it was kept.
    keys = KeySet(()) if has_url else read_jwks(found.jwks)
    url = found.jwks_url if has_url else None
    return Identity(url, keys, found.issuer, found.audience, found.refuses_hs256)
