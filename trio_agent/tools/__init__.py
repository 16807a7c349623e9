"""What the model may call."""

from __future__ import annotations

from trio_agent.tools.base import (
    DescribedTool,
    GrantingTool,
    Reconciled,
    ReconcilingTool,
    SandboxedTool,
    Tool,
    ToolContext,
    ToolResult,
)
from trio_agent.tools.catalog import Catalog, Registered
from trio_agent.tools.function import FunctionTool, as_tool, tool

__all__ = [
    "Catalog",
    "DescribedTool",
    "FunctionTool",
    "GrantingTool",
    "Reconciled",
    "ReconcilingTool",
    "Registered",
    "SandboxedTool",
    "Tool",
    "ToolContext",
    "ToolResult",
    "as_tool",
    "coding_tools",
    "tool",
]


def coding_tools() -> tuple[Tool, ...]:
    """Return the tools that read, search and change files and run commands.

    They act in the session's sandbox. Their module is loaded when this is called.
    """
    from trio_agent.tools.coding import coding_tools as build  # noqa: PLC0415

    return build()
