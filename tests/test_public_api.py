"""The public surface: what is exported, documented, and a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

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


COST = """
import sys
import trio, attrs, cattrs, msgspec, sqlite3
before = set(sys.modules)
import trio_agent
loaded = set(sys.modules) - before
records = {
    value
    for name in loaded
    for value in vars(sys.modules[name]).values()
    if isinstance(value, type) and "__attrs_props__" in vars(value)
}
print(len(records), *sorted(loaded))
"""
SESSION = """
import sys
import trio, trio_agent
from trio_agent import AgentConfig, MemoryCheckpoint, ModelOutput, SqliteCheckpoint, UserInput
before = set(sys.modules)

class Echo:
    async def respond(self, request, emit):
        await emit("y")
        return ModelOutput.answer("y")

async def session(store):
    config = AgentConfig(model=Echo(), checkpoints=store)
    async with store, trio_agent.create_agent(config) as agent:
        await agent.submit(UserInput(text="x"))
        await agent.wait_idle()
        assert await agent.next_event() is not None
        assert (await agent.run("x")).text == "y"

trio.run(session, MemoryCheckpoint())
trio.run(session, SqliteCheckpoint(sys.argv[1]))
print(*(name for name in set(sys.modules) - before if not name.startswith("encodings.")))
"""


def told_by(code: str, *arguments: str) -> list[str]:
    child = [sys.executable, "-c", code, *arguments]
    return subprocess.run(child, capture_output=True, check=True, text=True).stdout.split()


def test_importing_loads_only_what_a_session_needs() -> None:
    """Each attrs class costs about as much as a module: 103 and 94 of them are 1.45."""
    count, *loaded = told_by(COST)
    late = ["protocol.schema", "sandbox.base", "testing", "cli"]
    late += ["store.archive", "store.audit", "store.packing", "store.transfer"]

    assert not {"json", *(f"trio_agent.{name}" for name in late)} & set(loaded)
    assert int(count) <= 108
    assert len(loaded) <= 94


def test_what_importing_saves_a_first_session_does_not_pay(tmp_path: Path) -> None:
    assert told_by(SESSION, str(tmp_path / "x.db")) == []


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
