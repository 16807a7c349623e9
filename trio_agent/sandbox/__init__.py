"""Where tools act, and whose consent they need."""

from trio_agent.sandbox.base import (
    ApprovalPolicy,
    BackgroundOutput,
    BoundSandbox,
    CommandOutput,
    FileChange,
    FileEntry,
    Listing,
    Match,
    Permissions,
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
