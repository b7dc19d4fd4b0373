"""What the tests of the HTTP surface share."""

from collections.abc import Awaitable
from typing import Any

import pytest

from tests.support.http import Refused

CONVERSATIONS = "/v1/conversations"
ONE = CONVERSATIONS + "/{conversation_id}"
NOBODYS = "01900000-0000-7000-8000-00000000000a"


async def refusal(call: Awaitable[Any]) -> Refused:
    """The refusal a call ends with."""
    with pytest.raises(Refused) as found:
        await call
    assert set(found.value.body) >= {"code", "message", "request_id"}
    return found.value


def path(conversation: str, suffix: str = "") -> str:
    """A path of a conversation."""
    return f"{CONVERSATIONS}/{conversation}{suffix}"
