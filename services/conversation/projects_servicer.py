"""The RPCs of ProjectService: who is who, for the gateway. No rules, no SQL."""

import secrets
from uuid import UUID

from grpc import aio
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kit.callers import SYSTEM, Caller, Role, current_caller, require_system
from kit.db import transaction
from kit.errors import ServiceError, invalid, not_found, unauthenticated
from kit.ids import new_id, parse_id
from kit.outbound import AllowedHosts
from kit.sealing import KeyRing
from services.conversation import identities, limits, provider_keys, translate
from services.conversation.domain.checks import SLUG, check_api_key, check_provider, check_slug
from services.conversation.store import identities as kept_identities
from services.conversation.store import projects
from services.conversation.store import provider_keys as kept_keys
from services.conversation.store.identities import IdentityRow
from services.conversation.store.projects import ProjectRow
from threadloom.conversation.v1 import project_service_pb2 as api
from threadloom.conversation.v1 import project_service_pb2_grpc as api_grpc

Context = aio.ServicerContext[object, object]

KEY_KINDS = {"anon": api.KeyKind.KEY_KIND_ANON, "service": api.KeyKind.KEY_KIND_SERVICE}
SECRET_BYTES = 32


class ProjectServicer(api_grpc.ProjectServiceServicer):
    """See project_service.proto."""

    def __init__(self, engine: AsyncEngine, ring: KeyRing, allowed: AllowedHosts) -> None:
        self._engine, self._ring, self._allowed = engine, ring, allowed

    async def CreateProject(self, request: api.CreateProjectRequest, context: Context) -> api.CreateProjectResponse:
        """Creates a project."""
        require_system()
        slug = check_slug(request.slug)
        keys = {kind: f"tl_{kind}_{secrets.token_urlsafe(SECRET_BYTES)}" for kind in KEY_KINDS}
        async with transaction(self._engine, SYSTEM) as tx:
            row = await projects.insert_project(
                tx, id=new_id(), slug=slug, jwt_secret=secrets.token_urlsafe(SECRET_BYTES), keys=keys
            )
        if row is None:
            raise ServiceError("ALREADY_EXISTS", f"A project named {slug} exists.", {"kind": "project"})
        return api.CreateProjectResponse(project=_project(row), anon_key=keys["anon"], service_key=keys["service"])

    async def ResolveProject(self, request: api.ResolveProjectRequest, context: Context) -> api.ResolveProjectResponse:
        """Reads a project."""
        require_system()
        row = await self._resolve(request)
        if row is None:
            raise not_found("project")
        kind = KEY_KINDS.get(row.key_kind, api.KeyKind.KEY_KIND_UNSPECIFIED)
        return api.ResolveProjectResponse(project=_project(row), key_kind=kind)

    async def _resolve(self, request: api.ResolveProjectRequest) -> ProjectRow | None:
        async with transaction(self._engine, SYSTEM) as tx:
            match request.WhichOneof("by"):
                case "key":
                    return await projects.project_by_key(tx, request.key)
                case "slug":
                    return await projects.project_by_slug(tx, request.slug) if SLUG.fullmatch(request.slug) else None
                case "id":
                    id = parse_id(request.id)
                    return await projects.project_by_id(tx, id) if id is not None else None
                case _:
                    raise invalid("by", "Name the project by key, slug or id.")

    async def SetProviderKey(self, request: api.SetProviderKeyRequest, context: Context) -> api.SetProviderKeyResponse:
        """Keeps a project's key of a provider."""
        who, project = _project_of(request.project_id)
        provider, key = check_provider(request.provider), check_api_key(request.api_key)
        if not self._ring:
            raise ServiceError(
                "AI_PROVIDER_NOT_CONFIGURED",
                "Provider keys cannot be kept here: THREADLOOM_SECRET_KEYS, which encrypts them, is not set.",
            )
        sealed = provider_keys.seal(self._ring, project, provider, key)
        row = kept_keys.SealedKey(project, provider, sealed)
        async with transaction(self._engine, who) as tx:
            updated_at = await kept_keys.put_key(tx, row, self._ring.first_id)
            if updated_at is None:
                raise not_found("project")
        kept = api.ProviderKey(provider=provider, update_time=translate.timestamp(updated_at))
        return api.SetProviderKeyResponse(provider_key=kept)

    async def ListProviderKeys(
        self, request: api.ListProviderKeysRequest, context: Context
    ) -> api.ListProviderKeysResponse:
        """Lists which provider keys a project has."""
        who, project = _project_of(request.project_id)
        async with transaction(self._engine, who) as tx:
            await _require_project(tx, who, project)
            rows = await kept_keys.list_keys(tx, project)
        keys = [api.ProviderKey(provider=name, update_time=translate.timestamp(at)) for name, at in rows]
        return api.ListProviderKeysResponse(provider_keys=keys)

    async def DeleteProviderKey(
        self, request: api.DeleteProviderKeyRequest, context: Context
    ) -> api.DeleteProviderKeyResponse:
        """Removes a project's key of a provider."""
        who, project = _project_of(request.project_id)
        provider = check_provider(request.provider)
        async with transaction(self._engine, who) as tx:
            await _require_project(tx, who, project)
            await kept_keys.delete_key(tx, project, provider)
        return api.DeleteProviderKeyResponse()

    async def SetIdentity(self, request: api.SetIdentityRequest, context: Context) -> api.SetIdentityResponse:
        """Keeps how tokens of a project's identity provider are verified."""
        who, project = _project_of(request.project_id, "identity")
        identity = identities.check_identity(request.identity, self._allowed)
        async with transaction(self._engine, who) as tx:
            kept = await kept_identities.put_identity(tx, project, identity)
            if kept is None:
                raise not_found("project")
        return api.SetIdentityResponse(identity=_identity(kept))

    async def GetIdentity(self, request: api.GetIdentityRequest, context: Context) -> api.GetIdentityResponse:
        """Reads it."""
        who, project = _project_of(request.project_id, "identity")
        async with transaction(self._engine, who) as tx:
            await _require_project(tx, who, project)
            found = await kept_identities.get_identity(tx, project)
        if found is None:
            raise not_found("identity")
        return api.GetIdentityResponse(identity=_identity(found))

    async def DeleteIdentity(self, request: api.DeleteIdentityRequest, context: Context) -> api.DeleteIdentityResponse:
        """Removes it."""
        who, project = _project_of(request.project_id, "identity")
        async with transaction(self._engine, who) as tx:
            await _require_project(tx, who, project)
            await kept_identities.delete_identity(tx, project)
        return api.DeleteIdentityResponse()

    async def CreateStreamTicket(
        self, request: api.CreateStreamTicketRequest, context: Context
    ) -> api.CreateStreamTicketResponse:
        """Makes a ticket for the caller."""
        who = current_caller.get()
        if who.project is None:
            raise ServiceError("FORBIDDEN", "A ticket stands for a user or a project's service role.")
        ticket = secrets.token_urlsafe(SECRET_BYTES)
        async with transaction(self._engine, SYSTEM) as tx:
            expires_at = await projects.insert_ticket(
                tx, ticket=ticket, project=who.project, user=who.user, role=who.role, seconds=limits.TICKET_SECONDS
            )
        return api.CreateStreamTicketResponse(ticket=ticket, expire_time=translate.timestamp(expires_at))

    async def RedeemStreamTicket(
        self, request: api.RedeemStreamTicketRequest, context: Context
    ) -> api.RedeemStreamTicketResponse:
        """Uses a ticket up."""
        require_system()
        async with transaction(self._engine, SYSTEM) as tx:
            found = await projects.redeem_ticket(tx, request.ticket)
        if found is None:
            raise unauthenticated("This ticket is unknown, used or expired. Ask for a new one.")
        project, user, role = found
        return api.RedeemStreamTicketResponse(project_id=str(project), user_id=user, role=role)


