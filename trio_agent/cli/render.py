"""Events as text: the same lines with and without a terminal, colours only with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TextIO

import attrs
import msgspec

from trio_agent.protocol.events import (
    AgentMessage,
    AgentMessageDelta,
    AgentReasoningDelta,
    Error,
    Event,
    EventMsg,
    ExecApprovalRequest,
    HistoryGap,
    ModelChanged,
    ModelStepCompleted,
    Notice,
    SessionConfigured,
    SessionHistory,
    ToolCallBegin,
    ToolCallEnd,
    ToolProgress,
    TurnAborted,
    TurnStarted,
    UserMessage,
    Warning,  # noqa: A004  # the wire's word
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.text import Json, cut_end, cut_middle
from trio_agent.protocol.usage import TokenUsage

_RESULT_BYTES: Final = 1_200
_ARGUMENT_BYTES: Final = 400

_COLOURS: Final[Mapping[str, str]] = {
    "dim": "\x1b[2m",
    "tool": "\x1b[36m",
    "bad": "\x1b[31m",
    "note": "\x1b[33m",
    "user": "\x1b[1m",
}
_RESET: Final = "\x1b[0m"

_UNPRINTABLE: Final[Mapping[int, str]] = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Return *text* with every control character but newline and tab made harmless.

    What a model or a tool says could otherwise move the cursor, retitle the
    window or hide what was printed before.
    """
    return text.replace("\r\n", "\n").translate(_UNPRINTABLE)


