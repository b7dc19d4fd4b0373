"""What the tests of the HTTP surface share."""

import time
from collections.abc import Awaitable
from typing import Any

import jwt
import pytest
from jsonschema import Draft202012Validator

from deploy.local.secret_file import ProjectKeys
from tests.support.http import Client, Refused

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


def admin_token(keys: ProjectKeys, role: str = "admin") -> dict[str, str]:
    """What a user with this claim `role` sends."""
    claims = {"sub": "ada", "role": role, "exp": int(time.time()) + 600}
    return {"apikey": keys.anon_key, "Authorization": f"Bearer {jwt.encode(claims, keys.jwt_secret, 'HS256')}"}


async def pages(client: Client, path: str, limit: int) -> list[Any]:
    """All entries of a list, page by page."""
    found: list[Any] = []
    cursor = ""
    while True:
        page = await client.call("GET", f"{path}limit={limit}{cursor}")
        found += page["data"]
        assert len(page["data"]) <= limit
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


def check_shape(document: Any, name: str, answer: Any) -> None:
    """Raises unless the answer is as the served document says of this schema."""
    Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document}).validate(answer)
