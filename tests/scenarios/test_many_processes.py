"""Many processes with many agents each, all on one file, which none of them finds there."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.scenarios.children import nursery
from tests.scenarios.story import journal
from trio_agent import SqliteCheckpoint
from trio_agent.protocol.events import SubmissionAccepted, TurnComplete
from trio_agent.protocol.items import AssistantItem, ToolOutputItem, UserItem
from trio_agent.store.base import CheckpointStore
from trio_agent.testing.invariants import JournalCheck, check_checkpoint

PROCESSES, SESSIONS, TURNS = 8, 8, 20


async def check(store: CheckpointStore, session_id: str) -> None:
    """Nothing is lost, doubled or failed: in the history, the journal, the list of turns."""
    checkpoint = await store.load(session_id)
    assert checkpoint is not None
    check_checkpoint(checkpoint)
    said = [item.text for item in checkpoint.context if isinstance(item, UserItem)]
    heard = [item.text for item in checkpoint.context if isinstance(item, AssistantItem)]
    seen = [item.output for item in checkpoint.context if isinstance(item, ToolOutputItem)]
    assert said == [f"question {number}" for number in range(TURNS)]
    assert heard == [f"answer {number}" for number in range(TURNS)]
    assert seen == [f"looked at {number}" for number in range(1, TURNS, 2)]
    events = await journal(store, session_id)
    accepted = [one.submission_id for one in events if isinstance(one.msg, SubmissionAccepted)]
    assert len(accepted) == len(set(accepted)) == TURNS
    assert sum(isinstance(one.msg, TurnComplete) for one in events) == TURNS
    page = await store.execution_page(session_id, limit=1_000)
    assert [turn.outcome for turn in page.executions] == ["completed"] * TURNS
    whole = JournalCheck()
    whole.read(events)
    whole.settle(checkpoint, list(reversed(page.executions)))


def test_eight_processes_of_eight_agents_share_a_file_that_they_all_create(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "s.db"
    sessions = [f"p{one}-{two}" for one in range(PROCESSES) for two in range(SESSIONS)]
    with nursery() as processes, processes.tale.on_failure(path):
        said = processes.together(
            *[
                ("agents", str(path), f"p{number}", str(SESSIONS), str(TURNS))
                for number in range(PROCESSES)
            ]
        )
    turns = {line.strip() for line in said if line.startswith("turn")}
    assert said.count("done\n") == PROCESSES
    assert not [line for line in said if line.startswith("refused")]
    assert turns == {f"turn {name} {n} completed" for name in sessions for n in range(TURNS)}

    async def found() -> None:
        async with SqliteCheckpoint(path) as store:
            assert await store.verify() == ()
            listed = (await store.list_sessions(limit=1_000)).sessions
            assert {summary.session_id for summary in listed} == set(sessions)
            for name in sessions:
                await check(store, name)

    trio.run(found)
