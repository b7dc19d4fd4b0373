"""The receivers of docs/webhooks.md, as they stand there, take what we sign and nothing else."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.conversation.domain import webhooks

PAGE = (Path(__file__).parents[3] / "docs" / "webhooks.md").read_text()
SECRET = webhooks.new_secret(bytes(range(32)))
BODY = '{"type":"ping","data":{"user_id":"ü"}}'.encode()
NODE = shutil.which("node")
# Reads [secret, headers, body] lists and answers with what isOurs says of each.
CALLS = """
const asked = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(asked.map(([secret, headers, body]) => isOurs(secret, headers, Buffer.from(body)))));
"""


def block(language: str) -> str:
    """The page's only code of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def cases() -> list[tuple[bool, str, dict[str, str], bytes]]:
    """(whether it is ours, secret, headers, body)."""
    now = int(time.time())
    good = webhooks.sign(SECRET, "id-1", now, BODY)
    own = good["webhook-signature"]
    return [
        (True, SECRET, good, BODY),
        (True, SECRET, {**good, "webhook-signature": f"v1,other v2,more {own}"}, BODY),
        (False, SECRET, good, BODY + b" "),
        (False, SECRET, {**good, "webhook-id": "id-2"}, BODY),
        (False, webhooks.new_secret(bytes(32)), good, BODY),
        (False, SECRET, webhooks.sign(SECRET, "id-1", now - 400, BODY), BODY),
        (False, SECRET, webhooks.sign(SECRET, "id-1", now + 400, BODY), BODY),
        (False, SECRET, {**good, "webhook-timestamp": "soon"}, BODY),
        (False, SECRET, {**good, "webhook-signature": ""}, BODY),
        (False, SECRET, {**good, "webhook-signature": "v1,ü"}, BODY),
        (False, SECRET, {}, BODY),
    ]


def test_the_receiver_in_python() -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    is_ours: Callable[[str, dict[str, str], bytes], bool] = names["is_ours"]
    for expected, secret, headers, body in cases():
        assert is_ours(secret, headers, body) is expected, headers


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_receiver_in_node() -> None:
    assert NODE is not None
    given = json.dumps([[secret, headers, body.decode()] for _, secret, headers, body in cases()])
    ran = subprocess.run([NODE, "-e", block("js") + CALLS], input=given, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [expected for expected, *_ in cases()]
