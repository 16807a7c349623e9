"""The workload of the store's benchmarks, and the raw sqlite3 loop beside it."""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from trio_agent.protocol.events import (
    AgentMessage,
    ContentPart,
    Draft,
    ModelStepCompleted,
    ModelStepStarted,
    ToolCallBegin,
    ToolCallEnd,
    TurnComplete,
    TurnStarted,
    UserMessage,
)
from trio_agent.protocol.items import (
    AssistantItem,
    Item,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.state.checkpoint import ActiveExecution, Checkpoint, ToolCall

SENTENCE = (
    "The parser drops the last line when a file ends without a newline; see lines 40-52. "
)
USER = (SENTENCE * 40)[:2048]
OUTPUT = ("    result.append(line.rstrip())  # keep order\n" * 20)[:600]
ANSWER = (SENTENCE * 8)[:400]
SAVES_A_TURN = 3


@attrs.frozen
class Step:
    checkpoint: Checkpoint
    delta: list[Item]
    events: list[Draft]


def steps(session_id: str, turns: int, *, journal: bool, text: str = USER) -> Iterator[Step]:
    """Yield the saves of *turns* turns: question and call, result, answer."""
    checkpoint = Checkpoint(session_id=session_id, sequence=-1, model_route="demo")
    for number in range(turns):
        submission, turn = f"{number:036d}", f"{number:032d}turn"
        execution = ActiveExecution(submission_id=submission, turn_id=turn, started_at_ms=1)
        arguments = {"path": f"src/module_{number}.py", "offset": number, "limit": 200}
        call = ToolCall(call_id=f"call_{number:024d}", name="read_file", arguments=arguments)
        step_id = f"{number:032d}step"
        asked: list[Item] = [
            UserItem(text=text, submission_id=submission),
            ToolCallItem(call_id=call.call_id, name=call.name, arguments=arguments),
        ]
        given: list[Item] = [ToolOutputItem(call_id=call.call_id, output=OUTPUT)]
        said: list[Item] = [AssistantItem(text=ANSWER)]
        for items, members, events in (
            (
                asked,
                {"active_execution": execution, "pending_tools": (call,)},
                (
                    TurnStarted(turn_id=turn),
                    UserMessage(turn_id=turn, text=text),
                    ToolCallBegin(
                        turn_id=turn, call_id=call.call_id, name=call.name, arguments=arguments
                    ),
                ),
            ),
            (
                given,
                {"pending_tools": ()},
                (
                    ToolCallEnd(
                        turn_id=turn,
                        call_id=call.call_id,
                        name=call.name,
                        output=OUTPUT,
                        outcome="finished",
                    ),
                    ModelStepStarted(
                        turn_id=turn,
                        step_id=step_id,
                        step_index=1,
                        attempt=1,
                        route="demo",
                        request_digest="0" * 64,
                        started_at_ms=1,
                    ),
                ),
            ),
            (
                said,
                {"active_execution": None},
                (
                    AgentMessage(
                        turn_id=turn,
                        step_id=step_id,
                        content=(ContentPart(phase="final_answer", text=ANSWER),),
                    ),
                    ModelStepCompleted(
                        turn_id=turn,
                        step_id=step_id,
                        step_index=1,
                        outcome="completed",
                        started_at_ms=1,
                        completed_at_ms=2,
                        finish_reason="stop",
                    ),
                    TurnComplete(turn_id=turn),
                ),
            ),
        ):
            checkpoint = attrs.evolve(
                checkpoint,
                sequence=checkpoint.sequence + 1,
                context=checkpoint.context.extended(items),
                **members,
            )
            drafts = [
                Draft(recorded_at_ms=1, submission_id=submission, msg=msg) for msg in events
            ]
            yield Step(checkpoint, items, drafts if journal else [])


class Raw:
    """What sqlite3 alone does with the same bytes: rowid tables, integer keys, WAL."""

    def __init__(self, path: Path, *, sessions: int = 1, any_thread: bool = False) -> None:
        self.connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=not any_thread
        )
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.executescript(
            "CREATE TABLE session(id INTEGER PRIMARY KEY, seq INTEGER, head BLOB);"
            "CREATE TABLE item(session INTEGER, n INTEGER, body BLOB, PRIMARY KEY(session, n));"
            "CREATE TABLE event(session INTEGER, n INTEGER, body BLOB,"
            " PRIMARY KEY(session, n));"
        )
        rows = [(number,) for number in range(sessions)]
        self.connection.executemany("INSERT INTO session VALUES(?, 0, x'')", rows)
        self.items = [0] * sessions
        self.events = [0] * sessions
        self.sequence = 0

    def save(
        self, saves: Sequence[tuple[int, bytes, Sequence[bytes], Sequence[bytes]]]
    ) -> None:
        """Write one save of each session in one transaction."""
        self.sequence += 1
        heads, items, events = [], [], []
        for session, head, bodies, journal in saves:
            heads.append((self.sequence, head, session))
            for body in bodies:
                items.append((session, self.items[session], body))
                self.items[session] += 1
            for body in journal:
                events.append((session, self.events[session], body))
                self.events[session] += 1
        run = self.connection
        run.execute("BEGIN IMMEDIATE")
        run.executemany("UPDATE session SET seq=?, head=? WHERE id=?", heads)
        run.executemany("INSERT INTO item VALUES(?,?,?)", items)
        if events:
            run.executemany("INSERT INTO event VALUES(?,?,?)", events)
        run.execute("COMMIT")

    def close(self) -> None:
        self.connection.close()


def stored_bytes(path: Path) -> int:
    """Return the bytes of the database once its log is merged into it."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.stat().st_size


def written_bytes() -> int:
    """Return the bytes that this process handed to the disk so far, page cache included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def report(name: str, **figures: object) -> None:
    """Print one JSON line."""
    print(json.dumps({"benchmark": name, **figures, "slow_fsync_us": _slow()}), flush=True)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def median(values: list[float]) -> float:
    return rounded(statistics.median(values))


def _slow() -> int:
    return int(os.environ.get("SLOW_FSYNC_US", "0"))
