"""The public surface: what is exported, documented, and a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import trio.testing

import trio_agent
from trio_agent import AgentConfig, MemoryCheckpoint, UserInput, create_agent
from trio_agent.testing.models import ScriptedModel

PACKAGES = [
    "trio_agent",
    "trio_agent.middleware",
    "trio_agent.protocol",
    "trio_agent.sandbox",
    "trio_agent.store",
    "trio_agent.testing",
    "trio_agent.tools",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_exported_exists_and_is_documented(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__doc__
    assert len(set(package.__all__)) == len(package.__all__)
    for exported in package.__all__:
        value = getattr(package, exported)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{exported} has no docstring"


def test_the_names_of_the_api_are_importable_from_the_top() -> None:
    names = [
        "create_agent",
        "run_agent",
        "AgentConfig",
        "Agent",
        "Receipt",
        "TurnResult",
        "Snapshot",
        "AgentSender",
        "UserInput",
        "EditQueued",
        "CancelQueued",
        "Interrupt",
        "ExecApproval",
        "Approved",
        "ApprovedForSession",
        "Denied",
        "Abort",
        "SetModel",
        "ResumeSession",
        "CapabilityCommand",
        "Submission",
        "tool",
        "Tool",
        "ToolContext",
        "ToolResult",
        "Model",
        "ModelRouter",
        "ModelRequest",
        "ModelOutput",
        "SqliteCheckpoint",
        "MemoryCheckpoint",
        "Checkpoint",
        "CheckpointStore",
        "Recovery",
        "AgentRole",
        "SessionContext",
        "Sandbox",
        "LocalSandbox",
        "ApprovalPolicy",
        "Middleware",
        "MiddlewareStack",
        "UserItem",
        "AssistantItem",
        "ReasoningItem",
        "ToolCallItem",
        "ToolOutputItem",
        "TokenUsage",
        "AgentError",
        "ConfigError",
        "DuplicateError",
        "UnknownError",
        "BusyError",
        "StoppedError",
        "SubmissionRejectedError",
        "ProviderError",
        "StreamInterruptedError",
        "AuthError",
        "ContextOverflowError",
        "StepLimitError",
        "SandboxError",
        "ToolError",
        "CheckpointError",
        "StaleSessionError",
        "SessionOwnedError",
        "StoreVersionError",
        "CorruptStoreError",
        "SessionBrokenError",
    ]
    assert [name for name in names if name not in trio_agent.__all__] == []


def test_every_error_has_a_kind_of_its_own() -> None:
    errors = [
        value
        for value in vars(importlib.import_module("trio_agent.errors")).values()
        if inspect.isclass(value) and issubclass(value, trio_agent.AgentError)
    ]
    kinds = {error: error.kind for error in errors}
    shared = {trio_agent.StreamInterruptedError, trio_agent.ProviderError}
    own = [kind for error, kind in kinds.items() if error not in shared]
    assert len(own) == len(set(own))
    assert trio_agent.StreamInterruptedError.kind == trio_agent.ProviderError.kind


def test_events_are_not_exported_at_the_top() -> None:
    """`Event`, `Error` and `Warning` are common names."""
    assert not {"Event", "Error", "Warning"} & set(trio_agent.__all__)


def test_importing_loads_nothing_foreign_but_the_declared_dependencies() -> None:
    """Extras are imported when they are used."""
    code = """
import sys, trio, attrs, cattrs, msgspec, docstring_parser, sqlite3, json, logging, socket
before = {name.partition(".")[0] for name in sys.modules}
import trio_agent
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(name for name in after - before if name not in sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert done.stdout.split() == ["trio_agent"]


def test_every_module_imports_alone() -> None:
    """No cycle is hidden by the order in which the facade imports."""
    names = [
        module.name
        for module in pkgutil.walk_packages(trio_agent.__path__, "trio_agent.")
        if "__main__" not in module.name
    ]
    code = "import importlib, sys; importlib.import_module(sys.argv[1])"
    for name in names[:: max(1, len(names) // 12)]:
        subprocess.run([sys.executable, "-c", code, name], check=True)


async def test_the_handles_methods_are_checkpoints() -> None:
    model = ScriptedModel("a", "b", "c")
    config = AgentConfig(model=model, checkpoints=MemoryCheckpoint())
    with trio.testing.assert_checkpoints():
        manager = create_agent(config)
        agent = await manager.__aenter__()
    with trio.testing.assert_checkpoints():
        await agent.wait_idle()
    with trio.testing.assert_checkpoints():
        await agent.submit(UserInput(text="x"))
    with trio.testing.assert_checkpoints():
        await agent.run("x")
    with trio.testing.assert_checkpoints():
        await agent.next_event()
    with trio.testing.assert_no_checkpoints():
        agent.submit_nowait(UserInput(text="x"))
        agent.snapshot()
        agent.subscribe(after=0)
        agent.close()
    with trio.testing.assert_checkpoints():
        await manager.__aexit__(None, None, None)
