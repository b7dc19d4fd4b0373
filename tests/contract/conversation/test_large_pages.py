"""A page is bounded in bytes: a conversation of long messages can always be read to its end."""

import pytest

from services.conversation import limits
from tests.contract.conversation.harness import Service, Sql
from threadloom.conversation.v1 import conversation_service_pb2 as api

LONG = "\u4e2d" * 200_000  # 600,000 bytes
MESSAGES = 30
ADD = (
    "INSERT INTO conversation.ai_messages (id, project_id, user_id, thread_id, run_id, position, role, status, text,"
    " created_at) SELECT gen_random_uuid(), project_id, user_id, id, gen_random_uuid(), n, 'assistant', 'complete',"
    " %s, clock_timestamp() FROM conversation.ai_threads, generate_series(1, %s) AS n WHERE id = %s"
)


@pytest.mark.parametrize("size", [0, 200])
async def test_long_messages_come_in_pages_that_fit(service: Service, sql: Sql, size: int) -> None:
    thread = await service.alice.thread()
    await sql.rows(ADD, LONG, MESSAGES, thread)
    token, positions, pages = "", [], 0
    while pages == 0 or token:
        request = api.ListMessagesRequest(thread_id=thread, page_size=size, page_token=token)
        page = await service.alice.call(service.alice.conversation.ListMessages, request)
        assert page.ByteSize() < 2 * limits.LIST_BYTES
        positions += [message.position for message in page.messages]
        token, pages = page.next_page_token, pages + 1
    assert positions == list(range(1, MESSAGES + 1))
    assert pages > 1
