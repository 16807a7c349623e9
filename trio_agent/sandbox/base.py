"""The contract between the engine, the tools, and whatever confines them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import attrs
import trio

from trio_agent.record import Record
from trio_agent.sandbox.policy import ApprovalPolicy, Permissions


class AnyContent(enum.Enum):
    """The type of ``ANY_CONTENT``."""

    ANY_CONTENT = "any"


ANY_CONTENT: Final = AnyContent.ANY_CONTENT
"""A change that overwrites whatever regular file is there, or makes a new one."""

FileKind: TypeAlias = Literal["file", "directory", "link", "other"]
"""``other`` is what no tool opens: a device, a FIFO, a socket."""

CommandStatus: TypeAlias = Literal["running", "exited", "stopped", "failed"]

MAX_TEXT_FILE_BYTES: Final = 1_048_576
"""A file that is read or written whole as text."""

MAX_BINARY_FILE_BYTES: Final = 52_428_800
"""A file that is read whole as bytes, or paged through as text."""

MAX_STREAM_BYTES: Final = 40_000
"""What is kept in memory, and shown, of one output stream of a command."""

MAX_COMMAND_BYTES: Final = 8_000
"""The text of one command."""

COMMAND_TIMEOUT: Final = 120.0
"""Seconds that a command in the foreground may take unless it says otherwise."""

MAX_BACKGROUND_COMMANDS: Final = 4
"""Commands of one session that run in the background at the same time."""

OUTPUT_PREFIX: Final = "@output/"
"""Paths that begin so name the full output of a command of this session, not a file."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class FileEntry(Record):
    """One thing in the workspace: its path from there, what it is, its size in bytes."""

    path: str
    kind: FileKind
    size: int = 0


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Listing(Record):
    """Entries in order of their paths; ``truncated`` when there were more than asked for."""

    entries: tuple[FileEntry, ...]
    truncated: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class TextWindow(Record):
    """A part of a text file.

    ``next_line`` and ``next_byte`` say where the rest begins, None at the end of
    the file. They differ when the window ends inside a line: then ``next_line``
    is that line again and only ``next_byte`` goes on.
    """

    text: str
    first_line: int
    next_line: int | None = None
    next_byte: int | None = None
    size: int = 0


@attrs.frozen(kw_only=True, eq=False, repr=False)
class FileChange(Record):
    """One file before and after.

    ``before`` is what must be there when the change is made: the bytes, None for
    no file at all, or ``ANY_CONTENT``. ``after`` is what will be there, None for
    no file. ``mode_from`` names the file whose permissions a new one takes.
    """

    path: str
    before: bytes | AnyContent | None
    after: bytes | None
    mode_from: str | None = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Match(Record):
    """One line that a search found; ``text`` is cut if the line is very long."""

    path: str
    line: int
    text: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class SearchResult(Record):
    """Matches in order of path and line; ``truncated`` when there were more than asked for."""

    matches: tuple[Match, ...]
    truncated: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StreamOutput(Record):
    """What a command wrote to one stream.

    ``text`` holds the head and the tail, undecodable bytes replaced. ``missing``
    counts the bytes left out of it; ``file`` is the path under which the model
    can read everything, ``unkept`` the bytes that even that file lacks.
    """

    text: str = ""
    missing: int = 0
    file: str | None = None
    unkept: int = 0


@attrs.frozen(kw_only=True, eq=False, repr=False)
class CommandOutput(Record):
    """How a command ended: its exit code (minus the signal's number if one killed it).

    ``timed_out`` is set when its time was up and everything it had started was killed.
    """

    exit_code: int
    stdout: StreamOutput = StreamOutput()
    stderr: StreamOutput = StreamOutput()
    timed_out: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class BackgroundOutput(Record):
    """What a background command wrote since it was last asked, and how it stands.

    ``output`` joins both streams in order of arrival.
    """

    command_id: str
    status: CommandStatus
    output: StreamOutput = StreamOutput()
    exit_code: int | None = None
    error: str | None = None


