"""Whose consent calls need, and what one call may do."""

from __future__ import annotations

import enum

import attrs

from trio_agent.record import Record


class ApprovalPolicy(enum.Enum):
    """Which calls of tools that ask for approval run without asking a person."""

    ASK = "ask"
    """None of them; the network is denied unless an approval grants it."""
    ALLOW = "allow"
    """Those that act inside the sandbox, without the network."""
    ALLOW_NETWORK = "allow_network"
    """Those that act inside the sandbox, with the network."""
    FULL_ACCESS = "full_access"
    """All, and outside the sandbox."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Permissions(Record):
    """What one call was granted: to change the workspace, the network, the whole machine."""

    mutate: bool = False
    network: bool = False
    full_access: bool = False
