"""How long the write-ahead log may get, and who is told when it gets longer.

Rules:

1.  SQLite moves the log's pages into the file as it goes, and begins the log anew once
    nobody reads an older state of the file. No reader of ours does for longer than one
    call, so the log stays near the 4 MB at which SQLite starts to empty it.
2.  Another program may read as long as it likes. Saves go on and the log grows;
    nobody can empty it before that reader has ended. From `WARNING_BYTES` on, a line
    in the program's log says so.
3.  Once that reader has ended, one of the next two saves begins the log anew, and
    cuts it to `WAL_BYTES`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

WAL_BYTES: Final = 16 * 1_048_576
"""What a log keeps of its length once its pages have been moved into the file."""

WARNING_BYTES: Final = 4 * WAL_BYTES

_logger = logging.getLogger("trio_agent.store")


class LogWatch:
    """Tells the program's log about a write-ahead log that grows, once each time it does.

    Args:
        path: The database; its log lies beside it.
    """

    def __init__(self, path: Path) -> None:
        self._log = f"{path}-wal"
        self._told = False

    def look(self) -> None:
        """Look at the log's length; call it after a save."""
        try:
            size = os.stat(self._log).st_size  # noqa: PTH116  # runs with each save
        except OSError:
            return
        if size < WARNING_BYTES:
            self._told = False
        elif not self._told:
            self._told = True
            _logger.warning(
                "%s has grown to %d bytes, because another program has been reading the"
                " database without an end; it shrinks once that reader has finished",
                self._log,
                size,
            )
