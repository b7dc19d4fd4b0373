"""Projects over gRPC, their keys of model providers, and tokens of their users."""

import time

import grpc
import jwt

from deploy.local.calls import as_system, channel
from deploy.local.secret_file import ProjectKeys
from threadloom.conversation.v1 import project_service_pb2 as pb
from threadloom.conversation.v1.project_service_pb2_grpc import ProjectServiceStub

SERVICE = "conversation"
TOKEN_SECONDS = 30 * 24 * 3600


class ProjectExists(Exception):
    """The slug is taken."""


class Projects:
    """The project service at an address, called as another service of ours. Its methods raise StackError."""

    def __init__(self, address: str, credential: str) -> None:
        self._address, self._credential = address, credential

    def create(self, slug: str) -> ProjectKeys:
        """Creates a project. Raises ProjectExists."""
        with channel(SERVICE, self._address) as conversation:
            try:
                made = ProjectServiceStub(conversation).CreateProject(
                    pb.CreateProjectRequest(slug=slug), **as_system(self._credential)
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                    raise ProjectExists from None
                raise
        project = made.project
        return ProjectKeys(project.id, project.slug, made.anon_key, made.service_key, project.jwt_secret)

    def resolve(self, request: pb.ResolveProjectRequest) -> pb.Project | None:
        """A project by its key or slug; None when there is none."""
        with channel(SERVICE, self._address) as conversation:
            try:
                return ProjectServiceStub(conversation).ResolveProject(request, **as_system(self._credential)).project
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                raise

    def set_provider_key(self, project: str, provider: str, key: str) -> None:
        """Keeps a project's key of a model provider, in place of an older one."""
        request = pb.SetProviderKeyRequest(project_id=project, provider=provider, api_key=key)
        with channel(SERVICE, self._address) as conversation:
            ProjectServiceStub(conversation).SetProviderKey(request, **as_system(self._credential))

    def delete_provider_key(self, project: str, provider: str) -> None:
        """Removes it."""
        request = pb.DeleteProviderKeyRequest(project_id=project, provider=provider)
        with channel(SERVICE, self._address) as conversation:
            ProjectServiceStub(conversation).DeleteProviderKey(request, **as_system(self._credential))


def user_token(jwt_secret: str, slug: str, user: str) -> str:
    """A user's token, good for 30 days."""
    now = int(time.time())
    claims = {"sub": user, "project": slug, "iat": now, "exp": now + TOKEN_SECONDS}
    return jwt.encode(claims, jwt_secret, algorithm="HS256")
