"""What a capability shows, never how: widgets, commands and contributions."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from trio_agent.record import Record

Tone: TypeAlias = Literal["neutral", "success", "warning", "error"]
Slot: TypeAlias = Literal[
    "header", "composer_header", "composer_footer", "transcript_tail", "navigation"
]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Command(Record):
    """A command that a frontend may offer; sent back as a `CapabilityCommand`."""

    name: str
    description: str
    arguments: str = ""
    requires_idle: bool = False


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Reference(Record):
    """Something the user may mention by ``trigger`` (one character) and ``value``."""

    trigger: str
    value: str
    description: str = ""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Contribution(Record):
    """What one middleware adds to a frontend; ``capability`` is the middleware's name."""

    capability: str
    commands: tuple[Command, ...] = ()
    references: tuple[Reference, ...] = ()


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Block(Record):
    """A piece of transcript that a middleware rendered; a later block of its id replaces it."""

    id: str | None = None
    title: str
    text: str = ""
    tone: Tone = "neutral"
    format: Literal["plain_text", "unified_diff"] = "plain_text"
    state: Literal["pending", "complete"] = "complete"
