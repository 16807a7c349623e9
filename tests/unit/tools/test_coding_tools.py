"""The coding tools, each called as a model calls it, in a real sandbox."""


# ruff: noqa: PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from trio_agent.errors import ConfigError, SandboxError, ToolError
from trio_agent.protocol.limits import MAX_TOOL_OUTPUT_BYTES
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.policy import Permissions
from trio_agent.sandbox.sandbox import Sandbox
from trio_agent.tools import files, shell
from trio_agent.tools.base import DescribedTool, SandboxedTool, ToolContext, ToolResult
from trio_agent.tools.coding import coding_tools

NAMES = (
    "read_file",
    "list_files",
    "search",
    "write_file",
    "edit_file",
    "apply_patch",
    "run_command",
    "start_command",
    "poll_command",
    "stop_command",
)
READING = {"read_file", "list_files", "search", "poll_command"}
ASKING = {"write_file", "edit_file", "apply_patch", "run_command", "start_command"}


class Bench:
    """A workspace and the tools on it."""

    def __init__(self, workspace: Any, bound: Any) -> None:
        self.workspace = workspace
        self.context = ToolContext(
            session_id="s",
            turn_id="t",
            call_id="c",
            idempotency_key="k",
            workspace=workspace,
            sandbox=bound,
        )
        self.tools = {tool.definition.name: tool for tool in coding_tools()}

    async def call(self, name: Any, /, **arguments: Any) -> str:
        result = await self.tools[name].call(arguments, self.context)
        return result.output if isinstance(result, ToolResult) else result

    async def describe(self, name: Any, /, **arguments: Any) -> str:
        tool = self.tools[name]
        assert isinstance(tool, DescribedTool)
        return await tool.describe(arguments, self.context)

    def put(self, name: Any, data: Any) -> None:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def get(self, name: Any) -> bytes:
        return bytes((self.workspace / name).read_bytes())


@pytest.fixture
async def bench(tmp_path: Any) -> Any:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    sandbox = Sandbox(LocalSandbox(workspace))
    async with sandbox.session("s"):
        permissions = Permissions(mutate=True)
        yield Bench(
            workspace, sandbox.bind(session_id="s", call_id="c", permissions=permissions)
        )


class TestDeclarations:
    def test_names_and_order(self) -> None:
        assert tuple(tool.definition.name for tool in coding_tools()) == NAMES

    def test_only_what_changes_something_asks(self) -> None:
        tools = {tool.definition.name: tool for tool in coding_tools()}
        assert {name for name, tool in tools.items() if tool.needs_approval} == ASKING
        assert {n for n, tool in tools.items() if tool.effect == "read_only"} == READING
        assert all(isinstance(t, SandboxedTool) and t.sandboxed for t in tools.values())
        assert all(not tools[name].exclusive for name in READING)
        assert all(tools[name].exclusive for name in ASKING)
        assert {n for n, t in tools.items() if isinstance(t, DescribedTool)} == ASKING

    def test_a_missing_extra_is_named(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError):
            coding_tools()

    async def test_without_a_sandbox_the_model_reads_why(self) -> None:
        context = ToolContext(session_id="s", turn_id="t", call_id="c", idempotency_key="k")
        with pytest.raises(ToolError):
            await files.read_file.call({"path": "x"}, context)


