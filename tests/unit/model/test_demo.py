"""The demo model: what it understands, and that it goes on from the request alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import attrs
import pytest
import trio
import trio.testing
from hypothesis import event, example, given
from hypothesis import strategies as st

from trio_agent.model.base import ModelCall, ModelOutput, ModelRequest, ToolDefinition
from trio_agent.model.demo import (
    DEMO_HELP,
    MISSING_TOOL,
    Action,
    Call,
    DemoModel,
    Plan,
    Say,
    Use,
    parse_plan,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Phase,
    RequestItem,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)


def definition(name: str, *parameters: str) -> ToolDefinition:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters[:1])}
    return ToolDefinition(name=name, description="", parameters=schema)


TOOLS = (
    definition("read_file", "path", "limit"),
    definition("list_files", "path"),
    definition("run_command", "command"),
)


async def respond(request: ModelRequest) -> ModelOutput:
    """Ask the demo model, and hold what it streams against what it returns."""
    pieces: list[tuple[str, Phase]] = []

    async def emit(text: str, phase: Phase = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        assert text
        pieces.append((text, phase))

    with trio.testing.assert_checkpoints():
        output = await DemoModel().respond(request, emit)
    said = [item for item in output.items if isinstance(item, AssistantItem)]
    assert "".join(text for text, _ in pieces) == "".join(item.text for item in said)
    assert {phase for _, phase in pieces} == {item.phase for item in said}
    return output


def calls_of(output: ModelOutput) -> list[ModelCall]:
    return [item for item in output.items if isinstance(item, ModelCall)]


def text_of(output: ModelOutput) -> str:
    return "".join(item.text for item in output.items if isinstance(item, AssistantItem))


async def play(
    text: str,
    tools: tuple[ToolDefinition, ...] = TOOLS,
    answer: Callable[[ModelCall], str] = lambda call: call.arguments,
) -> list[ModelOutput]:
    """Do what an engine does with a message, until the model ends the turn."""
    items: list[RequestItem] = [UserItem(text="say earlier"), AssistantItem(text="earlier")]
    items.append(UserItem(text=text))
    outputs: list[ModelOutput] = []
    while True:
        request = ModelRequest(instructions="", items=tuple(items), tools=tools)
        output = await respond(request)
        assert await respond(request) == output  # a restart would ask again
        outputs.append(output)
        items += [item for item in output.items if not isinstance(item, ModelCall)]
        items.append(UserItem(text="noise of a hook", internal="hook"))
        calls = calls_of(output)
        for number, call in enumerate(calls):
            arguments = json.loads(call.arguments)
            call_id = f"c{len(items)}.{number}"
            items.append(ToolCallItem(call_id=call_id, name=call.name, arguments=arguments))
        for call, item in zip(calls, items[len(items) - len(calls) :], strict=True):
            assert isinstance(item, ToolCallItem)
            items.append(ToolOutputItem(call_id=item.call_id, output=answer(call)))
        items.append(UserItem(text="noise of a hook", internal="hook"))
        if not calls and output.end_turn:
            return outputs


# --- the parser


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("say hello", ((Say(text="hello"),),)),
        ("  SAY  this and that, then more ", ((Say(text="this and that, then more"),),)),
        ('say "a then read b"', ((Say(text="a then read b"),),)),
        (
            "say it's fine then list",
            ((Say(text="it's fine"),), (Use(verb="list", subject="."),)),
        ),
        ("say two\nlines", ((Say(text="two\nlines"),),)),
        ("read 'my file.txt'", ((Use(verb="read", subject="my file.txt"),),)),
        (
            "read a and read b then run ls -l 'x y'",
            (
                (Use(verb="read", subject="a"), Use(verb="read", subject="b")),
                (Use(verb="run", subject="ls -l 'x y'"),),
            ),
        ),
        ("run echo 'a then say b'", ((Use(verb="run", subject="echo 'a then say b'"),),)),
        ("call now", ((Call(tool="now", arguments={}),),)),
        (
            """call t with a 1 b "x y" c [1, {"d": "e and read f"}] g 'h "i"' j word k null""",
            (
                (
                    Call(
                        tool="t",
                        arguments={
                            "a": 1,
                            "b": "x y",
                            "c": [1, {"d": "e and read f"}],
                            "g": 'h "i"',
                            "j": "word",
                            "k": None,
                        },
                    ),
                ),
            ),
        ),
        (
            "call t with a NaN b 1e999 c 1x",
            ((Call(tool="t", arguments={"a": "NaN", "b": "1e999", "c": "1x"}),),),
        ),
    ],
)
def test_plans(text: str, plan: Plan) -> None:
    assert parse_plan(text) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "say",
        'say ""',
        "read ' '",
        "read",
        "run",
        "call",
        "call t with",
        "call t with a",
        "call t a 1",
        "call t with a 1 a 2",
        "saying things",
        "please say x",
        "then say x",
    ],
)
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError):
        parse_plan(text)


WORDS = st.from_regex(r"\A[a-z_./-]{1,8}\Z").filter(lambda word: word != "with")
SENTENCES = st.lists(WORDS | st.sampled_from(["and", "then", "é", "it's"]), min_size=1).map(
    lambda words: "x " + " ".join(words) + " x"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner),
    max_leaves=5,
)  # fmt: skip
ACTIONS: st.SearchStrategy[Action] = st.one_of(
    SENTENCES.map(lambda text: Say(text=text)),
    st.builds(Use, verb=st.sampled_from(["read", "list", "run"]), subject=SENTENCES),
    st.builds(Call, tool=WORDS, arguments=st.dictionaries(WORDS, JSON, max_size=3)),
)
PLANS = st.lists(
    st.lists(ACTIONS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
).map(tuple)


def written(action: Action) -> str:
    match action:
        case Say():
            return f"say {action.text}"
        case Use():
            return f"{action.verb} {action.subject}"
        case Call():
            values = " ".join(f"{n} {json.dumps(v)}" for n, v in action.arguments.items())
            return f"call {action.tool} with {values}" if values else f"call {action.tool}"


def whole(plan: Plan) -> str:
    return " then ".join(" and ".join(map(written, step)) for step in plan)


@given(plan=PLANS)
@example(plan=((Call(tool="t", arguments={"a": "x and say y"}),),))
def test_a_plan_that_was_written_down_is_read_back(plan: Plan) -> None:
    assert parse_plan(whole(plan)) == plan


PIECES = st.sampled_from([
    "say", "read", "list", "run", "call", "then", "and", "with", "'", '"', "\\", "{", "}",
    "[", "]", "1", "x", ":", ",", "\ud800", "é",
])  # fmt: skip


@given(text=st.text() | st.lists(PIECES | st.text(max_size=3), max_size=15).map(" ".join))
def test_any_text_is_a_plan_or_none(text: str) -> None:
    try:
        plan = parse_plan(text)
    except ValueError:
        event("none")
        return
    event("a plan")
    assert all(plan)


# --- the model


@given(plan=PLANS)
def test_every_action_of_a_plan_is_done_once_and_in_order(plan: Plan) -> None:
    """Caught when steps are counted by calls alone, or by messages alone."""
    outputs = trio.run(play, whole(plan))
    expected = [
        [
            (action.tool, action.arguments)
            if isinstance(action, Call)
            else (
                {"read": "read_file", "list": "list_files", "run": "run_command"}[action.verb],
                {"command" if action.verb == "run" else "path": action.subject},
            )
            for action in step
            if not isinstance(action, Say)
        ]
        for step in plan
    ]
    done = [
        [(call.name, json.loads(call.arguments)) for call in calls_of(output)]
        for output in outputs
    ]
    assert done[: len(plan)] == expected
    assert done[len(plan) :] in ([], [[]])
    for step, output in zip(plan, outputs, strict=False):
        said = [action.text for action in step if isinstance(action, Say)]
        assert text_of(output) == "\n".join(said)
    assert all(
        item.phase == "commentary"
        for o in outputs[:-1]
        for item in o.items
        if isinstance(item, AssistantItem)
    )
    ids = [call.call_id for output in outputs for call in calls_of(output)]
    assert len(set(ids)) == len(ids)


async def test_what_tools_gave_is_reported_at_the_end() -> None:
    *_, last = await play("read a and list b", answer=lambda call: f"what {call.name} found")
    assert "what read_file found" in text_of(last)
    assert "what list_files found" in text_of(last)


async def test_a_long_result_is_reported_shortly() -> None:
    *_, last = await play("read a", answer=lambda _: "é" * 100_000)
    assert len(text_of(last).encode()) < 500


async def test_a_missing_tool_is_said_and_the_plan_goes_on() -> None:
    outputs = await play("run ls then read x then say end", TOOLS[:1])
    assert text_of(outputs[0]) == MISSING_TOOL.format(verb="run", tool="run_command")
    assert [call.name for call in calls_of(outputs[1])] == ["read_file"]
    assert text_of(outputs[2]) == "end"


async def test_a_tool_with_other_parameters_gets_the_words_in_its_first() -> None:
    (first, _) = await play("read x", (definition("read_file", "file", "path_of_nothing"),))
    assert [json.loads(call.arguments) for call in calls_of(first)] == [{"file": "x"}]


async def test_an_unknown_tool_is_called_all_the_same() -> None:
    first, *_ = await play("call nothing with x 1")
    assert [call.name for call in calls_of(first)] == ["nothing"]


@pytest.mark.parametrize("text", ["What can you do?", "", "read", "call t with a"])
async def test_anything_else_gets_help_that_lists_the_tools(text: str) -> None:
    (only,) = await play(text)
    assert DEMO_HELP in text_of(only)
    assert "run_command" in text_of(only)


async def test_no_message_at_all_gets_help() -> None:
    output = await respond(ModelRequest(instructions="", items=()))
    assert text_of(output) == DEMO_HELP
    assert output.end_turn


async def test_a_message_that_steers_replaces_the_plan() -> None:
    items: Sequence[RequestItem] = (
        UserItem(text="read a then read b"),
        ToolCallItem(call_id="c", name="read_file", arguments={"path": "a"}),
        ToolOutputItem(call_id="c", output="A"),
        UserItem(text="say stop"),
    )
    output = await respond(ModelRequest(instructions="", items=items, tools=TOOLS))
    assert (text_of(output), output.end_turn) == ("stop", True)


async def test_an_answer_streams_in_small_pieces_and_costs_something() -> None:
    pieces: list[str] = []

    async def emit(text: str, phase: Phase = "final_answer") -> None:
        await trio.lowlevel.checkpoint()
        pieces.append(text)
        assert phase == "final_answer"

    request = ModelRequest(
        instructions="be brief", items=(UserItem(text="say " + "word " * 50 + "x" * 100),)
    )
    output = await DemoModel().respond(request, emit)
    assert len(pieces) > 50
    assert max(map(len, pieces)) <= 32
    assert output.usage.output_tokens > 0
    assert output.usage.total_tokens == output.usage.input_tokens + output.usage.output_tokens


async def test_cancelling_stops_it_in_the_middle() -> None:
    pieces: list[str] = []

    async def emit(text: str, phase: Phase = "final_answer") -> None:
        pieces.append(text)
        assert phase == "final_answer"
        if len(pieces) == 3:
            scope.cancel()
        await trio.lowlevel.checkpoint()

    request = ModelRequest(instructions="", items=(UserItem(text="say " + "word " * 50),))
    with trio.CancelScope() as scope:
        await DemoModel().respond(request, emit)
    assert scope.cancelled_caught
    assert len(pieces) == 3


def test_requests_and_answers_are_records_without_hidden_state() -> None:
    assert not attrs.has(DemoModel)
    assert vars(DemoModel()) == {}
    assert DemoModel.name == "demo"
