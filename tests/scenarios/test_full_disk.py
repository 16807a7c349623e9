"""A real disk without space: the session breaks, says so, and goes on once there is some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("full_disk_child.py")
BWRAP = ["bwrap", "--dev-bind", "/", "/", "--size", "2097152", "--tmpfs"]


def test_a_full_disk_breaks_a_session_and_nothing_else(tmp_path: Path) -> None:
    """From no space at all to enough for a whole turn, in a new file and in an old one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    child = subprocess.run(
        [*BWRAP, str(disk), sys.executable, str(CHILD), str(disk)],
        env={**os.environ, "PYTHONPATH": str(CHILD.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    tries = [json.loads(line) for line in child.stdout.splitlines()]
    for one in tries:
        assert one["then"] == "completed", "the same process can open it again"
        assert one["problems"] == []
        assert set(one["ran"]) <= set(one["saved"]), "a tool ran whose call was not saved"
        assert one["created"] or {"earlier 0", "earlier 1"} <= set(one["saved"])
    broken = [one for one in tries if "error" in one]
    assert {one["outcome"] for one in tries if one not in broken} == {"completed"}
    assert {one["cause"] for one in broken} == {"SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"}
    opening = {one["message"] for one in broken if one["error"] == "CheckpointError"}
    running = {one["message"] for one in broken if one["error"] == "SessionBrokenError"}
    assert len(opening) == len(running) == 1, "whatever SQLite calls it, the remedy is one"
    assert any(one["ran"] for one in broken)
