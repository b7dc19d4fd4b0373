"""How the stack and its commands call the services: as one of them, and with errors a person can read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from deploy.local.processes import StackError
from kit.callers import SYSTEM
from kit.channels import call_metadata
from kit.ids import new_id

# Long enough for a service that was just killed to be back.
CALL_SECONDS = 10.0
# A proxy of the environment is not for processes of this machine.
OPTIONS = [("grpc.enable_http_proxy", 0)]


@contextmanager
def channel(service: str, address: str) -> Iterator[grpc.Channel]:
    """A channel to a service. A call that fails in it becomes a StackError with the service's own sentence."""
    with grpc.insecure_channel(address, OPTIONS) as found:
        try:
            yield found
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise StackError(
                    f"The {service} service does not answer. make logs SERVICE={service} may say why."
                ) from None
            raise StackError(f"The {service} service refused: {error.details()}") from None


def as_system(credential: str) -> dict[str, Any]:
    """What a call carries besides its request: the role `system`, and patience with a service that starts again."""
    metadata = call_metadata(credential, SYSTEM, str(new_id()))
    return {"metadata": metadata, "timeout": CALL_SECONDS, "wait_for_ready": True}
