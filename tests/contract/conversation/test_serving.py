"""Probes, tools, and an orderly end (durability.md 30)."""

import asyncio

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.contract.conversation.harness import Launcher, Service, Sql, eventually
from tests.fakes.provider import FakeProvider
from threadloom.conversation.v1 import conversation_service_pb2, project_service_pb2

SERVING = HealthCheckResponse.SERVING
NAMES = {
    service.full_name
    for module in (conversation_service_pb2, project_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}


async def health(service: Service, name: str = "") -> int:
    answer = await HealthStub(service.channel).Check(HealthCheckRequest(service=name))
    return int(answer.status)


async def test_probes_need_no_credential(service: Service) -> None:
    assert {await health(service, name) for name in ("", *NAMES)} == {SERVING}


async def test_tools_find_every_service_without_a_credential(service: Service) -> None:
    stub = ServerReflectionStub(service.channel)

    async def ask() -> object:
        call = stub.ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]))
        return await call.read()

    found = {one.name for one in (await ask()).list_services_response.service}  # type: ignore[attr-defined]
    assert found >= NAMES


async def test_a_draining_process_takes_no_new_run_and_lets_its_own_finish(
    launch: Launcher, provider: FakeProvider, sql: Sql
) -> None:
    service = await launch(THREADLOOM_DRAIN_SECONDS="10")
    threads = [await service.alice.thread() for _ in range(2)]
    run = await service.alice.run(threads[0], "[fake chunks=4 gate=g gate_at=2]").until(lambda reading: reading.text)
    before = await sql.contents()
    service.ask_to_stop()

    async def is_draining() -> bool:
        return bool(await health(service) != SERVING)

    await eventually(is_draining)
    refusal = await service.alice.run(threads[1], "hello", key="a").refusal()
    assert (refusal.reason, refusal.retry_after) == ("UNAVAILABLE", 0.1)
    assert await sql.contents() == before
    provider.open_gate("g")
    await run.end()
    assert run.text == provider.calls[0].text
    assert await sql.value("SELECT status FROM conversation.ai_runs") == "succeeded"
    assert len(provider.calls) == 1


async def test_an_end_with_followers_attached_is_quick(launch: Launcher, provider: FakeProvider) -> None:
    service = await launch()
    thread = await service.alice.thread()
    run = await service.alice.run(thread, "[fake hang=0]").until(lambda reading: "reply_started" in reading.kinds)
    followers = [service.alice.follow(run.run_id) for _ in range(5)]
    service.ask_to_stop()
    async with asyncio.timeout(3):
        for reading in (run, *followers):
            assert (await reading.refusal()).reason == "UNAVAILABLE"
    await provider.until(lambda calls: calls[0].client_closed)
