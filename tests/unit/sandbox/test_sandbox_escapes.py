"""Ways out of the sandbox. Each is seen to work on naive flags, and to fail on ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

USERS = {"root": 0, "nobody": 65_534} if os.geteuid() == 0 else {"user": os.geteuid()}

ATTEMPTS = (
    "remount",
    "nested namespace",
    "environment of process 1",
    "inherited environment",
    "socket of the host",
    "loopback of the host",
    "write outside",
    "read the home",
    "read the password file",
    "signal the engine",
    "device file",
    "shared memory",
    "capabilities",
    "hook of git",
    "another git",
)

ROOT_ONLY = {"remount", "read the password file", "device file"}

# With its own user's rights alone, bubblewrap drops what these naive flags keep.
KEPT_FROM_USERS = {"capabilities"}

CANARY = ("no network namespace", "capabilities kept", "writable root")

# Where commands see the host's files: not below a directory that is hidden from them.
VISIBLE = ("/opt", "/srv", "/usr/local", "/var/lib")


def visible_directory() -> Path:
    for parent in (*VISIBLE, str(Path(__file__).parents[3])):
        if os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="trio-agent-test-", dir=parent))
    raise AssertionError("no directory that commands can see is writable for the tests")


@pytest.fixture(scope="module", params=USERS)
def results(request: pytest.FixtureRequest) -> Any:
    """What all attempts came to, as one user."""
    uid = USERS[request.param]
    outside = visible_directory()
    base = Path(tempfile.mkdtemp(prefix="trio-agent-test-"))
    try:
        workspace, home = base / "workspace", base / "home"
        (workspace / ".git" / "hooks").mkdir(parents=True)
        home.mkdir()
        (home / "secret").write_text("secret")
        for path in (base, outside, *base.rglob("*")):
            path.chmod(0o777)
            os.chown(path, uid, -1)
        done = subprocess.run(
            [
                sys.executable,
                str(Path(__file__).with_name("attempts.py")),
                str(uid),
                str(workspace),
                str(outside),
                str(home),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert done.returncode == 0, done.stderr
        yield uid, json.loads(done.stdout)
    finally:
        shutil.rmtree(base)
        shutil.rmtree(outside)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_gets_out(results: Any, name: str) -> None:
    uid, told = results

    assert told["attempts"][name]["ours"] is False

    if uid == 0 or name not in ROOT_ONLY | KEPT_FROM_USERS:
        assert told["attempts"][name]["naive"] is True, "the attempt itself must work"


def test_every_attempt_is_listed(results: Any) -> None:
    assert set(results[1]["attempts"]) == set(ATTEMPTS)


@pytest.mark.parametrize("name", CANARY)
def test_the_canary_sees_flags_that_do_not_hold(results: Any, name: str) -> None:
    assert results[1]["canary"][name] is True
