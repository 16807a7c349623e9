"""One open session at the terminal: what is sent, what is printed, who is asked."""

from __future__ import annotations

import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trio_agent import (
    Abort,
    Agent,
    AgentConfig,
    Approved,
    ApprovedForSession,
    CancelQueued,
    Denied,
    ExecApproval,
    Interrupt,
    LocalSandbox,
    Sandbox,
    SubmissionRejectedError,
    TokenUsage,
    UserInput,
    create_agent,
)
from trio_agent.cli.arguments import Options, database_path
from trio_agent.cli.exits import Exit
from trio_agent.cli.render import Renderer
from trio_agent.cli.terminal import Lines
from trio_agent.errors import ConfigError
from trio_agent.protocol.events import (
    Event,
    ExecApprovalRequest,
    ModelStepCompleted,
    SessionHistory,
    TokenCount,
    ToolCallEnd,
    TurnAborted,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.ops import Decision
from trio_agent.tools import coding_tools

SYSTEM_PROMPT: Final = (
    "You are a careful assistant in a terminal. Your tools work in the user's workspace, and "
    "paths are relative to it. Answer shortly, in plain text without markup."
)
NOBODY_TO_ASK: Final = (
    "nobody could be asked: the command has no terminal; "
    "--policy says what may run without asking"
)
INPUT_ENDED: Final = "the user's input ended before an answer came"
QUESTION: Final = "Allow it? [y]es, [n]o and why, always, network (once), abort: "


@asynccontextmanager
async def open_conversation(
    options: Options, renderer: Renderer, lines: Lines | None
) -> AsyncGenerator[Conversation]:
    """Open the session that *options* name, and print its events until the block ends.

    Args:
        options: What the user typed.
        renderer: Where events go.
        lines: Where answers come from, or None if nobody can be asked.

    Raises:
        AgentError: What opening or the session raises, perhaps in a group.
    """
    async with create_agent(_config(options)) as agent:
        conversation = Conversation(agent=agent, renderer=renderer, lines=lines)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.follow, name="events")
            yield conversation
            agent.close()  # the reader ends once it has printed the last event


def _config(options: Options) -> AgentConfig:
    if not options.workspace.is_dir():
        raise ConfigError(f"--workspace {str(options.workspace)!r} is no directory")
    database = database_path(options)
    if options.database is None:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sandbox = Sandbox(
        LocalSandbox(options.workspace, isolation=options.isolation), policy=options.policy
    )
    config = AgentConfig(
        model=options.model,
        system_prompt=SYSTEM_PROMPT,
        tools=coding_tools(),
        sandbox=sandbox,
        checkpoints=database,
        recovery=options.recovery,
    )
    if options.session_id is None:
        return config
    return attrs.evolve(config, session_id=options.session_id)


