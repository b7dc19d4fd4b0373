"""The RPCs of ProjectService: who is who, for the gateway. No rules, no SQL."""

import secrets

from grpc import aio
from sqlalchemy.ext.asyncio import AsyncEngine

from kit.callers import SYSTEM, Caller, Role, current_caller
from kit.db import transaction
from kit.errors import ServiceError, invalid, not_found, unauthenticated
from kit.ids import new_id, parse_id
from services.conversation import limits, translate
from services.conversation.domain.checks import SLUG, check_slug
from services.conversation.store import projects
from services.conversation.store.projects import ProjectRow
from threadloom.conversation.v1 import project_service_pb2 as api
from threadloom.conversation.v1 import project_service_pb2_grpc as api_grpc

Context = aio.ServicerContext[object, object]

KEY_KINDS = {"anon": api.KeyKind.KEY_KIND_ANON, "service": api.KeyKind.KEY_KIND_SERVICE}
SECRET_BYTES = 32


class ProjectServicer(api_grpc.ProjectServiceServicer):
    """See project_service.proto."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def CreateProject(self, request: api.CreateProjectRequest, context: Context) -> api.CreateProjectResponse:
        """Creates a project."""
        _require_system()
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
        _require_system()
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
        _require_system()
        async with transaction(self._engine, SYSTEM) as tx:
            found = await projects.redeem_ticket(tx, request.ticket)
        if found is None:
            raise unauthenticated("This ticket is unknown, used or expired. Ask for a new one.")
        project, user, role = found
        return api.RedeemStreamTicketResponse(project_id=str(project), user_id=user, role=role)


def _require_system() -> Caller:
    who = current_caller.get()
    if who.role is not Role.SYSTEM:
        raise ServiceError("FORBIDDEN", "Only a service of ours may call this.")
    return who


def _project(row: ProjectRow) -> api.Project:
    return api.Project(
        id=str(row.id), slug=row.slug, jwt_secret=row.jwt_secret, create_time=translate.timestamp(row.created_at)
    )
