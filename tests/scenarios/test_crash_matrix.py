"""`kill -9` at every durable boundary of a turn, compared with docs/recovery.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from trio_agent import tool
from trio_agent.protocol.events import ExecApprovalRequest
from trio_agent.protocol.ops import Approved, Decision, Denied
from trio_agent.state.recovery import Recovery
from trio_agent.testing.crashes import Crash, Story

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery.md"


def rows(name: str) -> list[list[str]]:
    """Return the cells of a marked table of the document, without its head."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()
    ]
    return cells[2:]


CALLS = {
    (effect, life, policy): (outcome, {int(count) for count in entered.split(" or ")})
    for effect, life, *by_policy in rows("crash matrix")
    for policy, (outcome, entered) in zip(Recovery, (by_policy[:2], by_policy[2:]), strict=True)
}
TURNS = {
    (place, policy): ending
    for place, abort, resume in rows("turn matrix")
    for policy, ending in ((Recovery.ABORT, abort), (Recovery.RESUME, resume))
}


@tool(effect="read_only")
async def read_only() -> str:
    """Look at something."""
    return "seen"


@tool(effect="idempotent")
async def idempotent() -> str:
    """Put something in its place."""
    return "put"


@tool(effect="destructive")
async def destructive() -> str:
    """Send something off."""
    return "sent"


EFFECTS = ("read_only", "idempotent", "destructive")
STORY = Story(
    tools=(read_only, idempotent, destructive), calls=[(name, {}) for name in EFFECTS]
)


def place_of(crash: Crash) -> str:
    if crash.phase is None or (not crash.running and crash.turn is None):
        return "not accepted"
    return crash.phase.value if crash.running else "over"


def check(crash: Crash) -> Counter[tuple[str, str]]:
    """Compare one death with both tables; return the rows that it was about."""
    place = place_of(crash)
    assert str(crash.turn).lower() == TURNS[place, crash.policy], crash
    met: Counter[tuple[str, str]] = Counter()
    if place == "not accepted":
        assert not crash.entered
        return met
    for effect in EFFECTS:
        life = crash.lives.get(effect, "not asked for")
        outcome, entered = CALLS[effect, life, crash.policy]
        assert crash.outcomes.get(effect, "none") == outcome, (effect, life, crash)
        assert crash.entered.get(effect, 0) in entered, (effect, life, crash)
        assert len(crash.keys.get(effect, ())) <= 1, "a call had two keys"
        met[effect, life] += 1
    return met


@pytest.mark.parametrize("policy", list(Recovery))
def test_every_death_of_a_turn_ends_as_the_document_says(policy: Recovery) -> None:
    met: Counter[tuple[str, str]] = Counter()
    for moment in STORY.moments():
        met += check(STORY.crash(moment, policy))
    documented = {(effect, life) for effect, life, _ in CALLS}
    # The first call of a batch is begun by the very commit that admits it.
    assert documented - set(met) <= {("read_only", "admitted")}


@tool(effect="destructive", needs_approval=True)
async def gated() -> str:
    """Send something off, if somebody agrees."""
    return "sent"


@pytest.mark.parametrize("decision", [Approved(), Denied("no")], ids=["approved", "denied"])
@pytest.mark.parametrize("policy", list(Recovery))
def test_a_question_survives_every_death_and_an_answer_is_never_forgotten(
    policy: Recovery, decision: Decision
) -> None:
    async def answer(request: ExecApprovalRequest) -> Decision:
        return decision

    story = Story(tools=(gated,), calls=[("gated", {})], on_approval=answer)
    for moment in story.moments():
        if moment.tool and isinstance(decision, Denied):
            continue  # nobody ever gets there
        crash = story.crash(moment, policy)
        if isinstance(decision, Denied):
            assert not crash.entered
            unasked = policy is Recovery.ABORT and crash.lives.get("gated") == "admitted"
            expected = "not_started" if unasked else "denied"
            assert crash.outcomes.get("gated", "denied") == expected
        elif crash.lives.get("gated") == "begun":
            assert crash.outcomes["gated"] == "unknown"
        elif crash.lives.get("gated") == "waiting":
            assert crash.outcomes["gated"] == "finished", "asked again"
        elif crash.lives.get("gated") == "admitted":  # not asked yet, or answered already
            resumed = policy is Recovery.RESUME
            assert crash.outcomes["gated"] == ("finished" if resumed else "not_started")
        assert crash.entered.get("gated", 0) <= 1