@attrs.define(kw_only=True, eq=False)
class Conversation:
    """An open session, its printed events, and the questions that it asks."""

    agent: Agent
    renderer: Renderer
    lines: Lines | None
    replay: bool = False
    """Whether to print what happened before this opening."""
    signals: int = 0
    """How often the user interrupted since the last message."""
    _turns: dict[str, str] = attrs.field(factory=dict[str, str], init=False)
    _endings: dict[str, Exit] = attrs.field(factory=dict[str, Exit], init=False)
    _last: Exit = attrs.field(default=Exit.OK, init=False)
    _heard: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _asking: trio.CancelScope | None = attrs.field(default=None, init=False)
    _usage: TokenUsage = attrs.field(factory=TokenUsage, init=False)
    _steps: int = attrs.field(default=0, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _pending: str | None = attrs.field(default=None, init=False)

    @property
    def last_ending(self) -> Exit:
        """How the last turn ended that was heard of; OK before the first."""
        return self._last

    async def send(self, text: str) -> Exit:
        """Send a message and wait until its turn is over and printed.

        `Cancelled` leaves a message that was accepted in the session.

        Raises:
            SubmissionRejectedError: If it is refused.
        """
        submission_id = str(uuid.uuid4())
        self.renderer.own.add(submission_id)
        await self.agent.submit(UserInput(text=text, delivery="queue"), id=submission_id)
        self._pending, self.signals = submission_id, 0
        try:
            while self._ending(submission_id) is None and self._waits_for(submission_id):
                await self._heard.park()
        finally:
            self._pending = None
        ending = self._ending(submission_id)
        return Exit.TURN if ending is None else ending

    def _waits_for(self, submission_id: str) -> bool:
        return self._pending == submission_id

    def _ending(self, submission_id: str) -> Exit | None:
        return self._endings.get(self._turns.get(submission_id, ""))

    async def interrupt(self) -> bool:
        """End the running turn, and take back a message that still waits for its own.

        Returns False if there was neither.
        """
        await trio.lowlevel.checkpoint()
        if self._asking is not None:
            self._asking.cancel(reason="interrupted")
        pending, turn_id = self._pending, self.agent.snapshot().turn_id
        stopped = False
        if pending is not None and pending not in self._turns:
            try:
                await self.agent.submit(CancelQueued(pending))
            except SubmissionRejectedError:
                pass  # it has just begun; then it is the running turn
            else:
                self._pending, stopped = None, True
                self._heard.unpark_all()
        if turn_id is None:
            turn_id = self.agent.snapshot().turn_id
        if turn_id is not None:
            try:
                await self.agent.submit(Interrupt(turn_id))
            except SubmissionRejectedError:
                pass  # it has just ended
            stopped = True
        return stopped

    async def follow(self) -> None:
        """Print every event until the session is over; ask when it asks."""
        async for event in self.agent.events:
            if isinstance(event.msg, SessionHistory):
                if self.replay:
                    self.renderer.history(event.msg)
            else:
                self.renderer.show(event)
            self._note(event)
            if isinstance(event.msg, ExecApprovalRequest) and self._waits(event.msg.id):
                await self._decide(event.msg)
            self._heard.unpark_all()
        self._pending = None
        self._heard.unpark_all()

    def _waits(self, approval_id: str) -> bool:
        return any(one.id == approval_id for one in self.agent.snapshot().approvals)

    def _note(self, event: Event) -> None:
        match event.msg:
            case TurnStarted(turn_id=turn_id):
                self._usage, self._steps, self._calls = TokenUsage(), 0, 0
                if event.submission_id is not None:
                    self._turns[event.submission_id] = turn_id
            case UserMessage(turn_id=turn_id):
                if event.submission_id is not None:
                    self._turns[event.submission_id] = turn_id
            case ModelStepCompleted():
                self._steps += 1
            case ToolCallEnd():
                self._calls += 1
            case TokenCount(turn=turn):
                self._usage = turn or self._usage
            case TurnComplete(turn_id=turn_id):
                self._end(turn_id, Exit.OK)
            case TurnAborted(turn_id=turn_id):
                self._end(turn_id, Exit.TURN)
            case _:
                pass

    def _end(self, turn_id: str, ending: Exit) -> None:
        self._endings[turn_id] = self._last = ending
        self.renderer.usage(self._usage, steps=self._steps, calls=self._calls)

    async def _decide(self, request: ExecApprovalRequest) -> None:
        await trio.lowlevel.checkpoint()
        decision: Decision | None = Denied(NOBODY_TO_ASK)
        if self.lines is not None:
            with trio.CancelScope() as self._asking:
                decision = None
                decision = await self._ask(self.lines)
            self._asking = None
        if decision is None:
            return  # the turn is being interrupted: its end closes the question
        try:
            await self.agent.submit(ExecApproval(request.id, decision))
        except SubmissionRejectedError as exc:
            self.renderer.line("note", f"[approval] {exc}")

    async def _ask(self, lines: Lines) -> Decision:
        lines.forget()
        while True:
            self.renderer.prompt(QUESTION)
            answer = await lines.read()
            if answer is None:
                return Denied(INPUT_ENDED)
            word, _, reason = answer.strip().partition(" ")
            match word.lower():
                case "y" | "yes":
                    return Approved()
                case "network":
                    return Approved(network=True)
                case "always":
                    return ApprovedForSession()
                case "n" | "no":
                    return Denied(reason.strip())
                case "abort":
                    return Abort()
                case _:
                    continue


def signal_exit(number: int) -> Exit:
    """Return the exit code for a signal."""
    return Exit.TERMINATED if number == signal.SIGTERM else Exit.INTERRUPTED
