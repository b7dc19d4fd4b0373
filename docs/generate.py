"""Writes the documents that are made from code: docs/configuration.md from the settings classes (make docs)."""

import dataclasses
from pathlib import Path
from typing import Any

from deploy.local.settings import StackSettings
from services.billing.settings import Settings as BillingSettings
from services.conversation.settings import Settings as ConversationSettings
from services.gateway.settings import Settings as GatewaySettings

CONFIGURATION = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration

<!-- Made by docs/generate.py from the settings classes. Change those, then run make docs. -->

Every setting is an environment variable, read once when a process starts. An empty value counts as
unset. A process whose settings are missing or malformed does not start, and names all of them at
once. **secret** marks what must not be shown; error messages and logs leave it out.
"""
TABLE = """\

## {title}

{about}

| variable | default | meaning |
|---|---|---|
{rows}
"""
SECTIONS: tuple[tuple[str, str, type[Any]], ...] = (
    (
        "The local stack",
        "`make run` reads these and sets for its services what they need: addresses, passwords, the service\n"
        "credential, the provider and the drain time. Other variables reach the services as they are, so\n"
        "`THREADLOOM_TURN_SECONDS=30 make run` works.",
        StackSettings,
    ),
    ("Gateway", "`python -m services.gateway`", GatewaySettings),
    ("Conversation", "`python -m services.conversation`", ConversationSettings),
    ("Billing", "`python -m services.billing`", BillingSettings),
)
MIGRATION = """\

## Migrating

`python -m services.conversation.migrate` makes the two roles and brings the schema to its newest form.
PostgreSQL 17 or newer is needed.
It connects as the owner of the database and needs all three.

| variable | default | meaning |
|---|---|---|
| `CONVERSATION_MIGRATION_URL` | must be set | Postgres, as a role that may create roles and schemas. **secret** |
| `CONVERSATION_ROLE_PASSWORD` | must be set | Password of the role threadloom_conversation. **secret** |
| `CONVERSATION_ENGINE_ROLE_PASSWORD` | must be set | Password of the role threadloom_conversation_engine. **secret** |

`python -m services.billing.migrate` does the same for billing, with `BILLING_MIGRATION_URL`,
`BILLING_ROLE_PASSWORD` (of threadloom_billing) and `BILLING_ENGINE_ROLE_PASSWORD` (of threadloom_billing_engine).
"""


def configuration() -> str:
    """The text of docs/configuration.md."""
    tables = (TABLE.format(title=title, about=about, rows=_rows(cls)) for title, about, cls in SECTIONS)
    return HEAD + "".join(tables) + MIGRATION


def _rows(cls: type[Any]) -> str:
    return "\n".join(_row(field.metadata) for field in dataclasses.fields(cls))


def _row(setting: Any) -> str:
    default = "must be set" if setting["default"] is None else f"`{setting['default']}`" if setting["default"] else "–"
    meaning = setting["doc"].replace("|", r"\|") + (" **secret**" if setting["secret"] else "")
    return f"| `{setting['env']}` | {default} | {meaning} |"


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration())
