"""`Sandbox`: a backend, a policy, and what each session and each call may do with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import attrs
import trio

from trio_agent.errors import SandboxError
from trio_agent.protocol.text import check_text
from trio_agent.sandbox.background import BackgroundCommands
from trio_agent.sandbox.base import (
    ANY_CONTENT,
    COMMAND_TIMEOUT,
    MAX_BINARY_FILE_BYTES,
    MAX_COMMAND_BYTES,
    MAX_TEXT_FILE_BYTES,
    OUTPUT_PREFIX,
    BackgroundOutput,
    CommandOutput,
    FileChange,
    Listing,
    SandboxBackend,
    SearchResult,
    TextWindow,
)
from trio_agent.sandbox.capture import Capture, OutputFiles
from trio_agent.sandbox.policy import ApprovalPolicy, Permissions
from trio_agent.sandbox.window import read_window

MAX_TIMEOUT = 3_600.0
"""Seconds that a command in the foreground can be given at most."""


@attrs.frozen(kw_only=True, eq=False)
class _Session:
    commands: BackgroundCommands
    files: OutputFiles


class Sandbox:
    """Where the tools of any number of sessions act: one backend under one policy.

    Holds nothing open itself; what a session opens ends with its `session` context.

    Args:
        backend: What does the work, such as a `LocalSandbox`.
        policy: Whose consent calls need, unless a session's configuration says otherwise.
    """

    def __init__(
        self, backend: SandboxBackend, policy: ApprovalPolicy = ApprovalPolicy.ASK
    ) -> None:
        self._backend = backend
        self._policy = policy
        self._sessions: dict[str, _Session] = {}

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        return self._backend.workspace

    @property
    def policy(self) -> ApprovalPolicy:
        """Whose consent calls need, unless a session's configuration says otherwise."""
        return self._policy

    @contextlib.asynccontextmanager
    async def session(self, session_id: str) -> AsyncGenerator[None]:
        """Open a session; leaving it ends its commands and removes their outputs.

        What the block raises leaves as it came, never in a group. Leaving takes a
        moment even when cancelled: until every process is gone.
        """
        raised: BaseException | None = None
        files = OutputFiles()
        async with trio.open_nursery() as nursery:
            session = _Session(
                commands=BackgroundCommands(self._backend, nursery, files), files=files
            )
            self._sessions[session_id] = session
            try:
                yield
            except BaseException as exc:  # noqa: ASYNC103  (raised again below)
                raised = exc
            if self._sessions.get(session_id) is session:
                del self._sessions[session_id]
            nursery.cancel_scope.shield = True
            nursery.cancel_scope.cancel(reason="the session was left")
        with trio.CancelScope(shield=True):  # a few unlinks
            await trio.to_thread.run_sync(files.close)
        if raised is not None:
            raise raised

    def bind(self, *, session_id: str, call_id: str, permissions: Permissions) -> BoundCall:
        """Return this sandbox for one call. Not a checkpoint."""
        del call_id
        return BoundCall(
            backend=self._backend,
            permissions=permissions,
            session=self._sessions.get(session_id),
        )


