"""Commands in a bubblewrap of their own, and the proof that it holds.

What the flags give, and what each of the usual shorter forms lets through, is in
``docs/sandbox.md``; `tests` show both. Nothing here falls back: before the first
command a canary runs inside the very same flags and tries to get out, and if it
does, or cannot run, every command is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import attrs
import trio

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import Sink
from trio_agent.sandbox.process import run_process
from trio_agent.sandbox.protection import Mount

HOME: Final = "/tmp/home"  # noqa: S108  (inside the sandbox /tmp is private)
TEMPORARY: Final = "/tmp"  # noqa: S108

BASE_FLAGS: Final = (
    "--unshare-user",
    "--disable-userns",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--cap-drop",
    "ALL",
    "--new-session",
    "--die-with-parent",
    "--ro-bind",
    "/",
    "/",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
)

HIDDEN_DIRECTORIES: Final = (
    "/tmp",  # noqa: S108
    "/var/tmp",  # noqa: S108
    "/run",
    "/home",
    "/root",
)
"""Empty, private and writable inside: other people's files, and the sockets of the host."""

SECRET_PATHS: Final = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/krb5.keytab",
    "/etc/ssl/private",
    "/etc/docker",
    "/etc/kubernetes",
    "/etc/NetworkManager/system-connections",
    "/etc/wireguard",
    "/var/spool/cron",
    "/var/lib/docker",
    "/var/lib/containerd",
    "/var/lib/private",
)
"""Empty inside: what only root may read, and root may run an engine."""

_SSH_KEYS: Final = ("/etc/ssh", "ssh_host_*_key")

REMEDY: Final = (
    "Install bubblewrap 0.8 or newer (apt-get install bubblewrap) and let it make user"
    " namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0,"
    " kernel.apparmor_restrict_unprivileged_userns=0; in a container: a seccomp profile that"
    " allows them), or run commands unconfined with LocalSandbox(..., isolation='none')."
)
"""What every refusal of a sandbox that does not hold ends with."""


