"""Reading the ledger page by page, as an export does, while calls are booked."""

from kit.ids import new_id
from tests.contract.billing.harness import Person, Service
from threadloom.billing.v1 import billing_service_pb2 as api


async def booked(service: Service, user: str = "alice") -> str:
    request = service.ask(user_id=user)
    await service.place(request)
    await service.settle(request.api_call_id, 1, 1)
    return request.api_call_id


async def pages(person: Person, service: Service, user: str = "", meanwhile: int = 0) -> list[str]:
    """The ids of all pages; between two pages so many calls are booked."""
    found, token = list[str](), ""
    while True:
        request = api.ListLedgerRequest(project_id=str(service.project), user_id=user, page_size=2, page_token=token)
        page = await person.call(person.billing.ListLedger, request)
        found += [entry.api_call_id for entry in page.entries]
        token = page.next_page_token
        if not token:
            return found
        for _ in range(meanwhile):
            await booked(service, user or "alice")


async def test_what_is_booked_meanwhile_moves_no_page(service: Service) -> None:
    placed = [await booked(service) for _ in range(6)]
    assert await pages(service.role, service, meanwhile=3) == placed[::-1]


async def test_entries_of_one_moment_are_each_on_one_page(service: Service) -> None:
    placed = {await booked(service) for _ in range(7)}
    await service.rows("UPDATE billing.cost_ledger SET booked_at = '2026-02-03 04:05:06.123457+00'")
    found = await pages(service.role, service, meanwhile=1)
    assert len(found) == 7
    assert set(found) == placed


async def test_a_users_pages_hold_its_entries_alone(service: Service) -> None:
    bobs = []
    for _ in range(5):
        bobs.append(await booked(service, "bob"))
        await booked(service)
    for who, user in (("role", "bob"), ("bob", ""), ("system", "bob")):
        assert await pages(service.people[who], service, user) == bobs[::-1], who


async def test_a_users_entries_are_found_by_an_index_of_their_own(service: Service) -> None:
    await service.rows(
        "INSERT INTO billing.cost_ledger (api_call_id, project_id, user_id, run_id, thread_id, message_id, model,"
        " tokens_in, cached_tokens, cache_write_tokens, tokens_out, thinking_tokens, cost_nano, reported_nano, day)"
        " SELECT gen_random_uuid(), %s, 'user' || n / 10, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(),"
        " 'm', 0, 0, 0, 0, 0, 0, 0, '2026-01-01' FROM generate_series(1, 5000) n",
        service.project,
    )
    await service.rows("ANALYZE billing.cost_ledger")
    plan = await service.rows(
        "EXPLAIN SELECT FROM billing.cost_ledger WHERE project_id = %s AND user_id = 'user7'"
        " ORDER BY booked_at DESC, api_call_id DESC LIMIT 51",
        service.project,
    )
    assert any("cost_ledger_project_id_user_id_booked_at_api_call_id" in line for (line,) in plan), plan
    assert len(await pages(service.role, service, "user7")) == 10
    assert await pages(service.role, service, str(new_id())) == []
