"""Run an LLM agent as a durable session inside trio's structured concurrency."""

import logging
from typing import TYPE_CHECKING, Any

from trio_agent.agent.create import create_agent, run_agent
from trio_agent.agent.handle import Agent, Snapshot
from trio_agent.agent.inbox import AgentSender
from trio_agent.agent.watch import TurnResult
from trio_agent.config import AgentConfig
from trio_agent.errors import (
    AgentError,
    AuthError,
    BusyError,
    CheckpointError,
    ConfigError,
    ContextOverflowError,
    CorruptStoreError,
    DuplicateError,
    InternalError,
    ProtocolError,
    ProviderError,
    SandboxError,
    SessionBrokenError,
    SessionOwnedError,
    StaleSessionError,
    StepLimitError,
    StoppedError,
    StoreVersionError,
    StreamInterruptedError,
    SubmissionRejectedError,
    ToolError,
    TurnError,
    UnknownError,
)
from trio_agent.middleware import Middleware, MiddlewareStack
from trio_agent.middleware.messages import Messages
from trio_agent.model.base import (
    Emit,
    Model,
    ModelCall,
    ModelOutput,
    ModelRequest,
    ToolDefinition,
)
from trio_agent.model.router import ModelChoice, ModelRouter
from trio_agent.protocol.events import SessionContext
from trio_agent.protocol.items import (
    AssistantItem,
    Attachment,
    Item,
    ReasoningItem,
    Sealed,
    ToolCallItem,
    ToolOutputItem,
    UserItem,
)
from trio_agent.protocol.ops import (
    Abort,
    Approved,
    ApprovedForSession,
    CancelQueued,
    CapabilityCommand,
    Decision,
    Denied,
    EditQueued,
    ExecApproval,
    Interrupt,
    Op,
    ResumeSession,
    SetModel,
    Submission,
    UserInput,
)
from trio_agent.protocol.usage import TokenUsage
from trio_agent.sandbox.policy import ApprovalPolicy
from trio_agent.state.checkpoint import (
    ActiveExecution,
    ActiveModelStep,
    AgentRole,
    Checkpoint,
    ExecutionRecord,
    ToolCall,
)
from trio_agent.state.recovery import Recovery
from trio_agent.store import (
    CheckpointStore,
    MemoryCheckpoint,
    Receipt,
    SqliteCheckpoint,
)
from trio_agent.tools import (
    Reconciled,
    Tool,
    ToolContext,
    ToolResult,
    tool,
)

if TYPE_CHECKING:
    from trio_agent.sandbox import LocalSandbox, Sandbox

__version__ = "0.1.0.dev0"

logging.getLogger("trio_agent").addHandler(logging.NullHandler())

__all__ = [
    "Abort",
    "ActiveExecution",
    "ActiveModelStep",
    "Agent",
    "AgentConfig",
    "AgentError",
    "AgentRole",
    "AgentSender",
    "ApprovalPolicy",
    "Approved",
    "ApprovedForSession",
    "AssistantItem",
    "Attachment",
    "AuthError",
    "BusyError",
    "CancelQueued",
    "CapabilityCommand",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "ContextOverflowError",
    "CorruptStoreError",
    "Decision",
    "Denied",
    "DuplicateError",
    "EditQueued",
    "Emit",
    "ExecApproval",
    "ExecutionRecord",
    "InternalError",
    "Interrupt",
    "Item",
    "LocalSandbox",
    "MemoryCheckpoint",
    "Messages",
    "Middleware",
    "MiddlewareStack",
    "Model",
    "ModelCall",
    "ModelChoice",
    "ModelOutput",
    "ModelRequest",
    "ModelRouter",
    "Op",
    "ProtocolError",
    "ProviderError",
    "ReasoningItem",
    "Receipt",
    "Reconciled",
    "Recovery",
    "ResumeSession",
    "Sandbox",
    "SandboxError",
    "Sealed",
    "SessionBrokenError",
    "SessionContext",
    "SessionOwnedError",
    "SetModel",
    "Snapshot",
    "SqliteCheckpoint",
    "StaleSessionError",
    "StepLimitError",
    "StoppedError",
    "StoreVersionError",
    "StreamInterruptedError",
    "Submission",
    "SubmissionRejectedError",
    "TokenUsage",
    "Tool",
    "ToolCall",
    "ToolCallItem",
    "ToolContext",
    "ToolDefinition",
    "ToolError",
    "ToolOutputItem",
    "ToolResult",
    "TurnError",
    "TurnResult",
    "UnknownError",
    "UserInput",
    "UserItem",
    "create_agent",
    "run_agent",
    "tool",
]


def __getattr__(name: str) -> Any:
    """Load a sandbox when it is first asked for: most programs have none, or one."""
    if name not in {"LocalSandbox", "Sandbox"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import trio_agent.sandbox  # noqa: PLC0415

    value = getattr(trio_agent.sandbox, name)
    globals()[name] = value
    return value