def _project_of(named: str, what: str = "provider keys") -> tuple[Caller, UUID]:
    """The caller and the project it may manage: the service role its own, a service of ours the one it names."""
    who = current_caller.get()
    if who.role is Role.SYSTEM:
        if not named:
            raise invalid("project_id", "Name the project.")
        project = parse_id(named)
        if project is None:
            raise not_found("project")
        return who, project
    if who.role is not Role.SERVICE or who.project is None:
        raise ServiceError("FORBIDDEN", f"Only the project's service role may manage its {what}.")
    if named and named != str(who.project):
        raise ServiceError("FORBIDDEN", f"The service role manages the {what} of its own project only.")
    return who, who.project


async def _require_project(tx: AsyncConnection, who: Caller, project: UUID) -> None:
    """A service of ours may have named one that is not there; the service role's is, and its row is not its to see."""
    if who.role is Role.SYSTEM and await projects.project_by_id(tx, project) is None:
        raise not_found("project")


def _project(row: ProjectRow) -> api.Project:
    return api.Project(
        id=str(row.id),
        slug=row.slug,
        jwt_secret=row.jwt_secret,
        create_time=translate.timestamp(row.created_at),
        identity=None if row.identity is None else _identity(row.identity),
    )


def _identity(row: IdentityRow) -> api.Identity:
    identity = api.Identity(
        issuer=row.issuer,
        audience=row.audience,
        refuses_hs256=row.refuses_hs256,
        update_time=translate.timestamp(row.updated_at),
    )
    if row.jwks_url is not None:
        identity.jwks_url = row.jwks_url
    elif row.jwks is not None:
        identity.jwks = row.jwks
    return identity
