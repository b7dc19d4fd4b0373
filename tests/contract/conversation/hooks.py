"""Webhooks as their project's service role has them, and what a receiver got."""

from typing import Any

from tests.contract.conversation.harness import Person, Service, eventually
from tests.fakes.receiver import Receiver
from threadloom.conversation.v1 import webhook_service_pb2 as api

BOTH = ("run.finished", "run.failed")


class Admin:
    """The service role at WebhookService."""

    def __init__(self, service: Service, who: Person | None = None) -> None:
        self.person = who or service.role
        self.stub = self.person.webhooks

    async def call(self, method: Any, request: object) -> Any:
        """The answer of an RPC; raises the ServiceError it was refused with."""
        return await self.person.call(method, request)

    async def create(self, url: str, events: tuple[str, ...] = BOTH) -> tuple[str, str]:
        """The id and the secret of a new webhook."""
        answer = await self.call(self.stub.CreateWebhook, api.CreateWebhookRequest(url=url, events=events))
        return answer.webhook.id, answer.secret

    async def deliveries(self, webhook: str) -> list[api.WebhookDelivery]:
        """Its newest deliveries, the newest first."""
        request = api.ListWebhookDeliveriesRequest(webhook_id=webhook)
        return list((await self.call(self.stub.ListWebhookDeliveries, request)).deliveries)

    async def until(self, webhook: str, state: int) -> api.WebhookDelivery:
        """Its newest delivery in a state, as soon as there is one."""

        async def look() -> list[api.WebhookDelivery]:
            return [one for one in await self.deliveries(webhook) if one.state == state]

        return (await eventually(look))[0]


async def ask(service: Service) -> str:
    """The id of a run of alice's that has ended."""
    return (await service.alice.run(await service.alice.thread(), "hello").end()).run_id


async def count(receiver: Receiver, least: int, path: str = "") -> bool:
    """Whether so many different deliveries, or tries of any, came."""
    if path:
        return len({got.id for got in receiver.at(path)}) >= least
    return len(receiver.got) >= least
