"""What a tool may do, and the contract between the engine and whatever confines it."""

from __future__ import annotations

import enum
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

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


class BoundSandbox(Protocol):
    """A sandbox as one call sees it: confined, and with that call's permissions only."""

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        ...

    @property
    def permissions(self) -> Permissions:
        """What this call was granted."""
        ...


class SandboxLike(Protocol):
    """What the engine asks of a sandbox."""

    @property
    def workspace(self) -> Path:
        """The directory that tools work in."""
        ...

    @property
    def policy(self) -> ApprovalPolicy:
        """Whose consent calls need, unless the configuration says otherwise."""
        ...

    def session(self, session_id: str) -> AbstractAsyncContextManager[object]:
        """Return a context for one opening of a session; leaving it stops its commands."""
        ...

    def bind(self, *, session_id: str, call_id: str, permissions: Permissions) -> BoundSandbox:
        """Return this sandbox for one call. Not a checkpoint."""
        ...