@attrs.frozen(kw_only=True, eq=False)
class BoundCall:
    """See `BoundSandbox`: checks what the call was granted, then asks the backend."""

    _backend: SandboxBackend = attrs.field(alias="backend")
    _permissions: Permissions = attrs.field(alias="permissions")
    _session: _Session | None = attrs.field(alias="session")

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        return self._backend.workspace

    @property
    def permissions(self) -> Permissions:
        """What this call was granted."""
        return self._permissions

    async def read_bytes(self, path: str, *, limit: int = MAX_BINARY_FILE_BYTES) -> bytes:
        """See `BoundSandbox.read_bytes`."""
        return await self._backend.read_bytes(path, limit=limit)

    async def read_text(self, path: str) -> str:
        """See `BoundSandbox.read_text`."""
        return await self._backend.read_text(path)

    async def read_window(
        self, path: str, *, line: int = 1, lines: int = 2_000, byte: int | None = None
    ) -> TextWindow:
        """See `BoundSandbox.read_window`."""
        if not path.startswith(OUTPUT_PREFIX):
            return await self._backend.read_window(path, line=line, lines=lines, byte=byte)
        files = self._opened().files

        def read() -> TextWindow:
            with files.open(path) as descriptor:
                return read_window(descriptor, path, line=line, lines=lines, byte=byte)

        return await trio.to_thread.run_sync(read)

    async def write_text(self, path: str, text: str) -> None:
        """See `BoundSandbox.write_text`."""
        try:
            check_text(text, name=path, limit=MAX_TEXT_FILE_BYTES)
        except ValueError as exc:
            raise SandboxError(str(exc)) from None
        await self.change([FileChange(path=path, before=ANY_CONTENT, after=text.encode())])

    async def change(self, changes: Sequence[FileChange]) -> None:
        """See `BoundSandbox.change`."""
        self._require_mutate("change files")
        for change in changes:
            if change.after is not None and len(change.after) > MAX_BINARY_FILE_BYTES:
                raise SandboxError(
                    f"{change.path}: would have {len(change.after):,} bytes;"
                    f" at most {MAX_BINARY_FILE_BYTES:,} are allowed"
                )
        await self._backend.change(changes, full_access=self._permissions.full_access)

    async def list(self, path: str = ".", *, depth: int = 1, limit: int = 1_000) -> Listing:
        """See `BoundSandbox.list`."""
        return await self._backend.list(path, depth=depth, limit=limit)

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
        return await self._backend.search(
            pattern, path=path, regex=regex, glob=glob, limit=limit
        )

    async def run(self, command: str, *, timeout: float = COMMAND_TIMEOUT) -> CommandOutput:  # noqa: ASYNC109
        """See `BoundSandbox.run`."""
        self._require_command(command)
        if not 0 < timeout <= MAX_TIMEOUT:
            raise SandboxError(
                f"a command may take more than 0 and at most {MAX_TIMEOUT:,.0f} seconds, not"
                f" {timeout}; start_command runs one that takes longer"
            )
        files = None if self._session is None else self._session.files
        stdout, stderr = Capture(files, "stdout"), Capture(files, "stderr")
        code: int | None = None
        try:
            with trio.move_on_after(timeout):
                code = await self._backend.execute(
                    command, permissions=self._permissions, stdout=stdout, stderr=stderr
                )
        finally:
            stdout.close()
            stderr.close()
        return CommandOutput(
            exit_code=-9 if code is None else code,
            stdout=stdout.output(),
            stderr=stderr.output(),
            timed_out=code is None,
        )

    async def start(self, command: str) -> str:
        """See `BoundSandbox.start`."""
        self._require_command(command)
        return await self._opened().commands.start(command, self._permissions)

    async def poll(self, command_id: str) -> BackgroundOutput:
        """See `BoundSandbox.poll`."""
        return await self._opened().commands.poll(command_id)

    async def stop(self, command_id: str) -> BackgroundOutput:
        """See `BoundSandbox.stop`."""
        return await self._opened().commands.stop(command_id)

    def _opened(self) -> _Session:
        if self._session is None:
            raise SandboxError("this session is not open in the sandbox (any more)")
        return self._session

    def _require_mutate(self, what: str) -> None:
        if not self._permissions.mutate:
            raise SandboxError(
                f"this call was not granted the right to {what}: its tool must declare"
                " needs_approval=True"
            )

    def _require_command(self, command: str) -> None:
        self._require_mutate("run commands")
        try:
            check_text(command, name="the command", limit=MAX_COMMAND_BYTES, blank=False)
        except ValueError as exc:
            raise SandboxError(f"{exc}; write longer ones to a script and run that") from None
        if "\0" in command:
            raise SandboxError("the command must not contain a NUL character")
