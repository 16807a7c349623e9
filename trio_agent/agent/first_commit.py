"""The first commit of an opening: all that it writes before it runs, in one transaction."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import msgspec

from trio_agent.agent.opening import Opening
from trio_agent.agent.session import Part, applied, told
from trio_agent.protocol.codec import unstructure
from trio_agent.protocol.events import (
    Event,
    EventMsg,
    SessionConfigured,
    SessionHistory,
    TokenCount,
    ToolCallEnd,
)
from trio_agent.protocol.replay import replay_events
from trio_agent.state.changes import (
    Change,
    ContentNamed,
    MetadataReplaced,
    RouteChanged,
    TurnEnded,
)
from trio_agent.state.checkpoint import Checkpoint
from trio_agent.state.narration import narrate
from trio_agent.store.base import TranscriptBatch


class FirstCommit:
    """Everything that an opening writes before it runs.

    Args:
        opening: Whose it is.
        new: Whether it creates the session.
        route: The route that the session starts on.
        changes: What recovery makes of a turn that was cut off.
        batches: The transcript that a late frontend is told.
        extra: What else belongs into it: what hooks changed, warnings, updates.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        new: bool,
        route: str,
        changes: Sequence[Change],
        batches: Sequence[TranscriptBatch],
        extra: Sequence[Part],
    ) -> None:
        self._opening = opening
        self._new = new
        self._changes = changes
        self._extra = extra
        before = opening.session.checkpoint
        self.configured = SessionConfigured(
            session_id=before.session_id,
            context=before.session_context,
            model=opening.model_changed(route),
            recovered=bool(changes),
        )
        ends = [msg for msg in _narrated(before, changes) if isinstance(msg, ToolCallEnd)]
        self._history: tuple[EventMsg, ...] = ()
        self._replayed = frozenset[str]()
        if batches:
            turn_ids = {call.call_id: before.turn_id or "" for call in before.pending_tools}
            replayed = replay_events(batches, before.session_id, turn_ids=turn_ids)
            self._history = (*replayed, *ends)
            self._replayed = frozenset(end.call_id for end in ends)

    async def commit(self) -> tuple[Event, ...]:
        """Write it, and return its events."""
        session = self._opening.session
        settings, contents = self._settings()
        parts = [told(self.configured), *self._recovery(), *settings, *self._extra]
        after = applied(session.checkpoint, parts)
        if after.last_usage is not None:
            window = self.configured.model.model_context_window
            count = TokenCount(
                total=after.total_usage, last=after.last_usage, model_context_window=window
            )
            parts.append(told(count))
        events = await session.transact(lambda _: parts, first=self._new, contents=contents)
        assert isinstance(events, tuple)
        return events

    def skipped(self, events: Sequence[Event]) -> frozenset[int]:
        """Return the numbers of the *events* that the history tells already."""
        return frozenset(
            event.sequence
            for event in events
            if isinstance(event.msg, ToolCallEnd) and event.msg.call_id in self._replayed
        )

    def _settings(self) -> tuple[list[Part], dict[str, str]]:
        """Return what the configuration changes, and the texts to be stored for it."""
        opening, before = self._opening, self._opening.session.checkpoint
        settings: list[Part] = []
        if before.model_route != self.configured.model.route:
            settings.append(RouteChanged(model=self.configured.model, quiet=True))
        if not self._new and opening.config.metadata is not None:
            metadata = copy.deepcopy(dict(opening.config.metadata))
            if metadata != dict(before.metadata):
                settings.append(MetadataReplaced(metadata=metadata))
        definitions = [unstructure(definition) for definition in opening.definitions]
        tools = msgspec.json.encode(definitions, order="deterministic").decode()
        digests = _digest(opening.instructions), _digest(tools)
        if digests == (before.instructions_digest, before.tools_digest):
            return settings, {}
        settings.append(ContentNamed(instructions_digest=digests[0], tools_digest=digests[1]))
        return settings, {digests[0]: opening.instructions, digests[1]: tools}

    def _recovery(self) -> list[Part]:
        """Return the recovery's changes, with the history before the end of the turn."""
        parts: list[Part] = list(self._changes)
        if self._history:
            ends_turn = bool(parts) and isinstance(parts[-1], TurnEnded)
            parts.insert(len(parts) - ends_turn, told(SessionHistory(self._history)))
        return parts


def _narrated(checkpoint: Checkpoint, changes: Sequence[Change]) -> list[EventMsg]:
    messages: list[EventMsg] = []
    for change in changes:
        after = applied(checkpoint, [change])
        messages.extend(msg for _, msg in narrate(checkpoint, change, after))
        checkpoint = after
    return messages


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
