"""`LocalSandbox`: a directory of this machine, its files confined by descriptors."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import trio

from trio_agent.errors import ConfigError, SandboxError
from trio_agent.sandbox.base import (
    MAX_BINARY_FILE_BYTES,
    MAX_TEXT_FILE_BYTES,
    FileChange,
    Listing,
    SearchResult,
    Sink,
    TextWindow,
)
from trio_agent.sandbox.bubblewrap import (
    HOME,
    TEMPORARY,
    Bubblewrap,
    find_bubblewrap,
)
from trio_agent.sandbox.canary import check_holds
from trio_agent.sandbox.capture import Capture
from trio_agent.sandbox.environment import command_environment
from trio_agent.sandbox.files import WorkspaceFiles
from trio_agent.sandbox.listing import list_directory
from trio_agent.sandbox.policy import Permissions
from trio_agent.sandbox.process import run_process
from trio_agent.sandbox.protection import PROTECTED_PATHS, Mount, Protection
from trio_agent.sandbox.search import (
    MatchLines,
    Query,
    find_ripgrep,
    ripgrep_arguments,
    search_plainly,
)
from trio_agent.sandbox.window import read_window, show

_T = TypeVar("_T")

Isolation: TypeAlias = Literal["bubblewrap", "none"]

SHELL: Final = "/bin/bash"

_DIES_WITH_ENGINE: Final = (
    'exec 3<&0 </dev/null; (read _ <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" 3<&-'
)
"""Bare commands: a watcher in their process group reads from a pipe that only the engine
holds open. When the engine is gone, however it went, the watcher ends the group."""


_IGNORED_BY_GIT: Final = f"{TEMPORARY}/.gitignore"

_GIT_IGNORES: Final = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.excludesFile",
    "GIT_CONFIG_VALUE_0": _IGNORED_BY_GIT,
}
"""Without it ``git add -A`` would take the placeholders of protected paths along."""


class LocalSandbox:
    """A directory of this machine: its files, and commands that are confined to it.

    Files are confined whatever *isolation* says. Nothing is held open between calls.

    Args:
        workspace: The directory; it may be reached through a link.
        isolation: ``"bubblewrap"`` or ``"none"``, which runs commands with all rights
            of the engine's user, ended with their process group at best.
        environment: Variables for commands, besides the few that are passed on
            (see `trio_agent.sandbox.environment`). What stands here is not secret any more.
        hidden: More paths that commands in bubblewrap find empty.
        readable: Paths inside hidden ones that they can read after all, such as
            a toolchain in a home directory.
        protected: Paths in the workspace that neither tools nor commands in
            bubblewrap may change; a slash at the end says that one is a directory.

    Raises:
        ConfigError: If *workspace* is no directory, or cannot be isolated.
    """

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        isolation: Isolation = "bubblewrap",
        environment: Mapping[str, str] | None = None,
        hidden: Iterable[str | os.PathLike[str]] = (),
        readable: Iterable[str | os.PathLike[str]] = (),
        protected: Iterable[str] = PROTECTED_PATHS,
    ) -> None:
        if isolation not in ("bubblewrap", "none"):
            raise ConfigError(f"isolation must be 'bubblewrap' or 'none', not {isolation!r}")
        paths = tuple(protected)
        for path in paths:
            if path.startswith("/") or ".." in path.split("/") or not path.strip("/"):
                raise ConfigError(f"protected path {path!r} must lie in the workspace")
        self._files = WorkspaceFiles(workspace, protected=paths)
        if isolation == "bubblewrap" and self._files.root == Path("/"):
            raise ConfigError("the root directory as a workspace leaves nothing to hide")
        self._isolation: Isolation = isolation
        self._environment = dict(environment or {})
        self._hidden = tuple(str(Path(path).absolute()) for path in hidden)
        self._readable = tuple(str(Path(path).absolute()) for path in readable)
        self._protection = Protection(self._files, paths)
        self._proven: set[bool] = set()
        self._proving = trio.Lock()

    @property
    def workspace(self) -> Path:
        """The directory, links resolved."""
        return self._files.root

    @property
    def isolation(self) -> Isolation:
        """How commands are confined."""
        return self._isolation

    # --- files

    async def read_bytes(self, path: str, *, limit: int = MAX_BINARY_FILE_BYTES) -> bytes:
        """See `BoundSandbox.read_bytes`."""
        bound = min(limit, MAX_BINARY_FILE_BYTES)
        return await _in_thread(lambda: self._files.read(path, limit=bound))

    async def read_text(self, path: str) -> str:
        """See `BoundSandbox.read_text`."""
        return await _in_thread(lambda: show(self._files.read(path, limit=MAX_TEXT_FILE_BYTES)))

    async def read_window(
        self, path: str, *, line: int = 1, lines: int = 2_000, byte: int | None = None
    ) -> TextWindow:
        """See `BoundSandbox.read_window`."""

        def read() -> TextWindow:
            with self._files.open(path) as descriptor:
                return read_window(descriptor, path, line=line, lines=lines, byte=byte)

        return await _in_thread(read)

    async def change(self, changes: Sequence[FileChange], *, full_access: bool = False) -> None:
        """See `BoundSandbox.change`."""
        await _in_thread(lambda: self._files.change(changes, full_access=full_access))

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 1_000) -> Listing:
        """See `BoundSandbox.list`."""
        return await _in_thread(
            lambda: list_directory(self._files, path, depth=depth, limit=limit)
        )

    async def search(
        self,
        pattern: str,
        *,
        path: str = ".",
        regex: bool = False,
        glob: str | None = None,
        limit: int = 200,
    ) -> SearchResult:
        """See `BoundSandbox.search`."""
        query = Query(pattern=pattern, path=path, regex=regex, glob=glob, limit=limit)
        wrap = self._bubblewrap_or_none()
        emptied = [] if wrap is None else wrap.emptied()
        ripgrep = find_ripgrep(self.workspace, emptied)
        if ripgrep is not None:
            try:
                return await self._run_ripgrep(ripgrep, wrap, query)
            except _RipgrepError:
                if regex:
                    raise
        elif regex:
            raise SandboxError(
                "a regular expression needs ripgrep (apt-get install ripgrep), which is not"
                " usable here; search for plain text instead"
            )
        return await _in_thread(
            lambda: search_plainly(self._files, query, trio.from_thread.check_cancelled)
        )

    def _bubblewrap_or_none(self) -> Bubblewrap | None:
        return None if self._isolation == "none" else self._bubblewrap()

    async def _run_ripgrep(
        self, ripgrep: str, wrap: Bubblewrap | None, query: Query
    ) -> SearchResult:
        place = await _in_thread(lambda: self._resolve(query.path))
        argv = [ripgrep, *ripgrep_arguments(query, place)]
        complaints = Capture(None, "ripgrep", limit=2_000)
        code = None
        scope = trio.CancelScope()
        lines = MatchLines(query.limit, scope)
        with scope:
            if wrap is None:
                code = await run_process(
                    argv,
                    cwd=str(self.workspace),
                    env=self._bare_environment(),
                    stdout=lines,
                    stderr=complaints,
                )
            else:
                env = self._isolated_environment()
                await self._prove(wrap, env, network=False)
                code = await wrap.run(
                    argv,
                    flags=wrap.flags(network=False, writable=False),
                    env=env,
                    stdout=lines,
                    stderr=complaints,
                )
        if code is not None and code not in (0, 1):
            raise _RipgrepError(f"the search failed: {complaints.output().text.strip()}")
        return lines.result()

    def _resolve(self, path: str) -> str:
        with self._files.place(path) as place:
            if place.status is None:
                raise SandboxError(f"{path}: no such file or directory")
            return place.path

    # --- commands

    async def execute(  # noqa: ASYNC128  (passed on)
        self,
        command: str,
        *,
        permissions: Permissions,
        stdout: Sink,
        stderr: Sink,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> int:
        """See `SandboxBackend.execute`."""
        if self._isolation == "none" or permissions.full_access:
            return await self._execute_bare(command, stdout, stderr, task_status)
        wrap = self._bubblewrap()
        env = self._isolated_environment()
        async with self._held_protection() as mounts:
            made = [f"/{mount.path}\n" for mount in mounts if mount.placeholder]
            env |= _GIT_IGNORES
            await self._prove(wrap, env, network=permissions.network, mounts=mounts)
            network = permissions.network
            flags = await _in_thread(lambda: wrap.flags(network=network, mounts=mounts))
            return await wrap.run(
                _shell(command),
                flags=flags,
                env=env,
                stdout=stdout,
                stderr=stderr,
                files={_IGNORED_BY_GIT: "".join(made)},
                task_status=task_status,
            )

    async def _execute_bare(  # noqa: ASYNC128  (passed on)
        self, command: str, stdout: Sink, stderr: Sink, task_status: trio.TaskStatus[None]
    ) -> int:
        await _in_thread(self._check_root)
        lease, held = os.pipe()
        try:
            return await run_process(
                ["/bin/sh", "-c", _DIES_WITH_ENGINE, "sh", *_shell(command)],
                cwd=str(self.workspace),
                env=self._bare_environment(),
                stdout=stdout,
                stderr=stderr,
                stdin=lease,
                task_status=task_status,
            )
        finally:
            os.close(lease)
            os.close(held)

    def _check_root(self) -> None:
        with self._files.opened_root():
            pass

    @contextlib.asynccontextmanager
    async def _held_protection(self) -> AsyncGenerator[Sequence[Mount]]:
        mounts = await _in_thread(self._protection.acquire)
        try:
            yield mounts
        finally:
            with trio.CancelScope(shield=True):  # a few unlinks
                await _in_thread(self._protection.release)

    async def _prove(
        self,
        wrap: Bubblewrap,
        env: dict[str, str],
        *,
        network: bool,
        mounts: Sequence[Mount] = (),
    ) -> None:
        """Run the canary once for each set of flags; a refusal is not remembered."""
        async with self._proving:
            if network not in self._proven:
                flags = await _in_thread(lambda: wrap.flags(network=network, mounts=mounts))
                await check_holds(wrap, flags=flags, env=env, network=network)
                self._proven.add(network)

    def _bubblewrap(self) -> Bubblewrap:
        if sys.platform != "linux":
            raise SandboxError(
                f"commands can be isolated on Linux only, not on {sys.platform};"
                " LocalSandbox(..., isolation='none') runs them unconfined"
            )
        return Bubblewrap(
            executable=find_bubblewrap(self.workspace),
            workspace=self.workspace,
            hidden=self._hidden,
            readable=self._readable,
        )

    def _isolated_environment(self) -> dict[str, str]:
        return command_environment(self._environment, home=HOME, temporary=TEMPORARY)

    def _bare_environment(self) -> dict[str, str]:
        return command_environment(
            self._environment, home=str(Path.home()), temporary=tempfile.gettempdir()
        )


class _RipgrepError(SandboxError):
    """ripgrep ran and failed, most often because of the pattern."""


def _shell(command: str) -> list[str]:
    """Return the program that runs *command*, which may begin with a dash."""
    if Path(SHELL).exists():
        return [SHELL, "--noprofile", "--norc", "-c", "--", command]
    return ["/bin/sh", "-c", "--", command]


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Run blocking file work in a worker thread; finished once begun, even if cancelled."""
    return await trio.to_thread.run_sync(function)
