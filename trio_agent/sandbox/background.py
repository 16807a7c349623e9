"""Commands that run while the model does something else: started, asked, stopped, never lost.

They belong to one opening of a session and run in its nursery, so leaving the
session ends them, whatever the way out.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trio_agent.ambient import new_id
from trio_agent.errors import SandboxError
from trio_agent.protocol.text import cut_end
from trio_agent.sandbox.base import (
    MAX_BACKGROUND_COMMANDS,
    BackgroundOutput,
    CommandStatus,
    SandboxBackend,
)
from trio_agent.sandbox.capture import Capture, OutputFiles
from trio_agent.sandbox.policy import Permissions

MAX_POLLED_BYTES = 16_000
"""What is kept between two polls of a command."""

MAX_ENDED_COMMANDS = 16
"""Ended commands whose end nobody has asked for; the oldest is forgotten."""


@attrs.define(kw_only=True, eq=False)
class _Command:
    command_id: str
    output: Capture
    scope: trio.CancelScope
    ended: trio.Event
    status: CommandStatus = "running"
    exit_code: int | None = None
    error: str | None = None

    def report(self) -> BackgroundOutput:
        return BackgroundOutput(
            command_id=self.command_id,
            status=self.status,
            output=self.output.drain(),
            exit_code=self.exit_code,
            error=self.error,
        )


class BackgroundCommands:
    """The background commands of one opening of a session.

    Args:
        backend: Runs them.
        nursery: Their tasks live in it; none of them raises.
        files: Takes outputs that are too long.
        make_id: Gives each its id.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        nursery: trio.Nursery,
        files: OutputFiles,
        make_id: Callable[[], str] = new_id,
    ) -> None:
        self._backend = backend
        self._nursery = nursery
        self._files = files
        self._make_id = make_id
        self._commands: dict[str, _Command] = {}

    async def start(self, command: str, permissions: Permissions) -> str:
        """Start *command* and return its id once it runs.

        If cancelled before that, it does not run.

        Raises:
            SandboxError: If it could not be started, or too many run already.
        """
        running = sum(entry.status == "running" for entry in self._commands.values())
        if running >= MAX_BACKGROUND_COMMANDS:
            raise SandboxError(
                f"{running} commands run in the background already, which is the limit;"
                " stop one of them first"
            )
        command_id = self._make_id()
        entry = _Command(
            command_id=command_id,
            output=Capture(self._files, "background", limit=MAX_POLLED_BYTES),
            scope=trio.CancelScope(),
            ended=trio.Event(),
        )
        self._commands[command_id] = entry
        started = trio.Event()
        self._nursery.start_soon(self._run, entry, command, permissions, started)
        try:
            await started.wait()
        except trio.Cancelled:
            entry.scope.cancel(reason="the call that started it was cancelled")
            self._commands.pop(command_id, None)
            raise
        if entry.status == "failed":
            del self._commands[command_id]
            raise SandboxError(entry.error or "the command could not be started")
        return command_id

    async def _run(  # noqa: ASYNC910  (a failure at once is told without one)
        self, entry: _Command, command: str, permissions: Permissions, started: trio.Event
    ) -> None:
        try:
            with entry.scope:
                entry.exit_code = await self._backend.execute(
                    command,
                    permissions=permissions,
                    stdout=entry.output,
                    stderr=entry.output,
                    task_status=_Started(started),
                )
                entry.status = "exited"
        except Exception as exc:
            entry.status = "failed"
            entry.error = cut_end(f"{exc}", 500)
        finally:
            if entry.status == "running":
                entry.status = "stopped"
            entry.output.close()
            entry.ended.set()
            started.set()
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        ended = [key for key, entry in self._commands.items() if entry.status != "running"]
        for key in ended[: max(0, len(ended) - MAX_ENDED_COMMANDS)]:
            del self._commands[key]

    async def poll(self, command_id: str) -> BackgroundOutput:
        """Return what is new; the answer that tells the end is the last one. A checkpoint."""
        entry = self._find(command_id)
        await trio.lowlevel.checkpoint()
        return self._report(entry)

    async def stop(self, command_id: str) -> BackgroundOutput:
        """End the command and return the rest. If cancelled, it ends all the same."""
        entry = self._find(command_id)
        entry.scope.cancel(reason="stopped by the model")
        await entry.ended.wait()
        return self._report(entry)

    def _find(self, command_id: str) -> _Command:
        entry = self._commands.get(command_id)
        if entry is None:
            raise SandboxError(
                f"{command_id}: no such command in this session; its end was told already,"
                " or it ended when the session was left"
            )
        return entry

    def _report(self, entry: _Command) -> BackgroundOutput:
        if entry.status != "running":
            self._commands.pop(entry.command_id, None)
        return entry.report()


class _Started(trio.TaskStatus[None]):
    """Says that the command runs; the task itself is not waited for."""

    def __init__(self, event: trio.Event) -> None:
        self._event = event

    def started(self, value: None = None) -> None:  # noqa: ARG002  (trio's signature)
        self._event.set()
