"""Runs the ways out of a sandbox as one user and prints which of them worked.

A program of its own, started by `test_sandbox_escapes`: it gives up its rights first,
and puts a secret into its environment that no command may see.

    python attempts.py UID WORKSPACE OUTSIDE HOME

The answer is JSON: for each attempt whether it got out of our flags, and out of naive ones
(null where even naive flags give this user nothing to use).
"""


# ruff: noqa: T201
# (a test looks from outside, and may block)

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
from pathlib import Path

import attrs
import trio

from trio_agent.sandbox.bubblewrap import Bubblewrap, find_bubblewrap
from trio_agent.sandbox.canary import try_to_escape
from trio_agent.sandbox.capture import Capture
from trio_agent.sandbox.environment import command_environment
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.policy import Permissions

ESCAPED = "got-out"
SECRET = "sk-the-key-of-a-provider"

_ROOT = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
_ISOLATED = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net"]


@attrs.frozen(kw_only=True)
class Attempt:
    """A script that prints ``got-out`` if it works, and flags that let it."""

    script: str
    naive: list[str]
    root_only: bool = False
    clear_environment: bool = False


def listen_tcp() -> int:
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def listen_unix(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    threading.Thread(target=_serve, args=(server,), daemon=True).start()


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.close()


def make_shared_memory() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.shmget(0, 4_096, 0o1600))


def attempts(outside: Path, home: Path, port: int, unix: Path, shm: int) -> dict[str, Attempt]:
    python = "/usr/bin/python3 -I -S -c"
    return {
        "remount": Attempt(
            script=f"mount -o remount,bind,rw / && touch {outside}/remounted && echo {ESCAPED}",
            naive=[*_ROOT, "--unshare-all"],
            root_only=True,
        ),
        "nested namespace": Attempt(
            script=f"unshare --user true && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED, "--cap-drop", "ALL"],
        ),
        "environment of process 1": Attempt(
            script=f"grep -aq {SECRET} /proc/1/environ && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED, "--clearenv"],
            clear_environment=True,
        ),
        "inherited environment": Attempt(
            script=f"env | grep -q {SECRET} && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED],
            clear_environment=True,
        ),
        "socket of the host": Attempt(
            script=f"{python} \"import socket; socket.socket(1).connect('{unix}')\""
            f" && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED],
        ),
        "loopback of the host": Attempt(
            script=f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo {ESCAPED}",
            naive=[*_ROOT, "--unshare-user", "--unshare-pid"],
        ),
        "write outside": Attempt(
            script=f"touch {outside}/written && echo {ESCAPED}",
            naive=["--bind", "/", "/", "--dev", "/dev", *_ISOLATED],
        ),
        "read the home": Attempt(
            script=f"cat {home}/secret && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED],
        ),
        "read the password file": Attempt(
            script=f"grep -q root: /etc/shadow && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED],
            root_only=True,
        ),
        "signal the engine": Attempt(
            script=f"kill -0 {os.getpid()} && grep -aq attempts.py /proc/{os.getpid()}/cmdline"
            f" && echo {ESCAPED}",
            naive=[*_ROOT, "--unshare-user"],
        ),
        "device file": Attempt(
            script=f"mknod device b 1 0 && echo {ESCAPED}",
            naive=_ROOT,
            root_only=True,
        ),
        "shared memory": Attempt(
            script=f"grep -q ' {shm} ' /proc/sysvipc/shm && echo {ESCAPED}",
            naive=[*_ROOT, "--unshare-user", "--unshare-pid"],
        ),
        "capabilities": Attempt(
            script=f"grep -q 'CapBnd:.*[1-9a-f]' /proc/self/status && echo {ESCAPED}",
            naive=[*_ROOT, "--unshare-all"],
        ),
        "hook of git": Attempt(
            script=f"echo evil > .git/hooks/post-commit && echo {ESCAPED}",
            naive=[*_ROOT, *_ISOLATED],
        ),
        "another git": Attempt(
            script="mv .git moved && mkdir -p .git/hooks && echo evil > .git/hooks/pre-push"
            f" && echo {ESCAPED}; rm -rf moved; mkdir -p .git/hooks",
            naive=[*_ROOT, *_ISOLATED],
        ),
    }


async def shell(wrap: Bubblewrap, attempt: Attempt, workspace: Path) -> bool:
    """Run an attempt in its naive flags."""
    out = Capture(None, "out")
    flags = [*attempt.naive, "--die-with-parent", "--bind", str(workspace), str(workspace)]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    if attempt.clear_environment:
        env["PROVIDER_KEY"] = SECRET
    argv = ["/bin/bash", "-c", attempt.script]
    await wrap.run(
        argv,
        flags=[*flags, "--chdir", str(workspace)],
        env=env,
        stdout=out,
        stderr=Capture(None, "err"),
    )
    return ESCAPED in out.output().text


async def main(workspace: Path, outside: Path, home: Path) -> None:
    unix = outside / f"{os.getuid()}.socket"
    listen_unix(unix)
    port, shm = listen_tcp(), make_shared_memory()
    sandbox = LocalSandbox(workspace)
    wrap = Bubblewrap(executable=find_bubblewrap(workspace), workspace=workspace)
    results: dict[str, dict[str, bool | None]] = {}
    for name, attempt in attempts(outside, home, port, unix, shm).items():
        out = Capture(None, "out")
        await sandbox.execute(
            attempt.script,
            permissions=Permissions(mutate=True),
            stdout=out,
            stderr=Capture(None, "err"),
        )
        ours = ESCAPED in out.output().text
        usable = os.getuid() == 0 or not attempt.root_only
        naive = await shell(wrap, attempt, workspace) if usable else None
        results[name] = {"ours": ours, "naive": naive}
    env = command_environment({}, home="/tmp", temporary="/tmp")
    found = {}
    for name, flags in {
        "no network namespace": [
            *_ROOT,
            "--unshare-user",
            "--disable-userns",
            "--cap-drop",
            "ALL",
        ],
        "capabilities kept": [*_ROOT, "--unshare-all"],
        "writable root": [
            *("--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *(*_ISOLATED, "--disable-userns", "--cap-drop", "ALL"),
        ],
    }.items():
        bound = [*flags, "--bind", str(workspace), str(workspace)]
        escapes = await try_to_escape(wrap, flags=bound, env=env, network=False)
        found[name] = bool(escapes)
    print(json.dumps({"attempts": results, "canary": found}))


if __name__ == "__main__":
    uid = int(sys.argv[1])
    if os.getuid() != uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.environ["PROVIDER_KEY"] = SECRET
    os.environ["HOME"] = sys.argv[4]
    trio.run(main, Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
