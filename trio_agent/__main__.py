"""``python -m trio_agent`` is the command `trio-agent`."""

from __future__ import annotations

import sys

from trio_agent.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
