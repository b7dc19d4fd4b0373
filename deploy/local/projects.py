"""Projects over gRPC, and tokens of their users."""

import time

import grpc
import jwt

from deploy.local.processes import StackError
from deploy.local.secret_file import ProjectKeys
from kit.callers import SYSTEM
from kit.channels import call_metadata
from kit.ids import new_id
from threadloom.conversation.v1 import project_service_pb2 as pb
from threadloom.conversation.v1 import project_service_pb2_grpc as pb_grpc

CALL_SECONDS = 10.0
TOKEN_SECONDS = 30 * 24 * 3600
# A proxy of the environment is not for processes of this machine.
OPTIONS = [("grpc.enable_http_proxy", 0)]


class ProjectExists(Exception):
    """The slug is taken."""


class Projects:
    """The project service at an address, called as another service of ours."""

    def __init__(self, address: str, credential: str) -> None:
        self._address, self._credential = address, credential

    def create(self, slug: str) -> ProjectKeys:
        """Creates a project. Raises ProjectExists, or StackError with the service's sentence."""
        with grpc.insecure_channel(self._address, OPTIONS) as channel:
            try:
                made = pb_grpc.ProjectServiceStub(channel).CreateProject(
                    pb.CreateProjectRequest(slug=slug), metadata=self._metadata(), timeout=CALL_SECONDS
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                    raise ProjectExists from None
                raise _refused(error) from None
        project = made.project
        return ProjectKeys(project.id, project.slug, made.anon_key, made.service_key, project.jwt_secret)

    def resolve(self, request: pb.ResolveProjectRequest) -> pb.Project | None:
        """A project by its key or slug; None when there is none. Raises StackError."""
        with grpc.insecure_channel(self._address, OPTIONS) as channel:
            try:
                found = pb_grpc.ProjectServiceStub(channel).ResolveProject(
                    request, metadata=self._metadata(), timeout=CALL_SECONDS
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                raise _refused(error) from None
        return found.project

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return call_metadata(self._credential, SYSTEM, str(new_id()))


def user_token(jwt_secret: str, slug: str, user: str) -> str:
    """A user's token, good for 30 days."""
    now = int(time.time())
    claims = {"sub": user, "project": slug, "iat": now, "exp": now + TOKEN_SECONDS}
    return jwt.encode(claims, jwt_secret, algorithm="HS256")


def _refused(error: grpc.RpcError) -> StackError:
    return StackError(f"The conversation service refused: {error.details()}")
