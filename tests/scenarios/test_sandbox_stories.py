"""What went wrong for users of coding agents, told through whole sessions with real tools."""


# ruff: noqa: PTH120, PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_agent import AgentConfig, create_agent
from trio_agent.model.base import ModelCall, ModelOutput
from trio_agent.protocol.events import ToolCallEnd
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.sandbox import ApprovalPolicy, LocalSandbox, Permissions, Sandbox
from trio_agent.store.sqlite import SqliteCheckpoint
from trio_agent.testing.models import ScriptedModel, StrictModel
from trio_agent.tools import shell
from trio_agent.tools.coding import coding_tools

SESSION = "story"


def calls(*wanted: tuple[str, dict[str, Any]]) -> ModelOutput:
    import json

    return ModelOutput.answer(
        "", *(ModelCall(name=name, arguments=json.dumps(given)) for name, given in wanted)
    )


def config(workspace: Path, script: Any, store: Any = None, **local: Any) -> AgentConfig:
    return AgentConfig(
        model=StrictModel(ScriptedModel(*script)),
        tools=coding_tools(),
        sandbox=Sandbox(LocalSandbox(workspace, **local), ApprovalPolicy.ALLOW),
        checkpoints=store,
        session_id=SESSION,
    )


async def ends(agent: Any, text: str) -> list[ToolCallEnd]:
    """Run one turn and return how its calls ended."""
    found: list[ToolCallEnd] = []

    async def note(event: Any) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(event.msg, ToolCallEnd):
            found.append(event.msg)

    result = await agent.run(text, on_event=note)
    assert result.outcome == "completed", result
    return found


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "ws"
    path.mkdir()
    return path


class TestBytesThatAreNoText:
    COMMANDS = (
        r"printf '\xff\xfe\x80\xc3\x28\x00\x6f\x6b\n'; printf '\xe4\xf6' >&2; exit 3",
        "head -c 1000 /dev/urandom; exit 3",
        "head -c 1000 /dev/zero; exit 3",
    )

    async def test_the_turn_survives_and_nothing_is_lost(
        self, workspace: Any, tmp_path: Any
    ) -> None:
        script = [
            calls(*(("run_command", {"command": command}) for command in self.COMMANDS)),
            ModelOutput.answer("done"),
        ]
        path = tmp_path / "sessions.db"
        with trio.fail_after(60):
            async with SqliteCheckpoint(path) as store:
                async with create_agent(config(workspace, script, store)) as agent:
                    told = await ends(agent, "go")
            async with SqliteCheckpoint(path) as store:
                stored = [
                    event.msg
                    for event in (await store.events_after(SESSION, 0, 1_000)).events
                    if isinstance(event.msg, ToolCallEnd)
                ]
        assert [end.outcome for end in told] == ["finished"] * 3
        assert all(end.output.startswith(shell.EXIT_CODE.format(code=3)) for end in told)
        first, _, zeros = told
        assert "(\0ok" in first.output
        assert "stderr:" in first.output
        assert zeros.output.count("\0") == 1_000
        assert [len(end.output) for end in stored] == [len(end.output) for end in told]


class TestOneHugeLine:
    async def test_it_is_bounded_readable_and_soon_forgotten(
        self, workspace: Any, tmp_path: Any
    ) -> None:
        size = 24_000_000
        huge = f"head -c {size} /dev/zero | tr '\\0' x"
        read = {"path": "@output/1-stdout", "byte": size - 10}
        script = [
            calls(("run_command", {"command": huge})),
            ModelOutput.answer("done"),
            calls(("read_file", read)),
            *(ModelOutput.answer("done") for _ in range(5)),
        ]
        path = tmp_path / "sessions.db"
        with trio.fail_after(120):
            async with SqliteCheckpoint(path) as store:
                async with create_agent(config(workspace, script, store)) as agent:
                    (end,) = await ends(agent, "go")
                    assert len(end.output.encode()) <= MAX_TOOL_OUTPUT_BYTES
                    assert "@output/1-stdout" in end.output
                    assert f"{size - end.output.count('x') + 1:,}"[:6] in end.output
                    (end,) = await ends(agent, "read the end of it")
                    assert end.output == "x" * 10
                    for _ in range(4):
                        await ends(agent, "go on")
            async with SqliteCheckpoint(path) as store:
                script = [ModelOutput.answer("done")]
                async with create_agent(config(workspace, script, store)) as agent:
                    await ends(agent, "go on")
        assert path.stat().st_size < 1_000_000


