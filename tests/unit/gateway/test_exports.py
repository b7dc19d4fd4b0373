"""The ledger on the wire: pages as JSON, the whole as a file that ends cleanly only when it is complete."""

import asyncio
import csv
import io
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kit.errors import ServiceError, invalid, unavailable
from services.gateway.limits import EXPORT_PAGE
from tests.unit.gateway.billing_replica import BillingReplica, entry
from tests.unit.gateway.replica import SERVICE, Replica
from tests.unit.gateway.running import (
    QUICK,
    Gateway,
    Reply,
    read_chunk,
    read_head,
    read_reply,
    request,
    running_gateway,
)

ADMIN = {"apikey": SERVICE}
LEDGER = "/v1/admin/ledger"
CSV = LEDGER + "?format=csv"
PAGES = [[entry(number) for number in range(first, first + 3)] for first in (0, 3, 6)]
# More than the sockets between two processes hold, so that a reader that does not read stops the writer.
MANY = [[entry(number, user="u" * 255) for number in range(EXPORT_PAGE)]] * 400


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica() as found:
        yield found


@pytest.fixture
async def billing() -> AsyncIterator[BillingReplica]:
    async with BillingReplica(*PAGES) as found:
        yield found


@pytest.fixture
async def gateway(replica: Replica, billing: BillingReplica) -> AsyncIterator[Gateway]:
    async with running_gateway(replica.address, billing=(billing.address,)) as found:
        yield found


def rows(reply: Reply) -> list[list[str]]:
    return list(csv.reader(io.StringIO(reply.body.decode(), newline="")))


async def test_a_page_is_json(gateway: Gateway, billing: BillingReplica) -> None:
    reply = await gateway.ask("GET", LEDGER + "?user_id=alice&limit=3&cursor=1", headers=ADMIN)
    assert reply.status == 200
    assert [one["api_call_id"] for one in reply.json["data"]] == [one.api_call_id for one in PAGES[1]]
    assert reply.json["next_cursor"] == "2"
    sent = billing.requests[-1]
    assert (sent.user_id, sent.page_size, sent.page_token) == ("alice", 3, "1")
    assert reply.json["data"][0]["cost_usd"] == "0.000000150"
    last = await gateway.ask("GET", LEDGER + "?cursor=2&format=json", headers={**ADMIN, "accept": "text/csv"})
    assert last.json["next_cursor"] is None


@pytest.mark.parametrize(("path", "accept"), [(CSV, "*/*"), (CSV, "application/json"), (LEDGER, "text/csv")])
async def test_the_file_is_the_whole_ledger(gateway: Gateway, billing: BillingReplica, path: str, accept: str) -> None:
    reply = await gateway.ask("GET", path, headers={**ADMIN, "accept": accept})
    assert (reply.status, reply.is_whole) == (200, True)
    assert reply.headers["content-type"] == "text/csv; charset=utf-8; header=present"
    assert reply.headers["content-disposition"] == 'attachment; filename="ledger.csv"'
    assert reply.headers["cache-control"] == "no-store"
    found = rows(reply)
    assert [row[0] for row in found] == ["api_call_id", *(one.api_call_id for page in PAGES for one in page)]
    assert {len(row) for row in found} == {16}
    assert [one.page_size for one in billing.requests] == [EXPORT_PAGE] * 3


async def test_an_empty_ledger_is_a_header_line(gateway: Gateway, billing: BillingReplica) -> None:
    billing.pages = [[]]
    reply = await gateway.ask("GET", CSV, headers=ADMIN)
    assert (len(rows(reply)), reply.is_whole) == (1, True)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("format=xml", "format"),
        ("format=", "format"),
        ("format=csv&limit=5", "limit"),
        ("format=csv&cursor=1", "cursor"),
    ],
)
async def test_a_file_is_not_a_page(gateway: Gateway, billing: BillingReplica, query: str, field: str) -> None:
    reply = await gateway.ask("GET", f"{LEDGER}?{query}", headers=ADMIN)
    assert (reply.status, reply.json["field"]) == (400, field)
    assert not billing.requests


