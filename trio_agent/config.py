"""`AgentConfig`: what one opening of a session works with, and its policies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import msgspec

from trio_agent.ambient import Ambient, new_id
from trio_agent.errors import ConfigError
from trio_agent.middleware.base import Middleware
from trio_agent.model.base import Model
from trio_agent.model.router import ModelRouter
from trio_agent.protocol import limits
from trio_agent.protocol.events import ExecApprovalRequest, SessionContext
from trio_agent.protocol.ops import Decision, check_session_id
from trio_agent.protocol.text import Json, check_json, check_text
from trio_agent.protocol.usage import TokenUsage
from trio_agent.record import Shown
from trio_agent.sandbox.policy import ApprovalPolicy
from trio_agent.state.checkpoint import AgentRole
from trio_agent.state.recovery import Recovery
from trio_agent.store.base import CheckpointStore
from trio_agent.tools.base import Tool

if TYPE_CHECKING:
    from trio_agent.sandbox.base import SandboxLike

ToolLike: TypeAlias = Tool | Callable[..., Any]
UsageObserver: TypeAlias = Callable[[str, TokenUsage], None]
ApprovalHandler: TypeAlias = Callable[[ExecApprovalRequest], Awaitable[Decision]]

CONTEXT_LABEL_BYTES = 4_096


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{name} must be positive, not {value!r}")


@attrs.frozen(kw_only=True, eq=False, repr=False)
class AgentConfig(Shown):
    """How to open a session. Impossible values raise `ConfigError` when it is made.

    Attributes:
        model: A `Model`, a `ModelRouter`, or a route string such as ``"demo"``,
            ``"openai:<model>"``, ``"openai-chat:<model>"`` or ``"anthropic:<model>"``.
        system_prompt: The base of the instructions; not blank.
        tools: Tools, and functions that are wrapped as by `tool`.
        middleware: Capabilities; their order is the order of their hooks.
        sandbox: Where tools act; without one, a tool that asks for it fails.
        checkpoints: A store, or the path of an SQLite file that is opened and closed
            with the session; None keeps the session in memory only.
        session_id: 1 to 255 bytes; a session that the store knows is resumed.
        session_context: Labels of a new session; a stored session keeps its own.
        metadata: JSON values; None keeps what is stored, a mapping replaces it.
        model_route: The route to use, whatever was saved.
        override_saved_model_route: Whether the router's default wins over the saved route.
        context_window: In tokens; a route's own window wins.
        max_model_steps: Completed model steps that one turn may take, restarts included.
        initial_replay_batches: Transcript batches in the `SessionHistory` of a
            resumed session; 0 for none.
        recovery: What opening does with a turn that was cut off.
        role: Main, or a subagent of which turn.
        usage_observer: Called with the route and every usage before it is counted;
            raising fails the turn and nothing is counted.
        approval: Whose consent calls need; None: the sandbox's policy, else `ASK`.
        on_approval: Answers approval requests in process.
        max_parallel_tools: Calls of one batch that run at the same time.
        takeover: Whether to take the session from an owner that lives.
        shutdown_grace: Seconds that the last commit may take, and that an interrupt
            waits for code that does not stop.
        model_idle_timeout: Seconds of silence in a model's stream before the
            attempt fails and is retried.
        ambient: The clock and the id source.
    """

    model: Model | ModelRouter | str
    system_prompt: str = "You are a helpful assistant."
    tools: Sequence[ToolLike] = ()
    middleware: Sequence[Middleware] = ()
    sandbox: SandboxLike | None = None
    checkpoints: CheckpointStore | str | Path | None = None
    session_id: str = attrs.field(factory=new_id)
    session_context: SessionContext = SessionContext()
    metadata: Mapping[str, Json] | None = None
    model_route: str | None = None
    override_saved_model_route: bool = False
    context_window: int = limits.CONTEXT_WINDOW_DEFAULT
    max_model_steps: int = limits.MAX_MODEL_STEPS_DEFAULT
    initial_replay_batches: int = limits.REPLAY_BATCHES_DEFAULT
    recovery: Recovery = Recovery.ABORT
    role: AgentRole = AgentRole()
    usage_observer: UsageObserver | None = None
    approval: ApprovalPolicy | None = None
    on_approval: ApprovalHandler | None = None
    max_parallel_tools: int = 16
    takeover: bool = False
    shutdown_grace: float = 5.0
    model_idle_timeout: float = 60.0
    ambient: Ambient = attrs.field(factory=Ambient, repr=False)

    def __attrs_post_init__(self) -> None:
        """Refuse what can never work."""
        try:
            check_session_id(self.session_id)
            check_text(
                self.system_prompt, name="system_prompt", limit=limits.MAX_INTEGER, blank=False
            )
            if self.metadata is not None:
                _check_metadata(self.metadata)
            for field in attrs.fields(SessionContext):
                label = getattr(self.session_context, field.name)
                if label is not None:
                    check_text(label, name=field.name, limit=CONTEXT_LABEL_BYTES)
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        for name in (
            "context_window",
            "max_model_steps",
            "max_parallel_tools",
            "shutdown_grace",
            "model_idle_timeout",
        ):
            _positive(name, getattr(self, name))
        if self.initial_replay_batches < 0:
            raise ConfigError("initial_replay_batches must not be negative; 0 turns replay off")
        if self.model_route is not None and not self.model_route.strip():
            raise ConfigError("model_route must not be blank")

    @property
    def policy(self) -> ApprovalPolicy:
        """The policy that decides: the configured one, else the sandbox's, else `ASK`."""
        if self.approval is not None:
            return self.approval
        return ApprovalPolicy.ASK if self.sandbox is None else self.sandbox.policy


def _check_metadata(metadata: Mapping[str, Json]) -> None:
    check_json(metadata, name="metadata")
    size = len(msgspec.json.encode(dict(metadata)))
    if size > limits.MAX_METADATA_BYTES:
        most = f"{limits.MAX_METADATA_BYTES:,}"
        raise ValueError(f"metadata has {size:,} bytes as JSON; at most {most} are allowed")
