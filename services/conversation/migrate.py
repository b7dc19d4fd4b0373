"""Makes the two roles and brings the schema to its newest form. Safe to run again.

python -m services.conversation.migrate
"""

import os
import sys
from pathlib import Path

from kit import migrations
from services.conversation.schema import SCHEMA

REQUEST_ROLE = "threadloom_conversation"
ENGINE_ROLE = "threadloom_conversation_engine"


def migrate(url: str, request_password: str, engine_password: str) -> None:
    """Connects as the owner at `url`, makes or updates the roles and migrates to head."""
    passwords = {REQUEST_ROLE: request_password, ENGINE_ROLE: engine_password}
    migrations.migrate(url, SCHEMA, passwords, Path(__file__).parent / "migrations")


def main() -> int:
    """Reads CONVERSATION_MIGRATION_URL and the two roles' passwords; says what is missing."""
    names = ("CONVERSATION_MIGRATION_URL", "CONVERSATION_ROLE_PASSWORD", "CONVERSATION_ENGINE_ROLE_PASSWORD")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        print(f"Set {', '.join(missing)}: the owner's address and the passwords of both roles.", file=sys.stderr)
        return 1
    try:
        migrate(*(os.environ[name] for name in names))
    except migrations.PostgresTooOld as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
