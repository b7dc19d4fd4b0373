"""The guard of the gRPC servers."""

import asyncio
from typing import Any

import pytest
from grpc import aio
from prometheus_client import REGISTRY

from kit.callers import SYSTEM
from kit.channels import CHANNEL_OPTIONS, call_metadata
from kit.serving import Server
from tests.contract.conversation.harness import eventually
from threadloom.conversation.v1 import project_service_pb2 as api
from threadloom.conversation.v1 import project_service_pb2_grpc as api_grpc

METHOD = "/threadloom.conversation.v1.ProjectService/ResolveProject"


class Clumsy(api_grpc.ProjectServiceServicer):
    """Makes another error of a cancellation, as a library may."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def ResolveProject(self, request: Any, context: Any) -> Any:
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the generator did not stop") from None


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_what_becomes_of_a_call_whose_peer_left_is_no_error_of_ours() -> None:
    servicer = Clumsy()  # type: ignore[abstract]
    server = Server("secret", ["threadloom.conversation.v1.ProjectService"])
    api_grpc.add_ProjectServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1:0")
    unexpected = count("threadloom_unexpected_errors_total", where="grpc")
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        stub = api_grpc.ProjectServiceStub(channel)
        call = stub.ResolveProject(api.ResolveProjectRequest(), metadata=call_metadata("secret", SYSTEM, "r"))
        await asyncio.wait_for(servicer.is_asked.wait(), 10)
        before = count("threadloom_grpc_seconds_count", method=METHOD, code="CANCELLED")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        async def is_noted() -> bool:
            return count("threadloom_grpc_seconds_count", method=METHOD, code="CANCELLED") == before + 1

        await eventually(is_noted)
    await server.stop(0)
    assert count("threadloom_unexpected_errors_total", where="grpc") == unexpected
