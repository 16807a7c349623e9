"""The proof that a sandbox holds: a program that tries to get out, run in its very flags.

Flags that look right let through what a kernel, a container or a version of
bubblewrap does not support, and say nothing. So none is believed before it was tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

import trio

from trio_agent.errors import SandboxError
from trio_agent.sandbox.bubblewrap import REMEDY, Bubblewrap
from trio_agent.sandbox.capture import Capture
from trio_agent.sandbox.environment import DEFAULT_PATH

CANARY_TIMEOUT: Final = 15.0
"""Seconds that the canary gets; it needs a twentieth of one."""

_CANARY = r"""
import ctypes, json, os, socket, sys

workspace, port, names, writable = json.loads(sys.argv[1])
found = []


def check(escaped, words):
    if escaped:
        found.append(words)


status = {}
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    status[name] = value.strip()
check(int(status["CapEff"], 16) or int(status["CapPrm"], 16), "it has capabilities")
check(int(status["CapBnd"], 16), "it can gain capabilities")
check(status["NoNewPrivs"] != "1", "it can gain privileges")

libc = ctypes.CDLL(None, use_errno=True)
check(libc.mount(b"none", b"/", None, 32 | 4096, None) == 0, "it can mount the root anew")
check(libc.unshare(0x10000000) == 0, "it can make user namespaces")
try:
    open("/.trio-agent-canary", "x").close()
    os.unlink("/.trio-agent-canary")
    found.append("it can write outside the workspace")
except OSError:
    pass

for line in open("/proc/self/mountinfo"):
    fields = line.split()
    place = fields[4].encode().decode("unicode_escape").encode("latin-1")
    place = place.decode(errors="surrogateescape")
    mine = any(place == path or place.startswith(path + "/") for path in writable)
    check("rw" in fields[5].split(",") and not mine, "it can write to " + place)
check(not os.access(workspace, os.W_OK), "it cannot write to the workspace")

if port:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        found.append("it reaches the network of the host")
    except OSError:
        pass

try:
    for entry in open("/proc/1/environ", errors="replace").read().split("\0"):
        name = entry.partition("=")[0]
        check(entry and name not in names, "it sees the variable " + name)
except OSError:
    found.append("its first process is not its own")
processes = sum(name.isdigit() for name in os.listdir("/proc"))
check(processes > 8, "it sees processes of the host")
print(json.dumps(found))
"""


async def check_holds(
    wrap: Bubblewrap, *, flags: Sequence[str], env: dict[str, str], network: bool
) -> None:
    """Run the canary inside *flags*. Nothing is left behind if it is cancelled.

    Args:
        wrap: Runs it.
        flags: Exactly those that commands will get.
        env: Exactly what commands will get.
        network: Whether *flags* let it reach the network.

    Raises:
        SandboxError: If it got out in any way, or could not run; it says how, and
            what to install or set.
    """
    escapes = await try_to_escape(wrap, flags=flags, env=env, network=network)
    if escapes:
        raise SandboxError(
            "the sandbox does not hold here, so no command is run:"
            f" {'; '.join(escapes)}. {REMEDY}"
        )


async def try_to_escape(
    wrap: Bubblewrap, *, flags: Sequence[str], env: dict[str, str], network: bool
) -> list[str]:
    """Return in which ways the canary got out; see `check_holds`.

    Raises:
        SandboxError: If it could not run.
    """
    stdout, stderr = Capture(None, "canary"), Capture(None, "canary")
    interpreter, shown = _interpreter()
    writable = ["/dev", "/proc", *wrap.emptied(), *wrap.masked(), str(wrap.workspace)]
    finished = False
    with contextlib.ExitStack() as stack:
        port = 0
        if not network:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]
        question = json.dumps([str(wrap.workspace), port, [*env, "PWD"], writable])
        argv = [interpreter, "-I", "-S", "-c", _CANARY, question]
        with trio.move_on_after(CANARY_TIMEOUT):
            await wrap.run(argv, flags=[*flags, *shown], env=env, stdout=stdout, stderr=stderr)
            finished = True
    if not finished:
        raise SandboxError(
            f"the sandbox's self-test did not end within {CANARY_TIMEOUT} s. {REMEDY}"
        )
    try:
        escapes: Any = json.loads(stdout.output().text)
    except ValueError:
        words = stderr.output().text.strip()[-500:]
        raise SandboxError(
            f"the sandbox's self-test could not run: {words}. {REMEDY}"
        ) from None
    return [str(words) for words in escapes]


def _interpreter() -> tuple[str, list[str]]:
    """Return a Python for the canary, and the flags that show it.

    It may lie in a hidden directory; to show it read-only opens no way out. An
    engine that gave up its rights after the start may not be able to run its own.
    """
    own, base = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    if os.access(own, os.X_OK):
        return own, [] if base in ("/", "/usr") else ["--ro-bind", base, base]
    found = shutil.which("python3", path=DEFAULT_PATH)
    if found is None:
        raise SandboxError(f"the sandbox's self-test finds no Python that it may run. {REMEDY}")
    return found, []