def processes_with(marker: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found = marker.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if found:
                yield int(entry.name)


async def wait_gone(marker: str) -> None:
    with trio.fail_after(5):  # noqa: ASYNC912
        while list(processes_with(marker)):  # noqa: ASYNC110
            await trio.sleep(0.02)


CHILDREN = {
    "in the background": "(while true; do echo tick; sleep 0.1; done) & tail -f /dev/null",
    "deaf to SIGTERM": "(trap '' TERM; while true; do echo tick; sleep 0.1; done) & sleep 300",
    "in its own session": "echo tick; setsid sh -c 'sleep 300' & sleep 300",
    "three levels deep": (
        "echo tick; bash -c '(bash -c \"sleep 300 & sleep 300\" & sleep 300) & sleep 300'"
    ),
}


class TestTimeIsUp:
    @pytest.mark.parametrize("kind", CHILDREN)
    async def test_all_that_the_command_started_is_gone(
        self, workspace: Any, kind: Any
    ) -> None:
        marker = f"marker-{uuid.uuid4()}"
        script = [
            calls(("run_command", {"command": CHILDREN[kind], "timeout": 1})),
            ModelOutput.answer("done"),
        ]
        with trio.fail_after(30):
            configuration = config(workspace, script, environment={"MARKER": marker})
            async with create_agent(configuration) as agent:
                (end,) = await ends(agent, "go")
        assert end.is_error
        assert end.output.startswith(shell.TIMED_OUT.format(seconds=1))
        assert "tick" in end.output
        await wait_gone(marker)

    async def test_the_search_for_leftovers_does_find_them(self, workspace: Any) -> None:
        """Bare commands promise their process group only: a session of its own is left."""
        marker = f"marker-{uuid.uuid4()}"
        backend = LocalSandbox(workspace, isolation="none", environment={"MARKER": marker})
        bound = Sandbox(backend).bind(
            session_id="s", call_id="c", permissions=Permissions(mutate=True)
        )
        output = await bound.run(f"{CHILDREN['in its own session']}", timeout=1)
        left = list(processes_with(marker))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert output.timed_out
        assert left
        await wait_gone(marker)


LEADS_OUT = (
    "link/secret.txt",
    "link/new.txt",
    "link/../x",
    "OUTSIDE/secret.txt",
    "../outside/secret.txt",
    "chain/secret.txt",
)


class TestLinksThatLeadOut:
    async def test_every_file_tool_refuses_and_the_session_goes_on(
        self, workspace: Any, tmp_path: Any
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret.txt").write_text("secret\n")
        (workspace / "dir").mkdir()
        (workspace / "dir" / "a.txt").write_text("inner\n")
        (workspace / "link").symlink_to(outside)
        (workspace / "chain").symlink_to("link")
        (workspace / "in").symlink_to(workspace / "dir")
        batches = []
        for path in LEADS_OUT:
            real = path.replace("OUTSIDE", str(outside))
            batches.append(
                calls(
                    ("read_file", {"path": real}),
                    ("list_files", {"path": os.path.dirname(real)}),
                    ("search", {"pattern": "secret", "path": os.path.dirname(real)}),
                    ("write_file", {"path": real, "content": "evil"}),
                    ("edit_file", {"path": real, "old": "secret", "new": "evil"}),
                    (
                        "apply_patch",
                        {
                            "patch": f"*** Begin Patch\n*** Update File: {real}\n"
                            "-secret\n+evil\n*** End Patch"
                        },
                    ),
                    (
                        "apply_patch",
                        {"patch": f"*** Begin Patch\n*** Add File: {real}\n+x\n*** End Patch"},
                    ),
                )
            )
        script = [
            *batches,
            calls(("read_file", {"path": "in/a.txt"})),
            ModelOutput.answer("done"),
        ]
        with trio.fail_after(60):
            async with create_agent(config(workspace, script)) as agent:
                told = await ends(agent, "go")
        *refused, inner = told
        assert inner.output == "inner\n"
        assert len(refused) == 7 * len(LEADS_OUT)
        assert [end.name for end in refused if not end.is_error] == []
        assert os.listdir(outside) == ["secret.txt"]
        assert (outside / "secret.txt").read_text() == "secret\n"


class TestTheEnginesKeys:
    async def test_no_command_and_no_tool_sees_one(
        self, workspace: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        command = "env; cat /proc/*/environ | tr '\\0' '\\n'; echo end"
        script = [calls(("run_command", {"command": command})), ModelOutput.answer("done")]
        with trio.fail_after(60):
            async with create_agent(config(workspace, script)) as agent:
                (end,) = await ends(agent, "go")
        assert "PATH=" in end.output
        assert "sk-secret" not in end.output