class BoundSandbox(Protocol):
    """A sandbox as one call sees it: confined, and with that call's permissions only.

    Every path is relative to the workspace (or absolute and inside it). Every
    method is a checkpoint and raises `SandboxError` for what is outside, missing,
    too large, protected or not granted. `Cancelled` from a method that reads
    leaves nothing behind; one that changes files has then changed nothing, since
    a change that has begun is finished first.
    """

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        ...

    @property
    def permissions(self) -> Permissions:
        """What this call was granted."""
        ...

    async def read_bytes(self, path: str, *, limit: int = MAX_BINARY_FILE_BYTES) -> bytes:
        """Return a regular file of at most *limit* bytes."""
        ...

    async def read_text(self, path: str) -> str:
        r"""Return a UTF-8 file of at most 1 MiB; other bytes are shown as ``\xNN``."""
        ...

    async def read_window(
        self, path: str, *, line: int = 1, lines: int = 2_000, byte: int | None = None
    ) -> TextWindow:
        """Return at most *lines* lines and 32 KiB from *line* on, or from *byte* on.

        *path* may be the full output of one of the session's commands.
        """
        ...

    async def write_text(self, path: str, text: str) -> None:
        """Write a file of at most 1 MiB, atomically; makes directories; keeps a mode.

        Needs ``mutate``.
        """
        ...

    async def change(self, changes: Sequence[FileChange]) -> None:
        """Make all *changes*, or none if one of them does not find what it expects.

        Needs ``mutate``.
        """
        ...

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 1_000) -> Listing:
        """Return what lies under *path*, without what ``.gitignore`` files leave out."""
        ...

    async def search(
        self,
        pattern: str,
        *,
        path: str = ".",
        regex: bool = False,
        glob: str | None = None,
        limit: int = 200,
    ) -> SearchResult:
        """Return the lines under *path* that hold *pattern*.

        A regular expression needs ripgrep, whose matching takes linear time.
        """
        ...

    async def run(self, command: str, *, timeout: float = COMMAND_TIMEOUT) -> CommandOutput:  # noqa: ASYNC109
        """Run a shell command to its end, or until *timeout* seconds are over.

        Needs ``mutate``. No process that it started is left, whatever the way out.
        """
        ...

    async def start(self, command: str) -> str:
        """Start a shell command in the background and return its id.

        Needs ``mutate``. It ends with the session at the latest.
        """
        ...

    async def poll(self, command_id: str) -> BackgroundOutput:
        """Return what the command wrote since last time; its end is told once."""
        ...

    async def stop(self, command_id: str) -> BackgroundOutput:
        """End the command and return the rest of its output; an ended one tells its end."""
        ...


class SandboxLike(Protocol):
    """What the engine asks of a sandbox."""

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        ...

    @property
    def policy(self) -> ApprovalPolicy:
        """Whose consent calls need, unless the configuration says otherwise."""
        ...

    def session(self, session_id: str) -> AbstractAsyncContextManager[object]:
        """Return a context for one opening of a session; leaving it stops its commands."""
        ...

    def bind(self, *, session_id: str, call_id: str, permissions: Permissions) -> BoundSandbox:
        """Return this sandbox for one call. Not a checkpoint."""
        ...


class Sink(Protocol):
    """Where the output of a command goes while it runs."""

    async def write(self, data: bytes) -> None:
        """Take the next bytes. May be slow: the command then waits, like at any pipe."""
        ...


class SandboxBackend(Protocol):
    """What does the work behind a `Sandbox`: one workspace, its files and its commands.

    The methods are those of `BoundSandbox`, without its checks of permissions.
    """

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        ...

    async def read_bytes(self, path: str, *, limit: int = MAX_BINARY_FILE_BYTES) -> bytes:
        """See `BoundSandbox.read_bytes`."""
        ...

    async def read_text(self, path: str) -> str:
        """See `BoundSandbox.read_text`."""
        ...

    async def read_window(
        self, path: str, *, line: int = 1, lines: int = 2_000, byte: int | None = None
    ) -> TextWindow:
        """See `BoundSandbox.read_window`; *path* is a file of the workspace."""
        ...

    async def change(self, changes: Sequence[FileChange], *, full_access: bool = False) -> None:
        """See `BoundSandbox.change`; *full_access* lifts the protection of paths, no more."""
        ...

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 1_000) -> Listing:
        """See `BoundSandbox.list`."""
        ...

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
        ...

    async def execute(
        self,
        command: str,
        *,
        permissions: Permissions,
        stdout: Sink,
        stderr: Sink,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> int:
        """Run a shell command with *permissions* and return its exit code.

        ``task_status.started()`` is called when it runs. Left by `Cancelled` or
        any other way, no process that it started is left.

        Raises:
            SandboxError: If it could not be confined as *permissions* ask, or not
                be started; it has then not run.
        """
        ...
