"""Where tools act, and whose consent they need.

A session without a sandbox loads none: `Sandbox` and `LocalSandbox` are imported
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trio_agent.sandbox.policy import ApprovalPolicy, Permissions

if TYPE_CHECKING:
    from trio_agent.sandbox.base import (
        BackgroundOutput,
        BoundSandbox,
        CommandOutput,
        FileChange,
        FileEntry,
        Listing,
        Match,
        SandboxBackend,
        SearchResult,
        StreamOutput,
        TextWindow,
    )
    from trio_agent.sandbox.local import LocalSandbox
    from trio_agent.sandbox.sandbox import Sandbox

__all__ = [
    "ApprovalPolicy",
    "BackgroundOutput",
    "BoundSandbox",
    "CommandOutput",
    "FileChange",
    "FileEntry",
    "Listing",
    "LocalSandbox",
    "Match",
    "Permissions",
    "Sandbox",
    "SandboxBackend",
    "SearchResult",
    "StreamOutput",
    "TextWindow",
]

_WHERE = {"LocalSandbox": "local", "Sandbox": "sandbox"}


def __getattr__(name: str) -> Any:
    """Load a sandbox when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = _WHERE.get(name, "base")
    value = getattr(importlib.import_module(f"{__name__}.{where}"), name)
    globals()[name] = value
    return value
