"""The cluster other tests stand on, and their view of billing: a mistake here would make them lie."""

import grpc

from kit.callers import SYSTEM
from kit.channels import call_metadata
from kit.ids import new_id
from tests.fakes.provider import FakeProvider
from tests.support.billing import CACHED_INPUT_NANO, INPUT_NANO, OUTPUT_NANO, Billing, Books, cost_nano
from tests.support.cluster import CREDENTIAL, MODEL, Cluster
from tests.support.databases import Database
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1.billing_service_pb2_grpc import BillingServiceStub
from threadloom.billing.v1.usage_pb2 import Period, TokenUsage
from threadloom.common.v1.money_pb2 import Money


async def test_a_clusters_billing_is_priced_restarted_and_read(
    database: Database, nats_url: str, provider: FakeProvider
) -> None:
    usage = TokenUsage(input_tokens=10, cached_input_tokens=4, output_tokens=5)
    cost = cost_nano(10, 5, cached_input_tokens=4)
    assert cost == 6 * INPUT_NANO + 4 * CACHED_INPUT_NANO + 5 * OUTPUT_NANO
    names = {"provider_url": provider.base_url, "database": database, "nats_url": nats_url}
    with Cluster(**names, conversations=1, billings=2) as cluster:  # type: ignore[arg-type]
        cluster.kill("billing", 1)
        assert cluster.has_ended("billing", 1)
        cluster.restart("billing", 1)
        await cluster.ready("billing")
        project, call, books = cluster.project.id, str(new_id()), Books(database.admin_url)
        with Billing(cluster.billing[0], CREDENTIAL) as first, Billing(cluster.billing[1], CREDENTIAL) as second:
            assert [price.model for price in first.prices()] == [MODEL]
            first.set_quota(project, "alice", 10**9)
            second.set_cap(project, 2 * 10**9)
            with grpc.insecure_channel(cluster.billing[0]) as channel:
                place_and_settle(BillingServiceStub(channel), books, project, call, usage, cost)
            (entry,) = second.ledger(project, "alice")
            assert (entry.api_call_id, entry.cost.nano_usd) == (call, cost)
            total = second.usage(project, "alice")[Period.PERIOD_TOTAL]
            assert (total.spent.nano_usd, total.held.nano_usd, total.limit.nano_usd) == (cost, 0, 10**9)
            first.set_quota(project, "alice", None)
            assert not second.usage(project, "alice")[Period.PERIOD_TOTAL].HasField("limit")
        (row,) = books.ledger(project)
        assert (str(row.api_call_id), row.cost_nano, row.tokens_in) == (call, cost, 10)
        assert books.open_holds() == []


def place_and_settle(
    billing: BillingServiceStub, books: Books, project: str, call: str, usage: TokenUsage, cost: int
) -> None:
    run, thread, message = (str(new_id()) for _ in range(3))
    ask = api.PlaceHoldRequest(
        api_call_id=call, project_id=project, user_id="alice", run_id=run, thread_id=thread, message_id=message,
        model=MODEL, input_tokens_max=100, max_output_tokens=10, min_output_tokens=1,
    )  # fmt: skip
    metadata = call_metadata(CREDENTIAL, SYSTEM, "request-of-tests")
    billing.PlaceHold(ask, metadata=metadata, timeout=10)
    assert [str(hold.api_call_id) for hold in books.open_holds()] == [call]
    done = api.SettleRequest(api_call_id=call, project_id=project, usage=usage, cost=Money(nano_usd=cost))
    assert billing.Settle(done, metadata=metadata, timeout=10).entry.cost.nano_usd == cost