@pytest.mark.parametrize(("failure", "status"), [(unavailable("Stopping."), 503), (invalid("user_id", "No."), 400)])
async def test_a_failure_before_the_head_is_a_status(
    gateway: Gateway, billing: BillingReplica, failure: ServiceError, status: int
) -> None:
    billing.failure = failure
    reply = await gateway.ask("GET", CSV, headers=ADMIN)
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")


@pytest.mark.parametrize("failure", [unavailable("Stopping."), ServiceError("INTERNAL", "Something went wrong.")])
async def test_a_failure_in_mid_stream_breaks_the_transfer(
    gateway: Gateway, billing: BillingReplica, failure: ServiceError
) -> None:
    billing.pages[2] = failure
    reply = await gateway.ask("GET", CSV, headers=ADMIN)
    assert (reply.status, reply.is_whole) == (200, False)
    assert len(rows(reply)) == 7
    assert (await gateway.ask("GET", LEDGER, headers=ADMIN)).status == 200


async def test_a_service_that_dies_in_mid_stream_breaks_the_transfer(replica: Replica) -> None:
    async with (
        BillingReplica(*MANY) as billing,
        running_gateway(replica.address, billing=(billing.address,)) as gateway,
    ):
        reader, writer = await gateway.open(request("GET", CSV, headers=ADMIN))
        assert (await read_head(reader))[0] == 200
        await read_chunk(reader)
        await billing.die()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await read_to_end(reader)
        writer.close()


async def test_pages_are_made_as_they_are_read(replica: Replica) -> None:
    patience = replace(QUICK, reader_stall=30.0)
    async with (
        BillingReplica(*MANY) as billing,
        running_gateway(replica.address, billing=(billing.address,), patience=patience) as gateway,
    ):
        reader, writer = await gateway.open(request("GET", CSV, headers=ADMIN))
        await read_head(reader)
        async with asyncio.timeout(10):
            asked = -1
            while asked != len(billing.requests):  # until nothing more is asked for
                asked = len(billing.requests)
                await asyncio.sleep(0.3)
        assert asked < len(MANY)
        writer.transport.abort()  # the reader leaves, and nobody reads the ledger for it
        await until_closed(gateway)
        assert len(billing.requests) <= asked + 1


async def test_a_reader_that_takes_nothing_is_let_go(replica: Replica) -> None:
    patience = replace(QUICK, reader_stall=0.3)
    async with (
        BillingReplica(*MANY) as billing,
        running_gateway(replica.address, billing=(billing.address,), patience=patience) as gateway,
    ):
        reader, writer = await gateway.open(request("GET", CSV, headers=ADMIN))
        await read_head(reader)
        await until_closed(gateway)
        assert len(billing.requests) < len(MANY)
        writer.transport.abort()


async def test_a_server_that_stops_breaks_the_transfer(replica: Replica) -> None:
    async with (
        BillingReplica(*MANY) as billing,
        running_gateway(replica.address, billing=(billing.address,)) as gateway,
    ):
        reader, writer = await gateway.open(request("GET", CSV, headers=ADMIN))
        await read_head(reader)
        await gateway.app.drain(0.01)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await read_to_end(reader)
        writer.close()


async def test_head_reads_one_page(gateway: Gateway, billing: BillingReplica) -> None:
    reader, writer = await gateway.open(request("HEAD", CSV, headers=ADMIN))
    status, headers = await read_head(reader)
    assert (status, headers["content-disposition"]) == (200, 'attachment; filename="ledger.csv"')
    writer.write(request("GET", LEDGER, headers=ADMIN))
    assert (await read_reply(reader)).status == 200
    assert len(billing.requests) == 2
    writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> None:
    """Reads chunks to the last one. Raises what a broken transfer does."""
    while await read_chunk(reader):
        pass


async def until_closed(gateway: Gateway) -> None:
    """Waits until no transfer is open any more."""
    async with asyncio.timeout(10):
        await gateway.app.drain(60)  # which returns when there is none
