"""`trio-agent`: a thin frontend over ops and events.

How signals end it: the first Ctrl-C or SIGTERM interrupts the running turn and
lets its last commit happen; a second one leaves at once, as far as a commit that
is under way allows. Whatever happens, the session can be opened again.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

import attrs
import trio

from trio_agent.cli.arguments import Options, parse_arguments
from trio_agent.cli.chat import PROMPT, chat
from trio_agent.cli.conversation import Conversation, open_conversation, signal_exit
from trio_agent.cli.exits import Exit, code_of, explain, leaves
from trio_agent.cli.listing import list_sessions, show_session
from trio_agent.cli.render import Renderer, printable
from trio_agent.cli.terminal import Lines, is_interactive, shows_colours
from trio_agent.errors import AgentError

FAREWELL = "Ctrl-C again, or Ctrl-D, leaves."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; see `trio_agent.cli.exits.Exit`.

    Args:
        arguments: Without the program's name; default: the process's own.
    """
    options = parse_arguments(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end a session
    try:
        return int(trio.run(_main, options))
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as exc:
        causes = list(leaves(exc))
        if not all(isinstance(one, (AgentError, OSError, KeyboardInterrupt)) for one in causes):
            raise
        return _report(causes)


def _report(causes: Sequence[BaseException]) -> int:
    for one in causes:
        if isinstance(one, AgentError):
            print(f"trio-agent: {printable(explain(one))}", file=sys.stderr)
        elif isinstance(one, OSError) and not isinstance(one, BrokenPipeError):
            print(f"trio-agent: {one}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads; what Python would still flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return max(code_of(one) for one in causes)


@attrs.define(eq=False)
class _Signals:
    """What Ctrl-C and SIGTERM do, depending on what runs."""

    scope: trio.CancelScope
    renderer: Renderer
    chatting: bool
    conversation: Conversation | None = None
    received: Exit | None = None

    async def watch(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen until cancelled."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                await self._handle(number)

    async def _handle(self, number: int) -> None:
        await trio.lowlevel.checkpoint()
        if self.conversation is None or self.conversation.signals:
            self.received = signal_exit(number)
            self.scope.cancel(reason="a signal")
            return
        self.conversation.signals += 1
        stopped = await self.conversation.interrupt()
        if self.chatting and number == signal.SIGINT:
            if not stopped:
                self.renderer.line("dim", FAREWELL)
                if is_interactive():
                    self.renderer.prompt(PROMPT)
            return
        self.received = signal_exit(number)
        if self.chatting or not stopped:
            self.scope.cancel(reason="a signal")


async def _main(options: Options) -> Exit:
    renderer = Renderer(out=sys.stdout, colour=shows_colours(sys.stdout))
    if options.command == "sessions":
        await list_sessions(options, renderer)
        return Exit.OK
    if options.command == "show":
        await show_session(options, renderer)
        return Exit.OK
    ending, scope = Exit.TURN, trio.CancelScope()
    signals = _Signals(scope, renderer, chatting=options.command == "chat")
    with scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(signals.watch)
            ending = await _talk(options, renderer, signals, Lines(nursery))
            nursery.cancel_scope.cancel(reason="done")
    return ending if signals.received is None else signals.received


async def _talk(options: Options, renderer: Renderer, signals: _Signals, lines: Lines) -> Exit:
    prompt = options.prompt
    if prompt == "-":
        prompt = await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    asked = lines if is_interactive() else None
    async with open_conversation(options, renderer, asked) as conversation:
        signals.conversation = conversation
        if signals.chatting:
            conversation.replay = True
            return await chat(conversation, lines)
        if prompt is not None:
            return await conversation.send(prompt)
        await conversation.agent.wait_idle()
    return conversation.last_ending
