"""Credentials to a Caller.

`apikey` names the project, `Authorization: Bearer` the user. Every refusal says
what is wrong with what was sent, and never repeats it.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from starlette.datastructures import Headers

from kit.callers import SYSTEM, Caller, Role
from kit.clients import Service
from kit.errors import ServiceError, unauthenticated
from services.gateway.clients import ConversationStubs
from services.gateway.jwks import JwksCache
from services.gateway.limits import PROJECT_KEY_CHARS
from services.gateway.projects import Project, Projects
from services.gateway.tokens import Tokens, unverified
from threadloom.conversation.v1.project_service_pb2 import RedeemStreamTicketRequest

# The value of a token's claim `role` that makes its user an admin of the project. Whoever may make users may mint
# it; any other value (identity providers put `authenticated` there) is an ordinary user's.
ADMIN = "admin"

NOTHING = (
    "Send the project's key as header `apikey` and the user's token as `Authorization: Bearer <token>`, "
    "or a service key as either."
)
ANON_ALONE = "The anon key names a project, not a user. Send the user's token as `Authorization: Bearer <token>`."
NOT_BEARER = "The header Authorization must read `Bearer <token>`."
UNKNOWN_KEY = "The header apikey holds no project's key."
UNKNOWN_BEARER = "The bearer is neither a user's token (a JWT) nor a service key."
NO_PROJECT = "Send the project's key as header `apikey`: the token has no claim `project` to tell whose it is."
UNKNOWN_PROJECT = "The token's claim `project` names no project."
TWO_PROJECTS = "The key and the token belong to different projects."
NOT_ADMIN = (
    "Only a project's admins may call this. Send the project's service key without a user's token, "
    f"or a user's token whose claim `role` is `{ADMIN}`."
)
BAD_TICKET = "The ticket is unknown, used or expired. Get a new one from POST /v1/stream-tickets."


@dataclass(frozen=True)
class Proof:
    """Whom the headers prove, and whether that is an admin of the project."""

    caller: Caller
    is_admin: bool


class Auth:
    """Knows who is calling."""

    def __init__(self, conversation: Service[ConversationStubs], cache: JwksCache) -> None:
        self._conversation = conversation
        self._projects = Projects(conversation)
        self._tokens = Tokens(cache)

    async def caller(self, headers: Headers, request_id: str) -> Caller:
        """The caller the headers prove, an admin as the user it is. Raises as `proof` does."""
        return (await self.proof(headers, request_id)).caller

    async def admin(self, headers: Headers, request_id: str) -> Caller:
        """The project's service role, for an admin of the project. Raises FORBIDDEN, and as `proof` does."""
        proof = await self.proof(headers, request_id)
        if not proof.is_admin:
            raise ServiceError("FORBIDDEN", NOT_ADMIN)
        return Caller(Role.SERVICE, proof.caller.project)

    async def proof(self, headers: Headers, request_id: str) -> Proof:
        """What the headers prove. Raises UNAUTHENTICATED, or UNAVAILABLE when nobody can tell."""
        key, token = headers.get("apikey", ""), _bearer(headers)
        if not key and not token:
            raise unauthenticated(NOTHING)
        project = await self._keyed(key, request_id) if key else None
        if project and (not token or token == key):
            return _holder(project)
        if _looks_like_jwt(token):
            return await self._user(token, project, request_id)
        return await self._keyed_by_bearer(token, project, request_id)

    async def ticket(self, ticket: str, request_id: str) -> Caller:
        """Uses a stream ticket up. Raises UNAUTHENTICATED."""
        if not 0 < len(ticket) <= PROJECT_KEY_CHARS:
            raise unauthenticated(BAD_TICKET)
        request = RedeemStreamTicketRequest(ticket=ticket)
        try:
            # Not repeatable: a lost answer may have used it up, and the second try would say so.
            answer = await self._conversation.call(
                lambda to: to.projects.RedeemStreamTicket, request, SYSTEM, request_id, repeatable=False
            )
        except ServiceError as error:
            if error.reason in ("UNAUTHENTICATED", "NOT_FOUND", "INVALID_OPTIONS"):
                raise unauthenticated(BAD_TICKET) from None
            raise
        return Caller(Role(answer.role), UUID(answer.project_id), answer.user_id)

    async def _keyed(self, key: str, request_id: str) -> Project:
        project = await self._projects.by_key(key, request_id)
        if project is None:
            raise unauthenticated(UNKNOWN_KEY)
        return project

    async def _keyed_by_bearer(self, token: str, project: Project | None, request_id: str) -> Proof:
        found = await self._projects.by_key(token, request_id)
        if found is None:
            raise unauthenticated(UNKNOWN_BEARER)
        if project is not None and project.id != found.id:
            raise unauthenticated(TWO_PROJECTS)
        return _holder(found)

    async def _user(self, token: str, project: Project | None, request_id: str) -> Proof:
        slug = unverified(token).get("project")
        if project is None:
            project = await self._named(slug, request_id)
        elif slug is not None and slug != project.slug:
            raise unauthenticated(TWO_PROJECTS)
        claims = await self._tokens.verified(token, project)
        return Proof(Caller(Role.USER, project.id, claims["sub"]), claims.get("role") == ADMIN)

    async def _named(self, slug: Any, request_id: str) -> Project:
        if slug is None:
            raise unauthenticated(NO_PROJECT)
        project = await self._projects.by_slug(slug, request_id) if _is_slug(slug) else None
        if project is None:
            raise unauthenticated(UNKNOWN_PROJECT)
        return project


def _bearer(headers: Headers) -> str:
    raw = headers.get("authorization", "")
    if not raw:
        return ""
    scheme, _, token = raw.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated(NOT_BEARER)
    return token.strip()


def _holder(project: Project) -> Proof:
    """Whom a bare key stands for."""
    if not project.is_service_key:
        raise unauthenticated(ANON_ALONE)
    return Proof(Caller(Role.SERVICE, project.id), is_admin=True)


def _looks_like_jwt(token: str) -> bool:
    return token.count(".") == 2


def _is_slug(value: Any) -> bool:
    # Lone surrogates (JSON may hold them) cannot be put into a protobuf string.
    return isinstance(value, str) and value.isascii()
