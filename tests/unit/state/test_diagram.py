"""The state diagram in docs/architecture.md is the transition table, drawn.

Run this file as a program to print the block that belongs between the marks.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from trio_agent.protocol.items import AssistantItem, ToolCallItem, UserItem
from trio_agent.protocol.ops import Approved
from trio_agent.state import changes as ch
from trio_agent.state.checkpoint import Approval, Checkpoint, QueuedMessage, ToolCall
from trio_agent.state.machine import TRANSITIONS, Phase, advance, phase_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
BEGIN, END = "<!-- state diagram: begin -->\n", "<!-- state diagram: end -->"

STEER = QueuedMessage(owner="messages", id="q", boundary="steer", text="x", turn_id="t")
CALL = ToolCall(call_id="c", name="x", arguments={}, status="admitted", effect="read_only")
ITEM = ToolCallItem(call_id="c", name="x", arguments={})
BEGAN = ch.TurnBegan(submission_id="m", turn_id="t", started_at_ms=0, text="hi")
STEP = ch.StepBegan(step_id="s", started_at_ms=0, route="default")
SAID = ch.StepEnded(
    outcome="completed", completed_at_ms=0, items=(AssistantItem(text="x"),), completing="stop"
)
ASKED = ch.StepEnded(outcome="completed", completed_at_ms=0, items=(ITEM,), calls=(CALL,))
LOST = ch.StepEnded(outcome="interrupted", completed_at_ms=0)
ENDED = ch.TurnEnded(outcome="completed", finish_reason="stop", finished_at_ms=0)
INTERRUPTED = ch.TurnInterrupted(reason="enough")
HIDDEN = ch.ContextChanged(items=(UserItem(text="x"),))


def _checkpoints() -> dict[Phase, Checkpoint]:
    idle = Checkpoint.empty("s")
    ready = attrs.evolve(advance(idle, BEGAN), queue=(STEER,))
    requesting = advance(ready, STEP)
    return {
        Phase.IDLE: idle,
        Phase.READY: ready,
        Phase.REQUESTING: requesting,
        Phase.EXECUTING: advance(requesting, ASKED),
        Phase.COMPLETING: advance(requesting, SAID),
    }


def _with_call(checkpoint: Checkpoint, call: ToolCall) -> Checkpoint:
    return attrs.evolve(checkpoint, pending_tools=(call,))


def _moves() -> list[tuple[Checkpoint, ch.Change]]:
    """Return every kind of change in every phase that has it, with what leads elsewhere."""
    at = _checkpoints()
    executing = at[Phase.EXECUTING]
    begun = _with_call(executing, attrs.evolve(CALL, status="begun"))
    ended = _with_call(executing, attrs.evolve(CALL, status="ended", outcome="finished"))
    asked = _with_call(executing, attrs.evolve(CALL, approval=Approval(id="a")))
    joined = ch.SteerJoined(submission_id="q")
    approval = ch.ApprovalAsked(call_id="c", approval=Approval(id="a"))
    decided = ch.ApprovalDecided(call_id="c", decision=Approved())
    return [
        (at[Phase.IDLE], BEGAN),
        (at[Phase.IDLE], HIDDEN),
        *((at[Phase.READY], change) for change in (STEP, joined, HIDDEN, ENDED)),
        *((at[Phase.REQUESTING], change) for change in (SAID, ASKED, LOST)),
        (executing, ch.CallsBegan(call_ids=("c",))),
        (begun, ch.CallEnded(call_id="c", outcome="finished", output="o")),
        (begun, ch.CallReadmitted(call_id="c")),
        (executing, approval),
        (asked, decided),
        (ended, ch.BatchSettled()),
        (at[Phase.COMPLETING], ch.TurnContinued(prompt=UserItem(text="x"))),
        *((at[Phase.COMPLETING], change) for change in (joined, HIDDEN, ENDED)),
        *((at[phase], INTERRUPTED) for phase in Phase if phase is not Phase.IDLE),
    ]


def edges() -> list[tuple[Phase, str, Phase]]:
    found = {
        (phase_of(before), type(change).__name__, phase_of(advance(before, change)))
        for before, change in _moves()
    }
    order = list(Phase)
    return sorted(found, key=lambda edge: (order.index(edge[0]), order.index(edge[2]), edge[1]))


def diagram() -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> idle"]
    drawn: dict[tuple[Phase, Phase], list[str]] = {}
    for before, change, after in edges():
        drawn.setdefault((before, after), []).append(change)
    for (before, after), changes in drawn.items():
        lines.append(f"    {before.value} --> {after.value}: {', '.join(changes)}")
    return "\n".join([*lines, "```", ""])


def test_the_diagram_has_every_change_of_the_table() -> None:
    legal: dict[Phase, set[str]] = {phase: set() for phase in Phase}
    for before, change, _after in edges():
        legal[before].add(change)
    assert legal == {
        phase: {change.__name__ for change in changes} for phase, changes in TRANSITIONS.items()
    }


def test_the_document_shows_the_diagram() -> None:
    shown = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown == diagram(), f"print the new one: python {Path(__file__).name}"


if __name__ == "__main__":
    print(diagram(), end="")  # noqa: T201
