"""`DemoModel`: no intelligence, no network, no key; does what it is told in a few plain words.

It keeps nothing between requests. What it does next follows from the request
alone: the last message of the user is a plan, and the items behind that message
show how many of the plan's steps are done. So it goes on where it was after a
restart, and the same request always gets the same answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs
import trio

from trio_agent.model.base import (
    Emit,
    ModelCall,
    ModelOutput,
    ModelRequest,
    OutputItem,
    ToolDefinition,
)
from trio_agent.protocol.items import (
    AssistantItem,
    RequestItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.text import Json, cut_end
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Record

DEMO_HELP: Final = """\
I am the demo model: a small program, not an AI. I work offline and understand:
  say TEXT
  read PATH
  list PATH
  run COMMAND
  call TOOL with ARG VALUE [ARG VALUE ...]
Join several by `then` (one after another) or by `and` (at the same time)."""
"""What the demo model answers to anything else."""

MISSING_TOOL: Final = "I cannot {verb}: I was given no tool called {tool}."
"""What it says for a step whose tool this session does not have."""

_PIECE: Final = re.compile(r"\s*\S{1,24}|\s+")
_EXCERPT_BYTES: Final = 240
_VERBS: Final = "say|read|list|run|call"
_JOINT: Final = re.compile(rf"\s+(then|and)\s+(?=(?:{_VERBS})\b)", re.IGNORECASE)
_ACTION: Final = re.compile(rf"\s*({_VERBS})(?:\s+(.*))?\s*", re.IGNORECASE | re.DOTALL)
_CALL: Final = re.compile(r"(\S+)(?:\s+with\s+(.*))?", re.IGNORECASE | re.DOTALL)
_QUOTE: Final = re.compile(r"""(?<!\S)(?:"(?:[^"\\]|\\.)*"|'[^']*')""")
_PROTECTED: Final = re.compile(r""""(?:[^"\\]|\\.)*"|(?<!\S)'[^']*'""")
_WORD: Final = re.compile(r"\s*(\S+)")

_TOOLS: Final[Mapping[str, tuple[str, str]]] = {
    "read": ("read_file", "path"),
    "list": ("list_files", "path"),
    "run": ("run_command", "command"),
}
"""Which tool does a verb, and which of its parameters takes the words behind it."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Say(Record):
    """Say ``text``."""

    text: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Use(Record):
    """Do what a ``verb`` stands for with ``subject``, by whichever tool there is for it."""

    verb: Literal["read", "list", "run"]
    subject: str


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Call(Record):
    """Call ``tool``, whether there is one or not."""

    tool: str
    arguments: Mapping[str, Json]


Action: TypeAlias = Say | Use | Call
Plan: TypeAlias = tuple[tuple[Action, ...], ...]
"""Steps, one after another; the actions of one step happen at the same time."""


def parse_plan(text: str) -> Plan:
    """Read a message as a plan.

    ``then`` and ``and`` join only in front of a verb and outside quotes, so that
    ``say this and that`` is one action.

    Raises:
        ValueError: If it is none; says what is wrong.
    """
    steps: list[list[Action]] = [[]]
    for joint, part in _split(text):
        if joint == "then":
            steps.append([])
        steps[-1].append(_parse_action(part))
    return tuple(tuple(step) for step in steps)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of *text*, each with the word that joins it to the one before."""
    quoted = [match.span() for match in _PROTECTED.finditer(text)]
    joint, start = "", 0
    for match in _JOINT.finditer(text):
        if any(first < match.start() < end for first, end in quoted):
            continue
        yield joint, text[start : match.start()]
        joint, start = match[1].lower(), match.end()
    yield joint, text[start:]


def _parse_action(part: str) -> Action:
    match = _ACTION.fullmatch(part)
    if match is None:
        raise ValueError(f"{_shown(part)} starts with no verb of mine")
    verb, rest = match[1].lower(), (match[2] or "").strip()
    if verb == "call":
        return _parse_call(rest)
    if verb == "list":
        rest = rest or "."
    if verb != "run" and _QUOTE.fullmatch(rest):  # a command's quotes are the shell's
        rest = _unquote(rest)
    if not rest.strip():
        raise ValueError(f"{verb} what?")
    if verb == "run":
        return Use(verb="run", subject=rest)
    if verb == "say":
        return Say(text=rest)
    return Use(verb="read" if verb == "read" else "list", subject=rest)


def _parse_call(rest: str) -> Call:
    match = _CALL.fullmatch(rest)
    if match is None:
        raise ValueError(
            f"call which tool with what? {_shown(rest)} is not TOOL with ARG VALUE"
        )
    arguments: dict[str, Json] = {}
    left = (match[2] or "").strip()
    while left:
        word = _WORD.match(left)
        name = word[1] if word else ""
        value, left = _parse_value(left[len(name) :].lstrip(), name)
        if name in arguments:
            raise ValueError(f"argument {_shown(name)} is given twice")
        arguments[name] = value
    return Call(tool=match[1], arguments=arguments)


def _parse_value(text: str, name: str) -> tuple[Json, str]:
    """Return the value that *text* begins with (JSON, quoted text or a word), and the rest."""
    if not text:
        raise ValueError(f"argument {_shown(name)} has no value")
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        pass
    else:
        if end == len(text) or text[end].isspace():
            return value, text[end:].lstrip()
    quoted = _QUOTE.match(text)
    word = quoted[0] if quoted else text.split(maxsplit=1)[0]
    return _unquote(word) if quoted else word, text[len(word) :].lstrip()