class TestReading:
    async def test_a_whole_file(self, bench: Any) -> None:
        bench.put("a", "one\ntwo\n")
        assert await bench.call("read_file", path="a") == "one\ntwo\n"

    async def test_a_part_says_where_to_read_on(self, bench: Any) -> None:
        bench.put("a", "one\ntwo\nthree\n")
        part = await bench.call("read_file", path="a", offset=2, limit=1, line_numbers=True)
        assert part == f"{2:>6}\ttwo\n" + files.MORE_LINES.format(size=14, line=3)

    async def test_a_huge_line_is_read_by_bytes(self, bench: Any) -> None:
        bench.put("a", "x" * 100_000)
        text = await bench.call("read_file", path="a")
        assert len(text.encode()) <= MAX_TOOL_OUTPUT_BYTES
        note = text.rpartition("\n")[2]
        assert note == files.MORE_BYTES.format(size=100_000, byte=32_768)
        assert await bench.call("read_file", path="a", byte=99_990) == "x" * 10

    async def test_an_empty_file_says_so(self, bench: Any) -> None:
        bench.put("a", "")
        assert await bench.call("read_file", path="a") == files.EMPTY_FILE

    async def test_listing(self, bench: Any) -> None:
        bench.put("a b", "123")
        bench.put("sub/\n", "")
        (bench.workspace / "link").symlink_to("a b")
        os.mkfifo(bench.workspace / "fifo")
        listed = await bench.call("list_files", depth=2)
        assert listed.split("\n") == [
            "a b  3",
            "fifo  (not a regular file)",
            "link@",
            "sub/",
            "sub/\\n  0",
        ]

    async def test_an_empty_listing_says_so(self, bench: Any) -> None:
        assert await bench.call("list_files") == files.NOTHING_LISTED

    async def test_long_listings_are_cut(self, bench: Any) -> None:
        for number in range(30):
            bench.put(f"f{number:02}", "")
        lines = (await bench.call("list_files", limit=10)).split("\n")
        assert len(lines) == 11
        assert lines[-1] == files.MORE_ENTRIES

    async def test_search(self, bench: Any) -> None:
        bench.put("a", "no\nyes\n")
        assert await bench.call("search", pattern="yes") == "a:2: yes"
        assert await bench.call("search", pattern="maybe") == files.NO_MATCHES

    async def test_long_searches_stay_in_bounds(self, bench: Any) -> None:
        bench.put("a", ("y" * 390 + "\n") * 2_000)
        text = await bench.call("search", pattern="yyy", limit=1_000)
        assert len(text.encode()) <= MAX_TOOL_OUTPUT_BYTES
        assert text.endswith(files.MORE_MATCHES)


