"""The command `trio-agent` as its users meet it: a real child process, files and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from trio_agent import SqliteCheckpoint
from trio_agent.protocol.items import AssistantItem, ToolCallItem, ToolOutputItem, UserItem

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
LONG = "say " + " ".join(f"word{number}" for number in range(20_000))
"""An answer that no pipe holds: the child cannot end before the test reads on."""


@attrs.define
class Desk:
    """A directory with a workspace and a database, and the command run in it."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "sessions.db"

    @property
    def workspace(self) -> Path:
        return self.path / "workspace"

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "trio_agent", *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.path)}
        return kept | {"XDG_DATA_HOME": str(self.path / "data"), "LC_ALL": "C.UTF-8"}

    async def run(
        self, *arguments: str | Path, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        with trio.fail_after(LIMIT):
            done = await trio.run_process(
                self.command(*arguments),
                stdin=stdin,
                capture_stdout=True,
                capture_stderr=True,
                check=False,
                cwd=self.path,
                env=self.environment(),
            )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    def here(self) -> tuple[str | Path, ...]:
        return ("--db", self.database, "--workspace", self.workspace)

    @asynccontextmanager
    async def start(self, *arguments: str | Path) -> AsyncGenerator[Child]:
        """Run the command beside the test; whatever happens, it does not outlive the block."""
        with trio.fail_after(LIMIT):
            process = await trio.lowlevel.open_process(
                self.command(*arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.path,
                env=self.environment(),
            )
            try:
                yield Child(process)
            finally:
                if process.returncode is None:
                    process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
                for stream in (process.stdin, process.stdout, process.stderr):
                    assert stream is not None
                    with trio.CancelScope(shield=True):
                        await stream.aclose()

    @asynccontextmanager
    async def start_long(self) -> AsyncGenerator[Child]:
        """Run a prompt whose answer takes long, and wait until it streams."""
        async with self.start("run", "-", "--session", "s", *self.here()) as child:
            await child.type(LONG, close=True)
            await child.wait_for("word10")
            yield child

    async def items(self, session_id: str) -> list[object]:
        async with SqliteCheckpoint(self.database) as store:
            page = await store.transcript_page(session_id, max_batches=1_000)
        return [item for batch in reversed(page.batches) for item in batch.items]


@attrs.define
class Child:
    process: trio.Process
    output: str = ""

    async def wait_for(self, pattern: str) -> None:
        """Read until the output holds *pattern*."""
        assert self.process.stdout is not None
        while not re.search(pattern, self.output):
            data = await self.process.stdout.receive_some(65_536)
            assert data, f"{pattern!r} never came: {self.output!r}"
            self.output += data.decode(errors="replace")

    async def rest(self) -> int:
        """Read to the end; return the exit code."""
        assert self.process.stdout is not None
        async for data in self.process.stdout:
            self.output += data.decode(errors="replace")
        return await self.process.wait()

    async def type(self, text: str, *, close: bool = False) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(text.encode())
        if close:
            await self.process.stdin.aclose()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "poem.txt").write_text("roses are red\n")
    return Desk(tmp_path)


# --- the main job


async def test_run_streams_an_answer_with_tools_and_ends_with_the_usage(desk: Desk) -> None:
    done = await desk.run("run", "read poem.txt then list and say bye", *desk.here())
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any("read_file" in line and "poem.txt" in line for line in lines)
    assert "    roses are red" in lines
    assert any("list_files" in line for line in lines)
    assert "bye" in lines
    assert lines[-1].startswith("usage: ")
    assert "2 tool calls" in lines[-1]
    assert "\x1b" not in done.stdout


async def test_a_session_is_resumed_listed_and_shown(desk: Desk) -> None:
    for text in ("say first", "read poem.txt"):
        assert (await desk.run("run", text, "--session", "../s", *desk.here())).returncode == 0
    listed = await desk.run("sessions", "--db", desk.database)
    (line,) = listed.stdout.splitlines()
    assert line.startswith("../s ")
    assert "2 turns" in line
    assert "say first" in line
    shown = await desk.run("show", "../s", "--db", desk.database)
    assert shown.returncode == 0
    assert shown.stdout.index("> say first") < shown.stdout.index("> read poem.txt")
    assert "roses are red" in shown.stdout


async def test_without_a_path_sessions_live_in_the_data_directory(desk: Desk) -> None:
    assert (await desk.run("sessions")).stdout == ""
    assert not (desk.path / "data").exists()
    assert (await desk.run("run", "say hi", "--session", "s")).returncode == 0
    assert (await desk.run("sessions")).stdout.startswith("s ")
    (database,) = (desk.path / "data").rglob("*.db")
    assert database.stat().st_mode & 0o777 == 0o600


async def test_a_prompt_can_come_from_stdin(desk: Desk) -> None:
    done = await desk.run("run", "-", *desk.here(), stdin=b"say from a pipe\n")
    assert (done.returncode, "from a pipe" in done.stdout.splitlines()) == (0, True)


async def test_chat_answers_line_by_line_until_the_input_ends(desk: Desk) -> None:
    done = await desk.run(
        "chat", "--session", "s", *desk.here(), stdin=b"say one\n\nread poem.txt\nsay two"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.index("one\n") < done.stdout.index("roses") < done.stdout.index("two\n")
    again = await desk.run("chat", "--session", "s", *desk.here())
    assert "> say one" in again.stdout  # what was said before is shown


async def test_control_characters_of_tools_and_models_do_nothing(desk: Desk) -> None:
    (desk.workspace / "evil").write_text("a\x1b]0;title\x07\x9b2J\rb\n")
    done = await desk.run("run", "read evil and say x\x1b[2Jy", *desk.here())
    assert done.returncode == 0
    assert not set("\x1b\x07\x9b\r") & set(done.stdout)


# --- consent


async def test_without_a_terminal_what_needs_consent_is_denied(desk: Desk) -> None:
    done = await desk.run(
        "run", "run touch made", "--session", "s", "--isolation", "none", *desk.here()
    )
    assert done.returncode == 0
    (output,) = [one for one in await desk.items("s") if isinstance(one, ToolOutputItem)]
    assert output.is_error
    assert "--policy" in output.output
    assert not (desk.workspace / "made").exists()


async def test_the_policy_lets_it_run(desk: Desk) -> None:
    done = await desk.run(
        *("run", "run touch made", "--isolation", "none", "--policy", "full_access"),
        *desk.here(),
    )
    assert done.returncode == 0
    assert (desk.workspace / "made").exists()


@asynccontextmanager
async def at_terminal(desk: Desk, *arguments: str | Path) -> AsyncGenerator[Terminal]:
    """Run the command at a terminal of its own."""
    ours, theirs = os.openpty()
    stream = trio.lowlevel.FdStream(ours)
    with trio.fail_after(LIMIT):
        try:
            process = await trio.lowlevel.open_process(
                desk.command(*arguments, *desk.here()),
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=desk.path,
                env=desk.environment() | {"TERM": "xterm"},
            )
        finally:
            os.close(theirs)
        try:
            yield Terminal(process, stream)
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()
                await stream.aclose()


@attrs.define
class Terminal:
    process: trio.Process
    stream: trio.abc.Stream
    output: str = ""

    async def wait_for(self, pattern: str) -> None:
        while not re.search(pattern, self.output):
            self.output += (await self.stream.receive_some(65_536)).decode(errors="replace")

    async def type(self, text: str) -> None:
        await self.stream.send_all(text.encode())

    async def rest(self) -> int:
        try:
            while data := await self.stream.receive_some(65_536):
                self.output += data.decode(errors="replace")
        except trio.BrokenResourceError:
            pass  # how Linux says that the other side of a terminal is closed
        return await self.process.wait()


GATED = ("run", "run echo x >> made then run echo x >> made", "--isolation", "none")


@pytest.mark.parametrize(
    ("answers", "made", "code"),
    [
        (["y", "yes"], 2, 0),
        (["n because", "y"], 1, 0),
        (["what?", "n", "n"], 0, 0),
        (["always"], 2, 0),
        (["abort"], 0, 1),
        (["\x04", "\x04"], 0, 0),
    ],
)
async def test_a_person_at_the_terminal_decides(
    desk: Desk, answers: Sequence[str], made: int, code: int
) -> None:
    async with at_terminal(desk, *GATED, "--session", "s") as terminal:
        for number, answer in enumerate(answers):
            await terminal.wait_for(f"(?s)(Allow it.*){{{number + 1}}}")
            await terminal.type(answer if answer == "\x04" else answer + "\n")
            if answer == "\x04":  # the end of the input stays the end: nobody is asked again
                break
        assert await terminal.rest() == code
    done = desk.workspace / "made"
    assert (done.read_text().count("x") if done.exists() else 0) == made
    assert "\x1b[0m" in terminal.output


async def test_what_was_typed_ahead_answers_no_question(desk: Desk) -> None:
    async with at_terminal(desk, *GATED) as terminal:
        await terminal.wait_for("Allow it")
        await terminal.type("n\ny\n")
        await terminal.wait_for("(?s)(Allow it.*){2}")
        await terminal.type("n\n")
        assert await terminal.rest() == 0
    assert not (desk.workspace / "made").exists()


async def test_ctrl_c_at_a_question_ends_the_turn_and_runs_nothing(desk: Desk) -> None:
    async with at_terminal(desk, *GATED) as terminal:
        await terminal.wait_for("Allow it")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.rest() == 130
    assert not (desk.workspace / "made").exists()


async def test_a_question_waits_through_a_kill(desk: Desk) -> None:
    async with at_terminal(desk, *GATED, "--session", "s") as terminal:
        await terminal.wait_for("Allow it")
        terminal.process.kill()
        await terminal.process.wait()
    assert not (desk.workspace / "made").exists()
    again = ("run", "--session", "s", "--isolation", "none", "--recovery", "resume")
    async with at_terminal(desk, *again) as terminal:
        for number in (1, 2):
            await terminal.wait_for(f"(?s)(Allow it.*){{{number}}}")
            await terminal.type("y\n")
        assert await terminal.rest() == 0
    assert (desk.workspace / "made").read_text() == "x\nx\n"


async def test_chat_at_a_terminal_prompts_and_leaves_at_the_end_of_input(desk: Desk) -> None:
    async with at_terminal(desk, "chat") as terminal:
        await terminal.wait_for("you> ")
        await terminal.type("say hi\n")
        await terminal.wait_for("(?s)usage: .*you> ")
        await terminal.type("\x04")
        assert await terminal.rest() == 0


# --- wrong requests


@pytest.mark.parametrize(
    ("code", "kind", "arguments"),
    [
        (2, "unknown_registration", ["run", "x", "--model", "nope"]),
        (2, "configuration", ["run", "x", "--model", "openai:gpt"]),
        (2, "configuration", ["run", "x", "--session", ""]),
        (2, "configuration", ["run", "x", "--session", "é" * 128]),
        (2, "configuration", ["run", "x", "--session", "a\nb"]),
        (2, "configuration", ["run", "x", "--workspace", "nowhere"]),
        (2, "unknown_registration", ["show", "nobody"]),
        (3, "checkpoint", ["run", "x", "--db", "."]),
        (3, "checkpoint", ["run", "x", "--db", "text/x.db"]),
        (3, "store_version", ["run", "x", "--db", "text"]),
        (3, "store_version", ["sessions", "--db", "text"]),
        (3, "checkpoint", ["show", "x", "--db", "."]),
        (2, "usage", ["run"]),
        (2, "usage", ["frobnicate"]),
        (2, "usage", ["run", "x", "--policy", "never"]),
        (2, "usage", []),
    ],
)
async def test_a_wrong_request_has_its_exit_code_and_kind_on_stderr(
    desk: Desk, code: int, kind: str, arguments: Sequence[str]
) -> None:
    (desk.path / "text").write_text("not a database, however long it may be\n" * 100)
    done = await desk.run(*arguments)
    assert done.returncode == code
    assert kind in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


async def test_a_session_in_use_is_refused_and_not_disturbed(desk: Desk) -> None:
    async with desk.start("chat", "--session", "s", *desk.here()) as child:
        await child.type("say one\n")
        await child.wait_for(r"usage: ")
        done = await desk.run("run", "say two", "--session", "s", *desk.here())
        assert done.returncode == 3
        assert "session_owned" in done.stderr
        await child.type("say three\n")
        await child.wait_for(r"three\n")


async def test_a_reader_that_goes_away_ends_it_quietly(desk: Desk) -> None:
    async with desk.start_long() as child:
        assert child.process.stdout is not None
        await child.process.stdout.aclose()
        assert await child.process.wait() == 141
        assert child.process.stderr is not None
        assert await child.process.stderr.receive_some() == b""


# --- signals


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
async def test_a_signal_interrupts_the_turn_and_the_session_is_settled(
    desk: Desk, number: signal.Signals, code: int
) -> None:
    async with desk.start_long() as child:
        child.process.send_signal(number)
        assert await child.rest() == code
    assert "[turn] aborted" in child.output
    async with SqliteCheckpoint(desk.database) as store:
        checkpoint = await store.load("s")
    assert checkpoint is not None
    assert checkpoint.active_execution is None
    done = await desk.run("run", "say again", "--session", "s", *desk.here())
    assert (done.returncode, "again" in done.stdout) == (0, True)


async def test_chat_goes_on_after_ctrl_c_and_ends_at_the_second(desk: Desk) -> None:
    async with desk.start("chat", "--session", "s", *desk.here()) as child:
        await child.type(LONG + "\n")
        await child.wait_for("word10")
        child.process.send_signal(signal.SIGINT)
        await child.wait_for(r"\[turn\] aborted")
        await child.type("say still here\n")
        await child.wait_for(r"still here\n")
        await child.wait_for(r"usage: (.|\n)*usage: ")
        child.process.send_signal(signal.SIGINT)
        await child.wait_for("Ctrl-D")
        child.process.send_signal(signal.SIGINT)
        assert await child.rest() == 130


# --- kill -9


async def test_a_killed_answer_is_settled_by_the_next_start(desk: Desk) -> None:
    async with desk.start_long() as child:
        child.process.kill()
        await child.process.wait()
    done = await desk.run("run", "say after", "--session", "s", *desk.here())
    assert done.returncode == 0
    assert "[turn] aborted" in done.stdout
    said = [one for one in await desk.items("s") if isinstance(one, UserItem | AssistantItem)]
    assert [one.text for one in said if not getattr(one, "internal", None)] == [
        LONG,
        "say after",
        "after",
    ]


async def test_a_killed_answer_goes_on_when_asked_to_resume(desk: Desk) -> None:
    async with desk.start_long() as child:
        child.process.kill()
        await child.process.wait()
    done = await desk.run("run", "--session", "s", "--recovery", "resume", *desk.here())
    assert done.returncode == 0
    assert "word19999" in done.stdout
    said = [one for one in await desk.items("s") if isinstance(one, UserItem | AssistantItem)]
    assert [one.text for one in said if not getattr(one, "internal", None)] == [
        LONG,
        LONG.removeprefix("say "),
    ]


async def test_a_killed_command_is_not_run_again(desk: Desk) -> None:
    """Its effect is one line; a second one would be the same effect done twice."""
    text = "run echo done >> count; cat fifo then say all of it"
    os.mkfifo(desk.workspace / "fifo")
    policy = ("--isolation", "none", "--policy", "full_access")
    async with desk.start("run", text, "--session", "s", *policy, *desk.here()) as child:
        # Opening the other end waits for `cat`, so the line before it has been written.
        writer = await trio.to_thread.run_sync(os.open, desk.workspace / "fifo", os.O_WRONLY)
        child.process.kill()
        await child.process.wait()
    os.close(writer)  # and so ends the orphaned `cat`
    done = await desk.run(
        "run", "--session", "s", "--recovery", "resume", *policy, *desk.here()
    )
    assert done.returncode == 0
    assert "all of it" in done.stdout
    assert (desk.workspace / "count").read_text() == "done\n"
    items = await desk.items("s")
    assert len([one for one in items if isinstance(one, ToolCallItem)]) == 1
    (output,) = [one for one in items if isinstance(one, ToolOutputItem)]
    assert output.is_error