def _no_constant(word: str) -> Json:
    raise ValueError(word)


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(digits)
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _unquote(text: str) -> str:
    if text.startswith('"'):
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            pass  # an escape that JSON does not know: take it literally
    return text[1:-1]


def _shown(text: str) -> str:
    return f"`{cut_end(text.strip(), 80)}`"


class DemoModel:
    """A model that follows a plan; see `DEMO_HELP`. May serve any number of sessions.

    Its usage is an estimate, a token for four bytes: it has no tokens of its own.
    """

    name: Final = "demo"

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """Say and ask for what the plan's next step says. See `Model.respond`."""
        await trio.lowlevel.checkpoint()
        text, calls, last = _next_step(request)
        phase: Literal["commentary", "final_answer"] = "final_answer" if last else "commentary"
        for piece in _PIECE.findall(text):
            await emit(piece, phase)
        items: tuple[OutputItem, ...] = (AssistantItem(text=text, phase=phase),) if text else ()
        return ModelOutput(
            items=(*items, *calls),
            usage=_usage(request, text, calls),
            end_turn=last or bool(calls),
        )


def _next_step(request: ModelRequest) -> tuple[str, tuple[ModelCall, ...], bool]:
    """Return what to say, what to call, and whether the turn ends with it."""
    message, behind = _last_message(request.items)
    try:
        plan = parse_plan(message)
    except ValueError as exc:
        return _help(message, exc, request.tools), (), True
    messages = sum(isinstance(item, AssistantItem) for item in behind)
    outputs = sum(isinstance(item, ToolOutputItem) for item in behind)
    for number, step in enumerate(plan, 1):
        text, calls = _prepare(step, request)
        messages, outputs = messages - bool(text), outputs - len(calls)
        if messages < 0 or outputs < 0:  # this step is not done yet
            return text, calls, number == len(plan) and not calls
    return _report(behind), (), True


def _prepare(
    step: Sequence[Action], request: ModelRequest
) -> tuple[str, tuple[ModelCall, ...]]:
    """Return what one step says and calls; every step does at least one of them."""
    said: list[str] = []
    calls: list[ModelCall] = []
    for action in step:
        call = _call_for(action, request.tools)
        if call is None:
            said.append(_text_of(action))
        else:
            number = f"demo_{len(request.items)}_{len(calls)}"
            calls.append(attrs.evolve(call, call_id=number))
    return "\n".join(said), tuple(calls)


def _last_message(items: Sequence[RequestItem]) -> tuple[str, Sequence[RequestItem]]:
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, UserItem) and item.internal is None:
            return item.text, items[index + 1 :]
    return "", items


def _call_for(action: Action, tools: Sequence[ToolDefinition]) -> ModelCall | None:
    match action:
        case Say():
            return None
        case Call():
            return ModelCall(name=action.tool, arguments=json.dumps(dict(action.arguments)))
        case Use():
            name, parameter = _TOOLS[action.verb]
            tool = next((one for one in tools if one.name == name), None)
            if tool is None:
                return None
            arguments = {_parameter(tool, parameter): action.subject}
            return ModelCall(name=name, arguments=json.dumps(arguments))


def _parameter(tool: ToolDefinition, usual: str) -> str:
    """Return which parameter takes the words: the usual one, or the tool's first."""
    names = [*tool.parameters.get("required", ()), *tool.parameters.get("properties", ())]
    return usual if usual in names or not names else str(names[0])


def _text_of(action: Action) -> str:
    match action:
        case Say():
            return action.text
        case Use():
            return MISSING_TOOL.format(verb=action.verb, tool=_TOOLS[action.verb][0])
        case Call():
            return ""


def _help(message: str, problem: ValueError, tools: Sequence[ToolDefinition]) -> str:
    lines = [DEMO_HELP]
    if _ACTION.match(message):
        lines.insert(0, f"I did not understand that: {problem}.\n")
    if tools:
        lines.append("Tools that I was given: " + ", ".join(tool.name for tool in tools))
    return "\n".join(lines)


def _report(items: Sequence[RequestItem]) -> str:
    """Tell shortly what the calls behind the last message came to."""
    names = {item.call_id: item.name for item in items if isinstance(item, ToolCallItem)}
    lines: list[str] = []
    for item in items:
        if isinstance(item, ToolOutputItem):
            size = len(item.output.encode(errors="replace"))
            verb = "failed with" if item.is_error else "gave"
            lines.append(f"{names.get(item.call_id, 'a tool')} {verb} {size:,} bytes:")
            excerpt = cut_end(item.output.strip(), _EXCERPT_BYTES)
            lines.extend(f"  {line}" for line in excerpt.splitlines())
    return "\n".join(lines) or "That is done."


def _usage(request: ModelRequest, text: str, calls: Sequence[ModelCall]) -> TokenUsage:
    read = len(request.instructions) + sum(_size(item) for item in request.items)
    written = len(text) + sum(len(call.name) + len(call.arguments) for call in calls)
    read, written = -(-read // 4), -(-written // 4)
    return TokenUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def _size(item: RequestItem) -> int:
    match item:
        case UserItem() | AssistantItem():
            return len(item.text.encode(errors="replace"))
        case ToolCallItem():
            return len(item.name) + len(json.dumps(item.arguments))
        case ToolOutputItem():
            return len(item.output.encode(errors="replace"))
        case _:
            return 0