class TestWriting:
    async def test_writing_shows_the_diff_first(self, bench: Any) -> None:
        bench.put("a", "one\ntwo\n")
        shown = await bench.describe("write_file", path="a", content="one\n2\n")
        assert "-two" in shown.split("\n")
        assert "+2" in shown.split("\n")
        assert bench.get("a") == b"one\ntwo\n"
        await bench.call("write_file", path="a", content="one\n2\n")
        assert bench.get("a") == b"one\n2\n"

    async def test_too_much_at_once_is_refused(self, bench: Any) -> None:
        with pytest.raises(ToolError):
            await bench.call(
                "write_file", path="a", content="x" * (files.MAX_WRITTEN_BYTES + 1)
            )
        assert os.listdir(bench.workspace) == []

    async def test_everything_that_is_written_is_shown(self, bench: Any) -> None:
        bench.put("a", "old\n" * 10_000)
        content = "\n".join(f"line {n}" for n in range(4_000))
        shown = await bench.describe("write_file", path="b", content=content)
        assert {f"+line {n}" for n in range(4_000)} <= set(shown.split("\n"))

    async def test_an_edit_replaces_the_one_place(self, bench: Any) -> None:
        bench.put("a", b"x = 1\r\ny = \xff\r\n")
        shown = await bench.describe("edit_file", path="a", old="x = 1\ny", new="x = 2\ny")
        told = await bench.call("edit_file", path="a", old="x = 1\ny", new="x = 2\ny")
        assert told == shown
        assert bench.get("a") == b"x = 2\r\ny = \xff\r\n"

    @pytest.mark.parametrize(
        ("old", "new"), [("missing", "x"), ("a", "x"), ("", "x"), ("b", "b"), ("aa", "x")]
    )
    async def test_an_edit_that_is_not_exact_changes_nothing(
        self, bench: Any, old: Any, new: Any
    ) -> None:
        bench.put("a", "aaa\nb\n")
        for act in (bench.call, bench.describe):
            with pytest.raises(ToolError):
                await act("edit_file", path="a", old=old, new=new)
        assert bench.get("a") == b"aaa\nb\n"

    async def test_a_file_never_outgrows_what_can_be_read(self, bench: Any) -> None:
        bench.put("a", "x" * 1_048_570 + "@")
        with pytest.raises(ToolError):
            await bench.call("edit_file", path="a", old="@", new="y" * 10)

    @pytest.mark.parametrize(
        ("content", "outcome"),
        [
            ("old\n", "not_started"),
            ("new\n", "finished"),
            ("other\n", "unknown"),
            ("old old", "unknown"),
        ],
    )
    async def test_after_a_crash_an_edit_knows_what_became_of_it(
        self, bench: Any, content: Any, outcome: Any
    ) -> None:
        bench.put("a", content)
        arguments = {"path": "a", "old": "old", "new": "new"}
        reconcile: Any = files.edit_file.reconcile
        found = await reconcile(arguments, bench.context)
        assert found.outcome == outcome

    async def test_a_patch_is_all_or_nothing(self, bench: Any) -> None:
        bench.put("a", "a\n")
        bench.put("b", "b\n")
        patch = (
            "*** Begin Patch\n*** Update File: a\n-a\n+A\n*** Add File: c\n+c\n"
            "*** Update File: b\n-{}\n+B\n*** End Patch"
        )
        with pytest.raises(ToolError):
            await bench.call("apply_patch", patch=patch.format("x"))
        assert sorted(os.listdir(bench.workspace)) == ["a", "b"]
        assert bench.get("a") == b"a\n"

        shown = await bench.describe("apply_patch", patch=patch.format("b"))
        assert await bench.call("apply_patch", patch=patch.format("b")) == shown
        assert [bench.get(name) for name in "abc"] == [b"A\n", b"B\n", b"c\n"]

    async def test_a_patch_keeps_modes_and_bytes_through_a_rename(self, bench: Any) -> None:
        bench.put("a", b"\xff\nold\n")
        (bench.workspace / "a").chmod(0o755)
        patch = "--- a/a\n+++ b/b\n@@ -2,1 +2,1 @@\n-old\n+new\n"
        await bench.call("apply_patch", patch=patch)
        assert bench.get("b") == b"\xff\nnew\n"
        assert (bench.workspace / "b").stat().st_mode & 0o777 == 0o755
        assert not (bench.workspace / "a").exists()

    async def test_an_added_file_must_not_be_there(self, bench: Any) -> None:
        bench.put("a", "mine")
        with pytest.raises(SandboxError):
            await bench.call(
                "apply_patch", patch="*** Begin Patch\n*** Add File: a\n+x\n*** End Patch"
            )
        assert bench.get("a") == b"mine"


class TestCommands:
    async def test_a_failure_is_a_normal_result(self, bench: Any) -> None:
        result = await shell.run_command.call({"command": "echo x; exit 4"}, bench.context)
        assert isinstance(result, ToolResult)
        assert not result.is_error
        assert result.output.split("\n") == [
            shell.EXIT_CODE.format(code=4),
            "stdout:",
            "x",
        ]

    async def test_the_exact_command_is_shown(self, bench: Any) -> None:
        command = "rm -rf x  # 'all' of it\n"
        assert await bench.describe("run_command", command=command) == command
        assert shell.run_command.grant_key({"command": command, "timeout": 5}) == command

    async def test_long_outputs_stay_in_bounds_and_can_be_read(self, bench: Any) -> None:
        command = "seq 100000; seq 100000 >&2"
        text = await bench.call("run_command", command=command)
        assert len(text.encode()) <= MAX_TOOL_OUTPUT_BYTES
        name = next(part for part in text.split() if part.startswith("@output/"))
        whole = await bench.call("read_file", path=name.rstrip(","), offset=50_000, limit=1)
        assert whole.startswith("50000\n")

    async def test_silence_is_said(self, bench: Any) -> None:
        assert shell.NO_OUTPUT in await bench.call("run_command", command="true")

    async def test_background(self, bench: Any) -> None:
        told = await bench.call("start_command", command="echo up; sleep 300")
        command_id = next(word.rstrip(";") for word in told.split() if word.count("-") == 4)
        text = ""
        while "up" not in text:
            text += await bench.call("poll_command", command_id=command_id)
        assert "stopped" in await bench.call("stop_command", command_id=command_id)
        with pytest.raises(SandboxError):
            await bench.call("poll_command", command_id=command_id)