@attrs.frozen(kw_only=True, eq=False)
class Bubblewrap:
    """One way to run commands: the flags for one workspace.

    Attributes:
        executable: bubblewrap itself.
        workspace: Mounted writable.
        hidden: More paths that are empty inside.
        readable: Paths inside hidden ones that can be read after all.
    """

    executable: str
    workspace: Path
    hidden: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def flags(
        self, *, network: bool, mounts: Sequence[Mount] = (), writable: bool = True
    ) -> list[str]:
        """Return bubblewrap's options, in the order that it applies them."""
        flags: list[str] = [*BASE_FLAGS]
        if not network:
            flags.append("--unshare-net")
        emptied = self.emptied()
        for path in emptied:
            flags += ["--tmpfs", path]
        for path in self.masked():
            masks = Path(path).is_dir()
            flags += ["--tmpfs", path] if masks else ["--ro-bind", "/dev/null", path]
        if network:
            # The names of servers are often configured by a link into /run.
            resolver = os.path.realpath("/etc/resolv.conf")
            flags += ["--ro-bind-try", resolver, resolver]
        for path in self.readable:
            flags += ["--ro-bind-try", path, path]
        workspace = str(self.workspace)
        flags += ["--bind" if writable else "--ro-bind", workspace, workspace]
        for mount in mounts:
            path = f"{workspace}/{mount.path}"
            flags += ["--bind" if mount.kind == "writable" else "--ro-bind", path, path]
        return [*flags, "--dir", HOME, "--chdir", workspace]

    def emptied(self) -> list[str]:
        """Return the directories that are empty and private inside."""
        found: dict[str, None] = {}
        for path in (*HIDDEN_DIRECTORIES, str(Path.home()), *self.hidden):
            real = os.path.realpath(path)
            if real != "/" and Path(real).is_dir():
                found[real] = None
        return sorted(found)

    def masked(self) -> list[str]:
        """Return the other paths that hold secrets and are empty inside."""
        emptied = tuple(f"{path}/" for path in self.emptied())
        directory, pattern = _SSH_KEYS
        paths = [*SECRET_PATHS, *map(str, sorted(Path(directory).glob(pattern)))]
        paths += [path for path in self.hidden if not Path(path).is_dir()]
        paths += _listening_sockets()
        real = {os.path.realpath(path) for path in paths if Path(path).exists()}
        inside = f"{self.workspace}/"
        return sorted(path for path in real if not path.startswith((*emptied, inside)))

    async def run(  # noqa: ASYNC128  (passed on)
        self,
        argv: Sequence[str],
        *,
        flags: Sequence[str],
        env: dict[str, str],
        stdout: Sink,
        stderr: Sink,
        files: Mapping[str, str] | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> int:
        """Run *argv* inside *flags* and return its exit code, 128 + n for a signal n.

        *env* is also bubblewrap's own, since a command can read it there. *files* are
        made inside, by their path and text.

        Raises:
            SandboxError: If bubblewrap failed before *argv* ran.
        """
        complaints = _Complaints(stderr)
        with contextlib.ExitStack() as stack:
            given = list(flags)
            pass_fds: list[int] = []
            for path, text in (files or {}).items():
                descriptor = stack.enter_context(_memory_file(os.fsencode(text)))
                pass_fds.append(descriptor)
                given += ["--file", str(descriptor), path]
            packed = b"".join(os.fsencode(flag) + b"\0" for flag in given)
            arguments = stack.enter_context(_memory_file(packed))
            reader, writer = stack.enter_context(_status_pipe())
            code = await run_process(
                [
                    self.executable,
                    "--args",
                    str(arguments),
                    "--json-status-fd",
                    str(writer),
                    "--",
                    *argv,
                ],
                cwd="/",
                env=env,
                stdout=stdout,
                stderr=complaints,
                pass_fds=(arguments, writer, *pass_fds),
                task_status=task_status,
            )
            reported = _reported_exit(reader)
        if reported is None and code >= 0:
            raise SandboxError(
                f"bubblewrap could not start the command: {complaints.text or f'exit {code}'}."
                f" {REMEDY}"
            )
        return code if reported is None else reported


def _listening_sockets() -> list[str]:
    """Return the paths of the host's UNIX sockets: no namespace keeps a command from them."""
    try:
        table = Path("/proc/net/unix").read_text(errors="surrogateescape")
    except OSError:
        return []
    rows = (line.split(" ", 7) for line in table.splitlines()[1:])
    names = (row[-1].lstrip("0123456789").strip() for row in rows if len(row) == 8)
    return [name for name in names if name.startswith("/")]


def find_bubblewrap(workspace: Path) -> str:
    """Return bubblewrap's path.

    Raises:
        SandboxError: If there is none, or only one that the model could have written.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(f"commands need bubblewrap, which is not on PATH. {REMEDY}")
    real = Path(found).resolve()
    if real.is_relative_to(workspace):
        raise SandboxError(f"{real} lies in the workspace and is not trusted. {REMEDY}")
    return str(real)


class _Complaints:
    """Passes standard error on and keeps its beginning, for when bubblewrap itself failed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept = bytearray()

    @property
    def text(self) -> str:
        return bytes(self._kept).decode(errors="replace").strip()

    async def write(self, data: bytes) -> None:
        self._kept += data[: 500 - len(self._kept)] if len(self._kept) < 500 else b""
        await self._sink.write(data)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Generator[int]:
    descriptor = os.memfd_create("bubblewrap", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _status_pipe() -> Generator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def _reported_exit(reader: int) -> int | None:
    """Return the exit code that bubblewrap reported; without one the command never ran."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(reader, 65_536):
            data += piece
    for line in data.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            report = cast("dict[str, Any]", json.loads(line))
            if "exit-code" in report:
                return int(report["exit-code"])
    return None