@attrs.define(kw_only=True, eq=False)
class Renderer:
    """Prints events in the order in which they come.

    Attributes:
        out: Where to.
        colour: Whether *out* is a terminal that shows colours.
        own: Submissions that the user typed here, which need no echo.
    """

    out: TextIO
    colour: bool = False
    own: set[str] = attrs.field(factory=set[str])
    _shown: dict[str, list[str]] = attrs.field(factory=dict[str, list[str]], init=False)
    _names: dict[str, str] = attrs.field(factory=dict[str, str], init=False)
    _route: str = attrs.field(default="", init=False)
    _open: str = attrs.field(default="", init=False)
    """What the unfinished line holds: a step's text, its thoughts, or nothing."""

    def show(self, event: Event) -> None:
        """Print one event."""
        self._show(event.msg, own=event.submission_id in self.own)
        self.out.flush()

    def history(self, history: SessionHistory) -> None:
        """Print what happened before this opening."""
        for msg in history.events:
            self._show(msg, own=False)
        self.out.flush()

    def _show(self, msg: EventMsg, *, own: bool) -> None:
        match msg:
            case AgentMessageDelta():
                self._stream(msg.step_id, msg.text)
            case AgentReasoningDelta():
                self._think(msg.text)
            case AgentMessage():
                self._complete(msg)
            case SessionConfigured():
                self._route = msg.model.route
                again = ", recovered after an unclean end" if msg.recovered else ""
                self.line("dim", f"session {msg.session_id}, model {msg.model.model}{again}")
            case TurnStarted():
                self._shown.clear()
            case UserMessage():
                if not own:
                    self.line("user", f"> {msg.text}")
            case ToolCallBegin():
                self.line("tool", f"[tool] {msg.name} {_arguments(msg.arguments)}")
            case ToolProgress():
                part = "" if msg.fraction is None else f" ({msg.fraction:.0%})"
                self.line("dim", f"[tool] {msg.message}{part}")
            case ToolCallEnd():
                colour = "bad" if msg.is_error else "tool"
                self.line(colour, f"[tool] {msg.name} {msg.outcome}")
                self.block(msg.output)
            case ExecApprovalRequest():
                self.line("note", f"[approval] {msg.name} {_arguments(msg.arguments)}")
                self.block(msg.summary or msg.reason)
            case ModelStepCompleted():
                self._end_line()
                if msg.outcome == "retrying":
                    wait = (msg.retry_in_ms or 0) / 1000
                    self.line("note", f"[model] the attempt failed; next in {wait:.1f} s")
            case ModelChanged() if msg.route != self._route:
                self._route = msg.route
                self.line("dim", f"[model] {msg.route}: {msg.model}")
            case TurnAborted():
                self.line("bad", f"[turn] {msg.outcome}: {msg.reason}")
            case Error():
                self.line("bad", f"[error] {msg.kind}: {msg.message}")
            case Warning():
                self.line("note", f"[warning] {msg.message}")
            case Notice():
                self.line("note", f"[{msg.capability}] {msg.text}")
            case HistoryGap():
                self.line("note", f"[history] events {msg.first} to {msg.last} were deleted")
            case _:
                pass

    def item(self, item: Item) -> None:
        """Print one item of a transcript."""
        match item:
            case UserItem():
                if item.internal is None:
                    self.line("user", f"> {item.text}")
            case AssistantItem():
                self.line("", item.text)
            case ReasoningItem():
                if item.text:
                    self.line("dim", item.text)
            case ToolCallItem():
                self._names[item.call_id] = item.name
                self.line("tool", f"[tool] {item.name} {_arguments(item.arguments)}")
            case ToolOutputItem():
                name, word = self._names.pop(item.call_id, ""), "gave"
                if item.is_error:
                    word = "gave an error"
                self.line("bad" if item.is_error else "tool", f"[tool] {name} {word}")
                self.block(item.output)

    def usage(self, turn: TokenUsage, *, steps: int, calls: int) -> None:
        """Print the line that ends a turn."""
        cached = f" ({turn.cached_input_tokens:,} cached)" if turn.cached_input_tokens else ""
        self.line(
            "dim",
            f"usage: {turn.input_tokens:,} tokens in{cached}, {turn.output_tokens:,} out;"
            f" {_count(steps, 'model step')}, {_count(calls, 'tool call')}",
        )
        self.out.flush()

    def line(self, colour: str, text: str) -> None:
        """Print *text* as lines of its own."""
        self._end_line()
        self.out.write(self._painted(colour, printable(text)) + "\n")
        self.out.flush()

    def prompt(self, text: str) -> None:
        """Print a question and leave the cursor behind it."""
        self._end_line()
        self.out.write(text)
        self.out.flush()

    def block(self, text: str) -> None:
        """Print the beginning and end of a longer text, indented."""
        self._end_line()
        for one in printable(cut_middle(text.rstrip(), _RESULT_BYTES)).splitlines():
            self.out.write(self._painted("dim", f"    {one}") + "\n")

    def _stream(self, step_id: str, text: str) -> None:
        if self._open != "text":
            self._end_line()
        self._shown.setdefault(step_id, []).append(text)
        self.out.write(printable(text))
        self._open = "text"

    def _think(self, text: str) -> None:
        if self._open != "thought":
            self._end_line()
        self.out.write(self._painted("dim", printable(text)))
        self._open = "thought"

    def _complete(self, msg: AgentMessage) -> None:
        """Print what the pieces did not bring: a reader that fell behind gets the whole."""
        text = "".join(part.text for part in msg.content if part.phase != "reasoning")
        shown = "".join(self._shown.pop(msg.step_id, ()))
        if not text.startswith(shown):
            self._end_line()
            shown = ""
        if rest := text[len(shown) :]:
            self._stream(msg.step_id, rest)
        self._end_line()

    def _end_line(self) -> None:
        if self._open:
            self.out.write("\n")
            self._open = ""

    def _painted(self, colour: str, text: str) -> str:
        if not self.colour or not colour:
            return text
        return f"{_COLOURS[colour]}{text}{_RESET}"


def _arguments(arguments: Mapping[str, Json]) -> str:
    return cut_end(msgspec.json.encode(dict(arguments)).decode(), _ARGUMENT_BYTES)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
