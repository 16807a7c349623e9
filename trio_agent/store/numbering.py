"""How drafts become journal rows: joined deltas, stream metrics, numbers, rows that stay away.

Pure, and shared by every store, so that all of them tell the same story:

1.  Streamed deltas that arrive in one call, with nothing but deltas between them,
    are joined: one event for each step and phase.
2.  Every event takes a number. `TRANSIENT_TYPES` leave no row; of the token
    counts only the newest keeps its row.
3.  A model step that completed carries what its stream was like, and its deltas
    leave the journal: the step's own message tells the same text whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
from msgspec import Struct

from trio_agent.errors import ConfigError
from trio_agent.protocol.events import (
    TRANSIENT_TYPES,
    AgentMessageDelta,
    AgentReasoningDelta,
    Draft,
    Event,
    EventMsg,
    ModelStepCompleted,
    StreamMetrics,
    SubmissionAccepted,
    TokenCount,
)
from trio_agent.protocol.items import Phase
from trio_agent.protocol.limits import MAX_INTEGER
from trio_agent.record import Record

DELTA_TYPES: Final = (AgentMessageDelta, AgentReasoningDelta)
_MARKED: Final = {*DELTA_TYPES, *TRANSIENT_TYPES, TokenCount, SubmissionAccepted}
"""All others are rows and nothing more."""

PHASES: Final[tuple[Phase, ...]] = ("reasoning", "commentary", "final_answer")


@attrs.frozen(eq=False, repr=False)
class Stream(Record):
    """What one phase of a step was like while it arrived."""

    phase: Phase
    first_ms: int
    last_ms: int
    chunks: int
    size: int
    gap_ms: int = 0

    def then(self, later: Stream) -> Stream:
        """Return both as one; a clock that ran backwards counts as one that stood still."""
        pause = max(0, later.first_ms - self.last_ms)
        return Stream(
            self.phase,
            self.first_ms,
            max(self.last_ms, later.last_ms),
            self.chunks + later.chunks,
            self.size + later.size,
            max(self.gap_ms, later.gap_ms, pause),
        )


class Entry(Struct, eq=False):
    """An event on its way into the journal.

    ``row`` says whether it leaves a row; ``body`` is what stands there, once somebody wrote
    it, and ``item`` the row of the item that has the rest.
    """

    at_ms: int
    submission_id: str | None
    msg: EventMsg
    step_id: str | None = None
    stream: Stream | None = None
    row: bool = True
    body: bytes | None = None
    item: int | None = None

    def numbered(self, sequence: int) -> Event:
        """Return the event with its number."""
        return Event(
            sequence=sequence,
            recorded_at_ms=self.at_ms,
            submission_id=self.submission_id,
            msg=self.msg,
        )


def arrange(drafts: Iterable[Draft]) -> list[Entry]:
    """Return *drafts* as entries, neighbouring deltas joined.

    Raises:
        ConfigError: For a time before 1970 or beyond SQLite's integers, and for an
            acceptance that names no submission.
    """
    entries: list[Entry] = []
    run: dict[tuple[str, Phase, str | None], list[Draft]] = {}
    newest_count: Entry | None = None
    for draft in drafts:
        at, submission, msg = draft.recorded_at_ms, draft.submission_id, draft.msg
        if not 0 <= at <= MAX_INTEGER:
            raise ConfigError(f"an event cannot be recorded at {at} ms")
        marked = type(msg) in _MARKED
        if marked and isinstance(msg, DELTA_TYPES):
            run.setdefault((msg.step_id, _phase(msg), submission), []).append(draft)
            continue
        if run:
            entries += map(_joined, run.values())
            run = {}
        entry = Entry(at, submission, msg)
        entries.append(entry)
        if not marked:
            continue
        if isinstance(msg, TokenCount):
            if newest_count is not None:
                newest_count.row = False
            newest_count = entry
        elif not isinstance(msg, SubmissionAccepted):
            entry.row = False
        elif submission is None:
            raise ConfigError("a SubmissionAccepted needs the id of its submission")
    entries += map(_joined, run.values())
    return entries


def settle(
    entries: Sequence[Entry], stored: Callable[[str], Iterable[Stream]]
) -> tuple[str, ...]:
    """Give every completed step its metrics and take its deltas' rows away.

    *stored* returns the streams of a step that are in the journal already, in order.
    Returns the steps whose stored deltas are to be deleted.
    """
    completed: list[str] = []
    for index, entry in enumerate(entries):
        msg = entry.msg
        if not isinstance(msg, ModelStepCompleted) or msg.outcome != "completed":
            continue
        streams = list(stored(msg.step_id))
        if streams:
            completed.append(msg.step_id)
        for earlier in entries[:index]:
            if earlier.stream is not None and earlier.step_id == msg.step_id:
                streams.append(earlier.stream)
                earlier.row = False
        if streams:
            entry.msg = attrs.evolve(msg, stream_metrics=metrics(streams))
    return tuple(completed)


def metrics(streams: Iterable[Stream]) -> tuple[StreamMetrics, ...]:
    """Return one record a phase that occurred, thoughts first."""
    phases: dict[Phase, Stream] = {}
    for one in streams:
        before = phases.get(one.phase)
        phases[one.phase] = one if before is None else before.then(one)
    return tuple(
        StreamMetrics(
            phase=phase,
            first_delta_at_ms=stream.first_ms,
            last_delta_at_ms=stream.last_ms,
            chunk_count=stream.chunks,
            utf8_bytes=stream.size,
            longest_gap_ms=stream.gap_ms,
        )
        for phase in PHASES
        if (stream := phases.get(phase)) is not None
    )


def _phase(msg: AgentMessageDelta | AgentReasoningDelta) -> Phase:
    return msg.phase if isinstance(msg, AgentMessageDelta) else "reasoning"


def _joined(drafts: list[Draft]) -> Entry:
    stream: Stream | None = None
    texts: list[str] = []
    for draft in drafts:
        msg = draft.msg
        assert isinstance(msg, DELTA_TYPES)
        texts.append(msg.text)
        at, size = draft.recorded_at_ms, len(msg.text.encode(errors="surrogatepass"))
        chunk = Stream(_phase(msg), at, at, 1, size)
        stream = chunk if stream is None else stream.then(chunk)
    first = drafts[0]
    msg = first.msg
    assert isinstance(msg, DELTA_TYPES)
    if len(texts) > 1:
        msg = attrs.evolve(msg, text="".join(texts))
    return Entry(first.recorded_at_ms, first.submission_id, msg, msg.step_id, stream)
