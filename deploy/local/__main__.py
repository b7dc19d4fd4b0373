"""The local stack: `python -m deploy.local COMMAND`, usually called by make."""

import sys

try:
    from deploy.local.commands import main
except KeyboardInterrupt:  # while importing: there is nothing to stop yet
    sys.exit(130)

sys.exit(main())
