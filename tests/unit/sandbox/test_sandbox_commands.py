"""Commands: what they get, what is kept of them, and that nothing of them is left."""


# ruff: noqa: PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import MAX_COMMAND_BYTES, MAX_STREAM_BYTES
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.policy import ApprovalPolicy, Permissions
from trio_agent.sandbox.process import OUTPUT_GRACE
from trio_agent.sandbox.sandbox import Sandbox

MUTATE = Permissions(mutate=True)
MODES = ("none", "bubblewrap")


def processes_with(marker: str) -> list[int]:
    """All processes of this machine that carry *marker* in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in environment:
                found.append(int(entry.name))
    return found


async def wait_none_left(marker: str) -> None:
    with trio.fail_after(10):  # noqa: ASYNC912
        while processes_with(marker):  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.fixture
def marker() -> Any:
    return f"marker-{uuid.uuid4()}"


@pytest.fixture(params=MODES)
def backend(request: Any, world: Any, marker: Any) -> Any:
    return LocalSandbox(world.inside, isolation=request.param, environment={"MARKER": marker})


@pytest.fixture
async def bound(backend: Any) -> Any:
    sandbox = Sandbox(backend)
    async with sandbox.session("s"):
        yield sandbox.bind(session_id="s", call_id="c", permissions=MUTATE)


class TestOutput:
    async def test_exit_code_and_both_streams(self, bound: Any) -> None:
        output = await bound.run("echo out; echo err >&2; exit 3")

        assert output.exit_code == 3
        assert (output.stdout.text, output.stderr.text) == ("out\n", "err\n")
        assert (output.stdout.missing, output.stdout.file) == (0, None)

    @pytest.mark.parametrize("command", ["-n; echo x", "--help", "  echo x", "echo 'a\nb'"])
    async def test_a_command_is_never_taken_for_an_option(
        self, bound: Any, command: Any
    ) -> None:
        output = await bound.run(command)
        direct = subprocess.run(  # noqa: ASYNC221
            ["/bin/bash", "-c", "--", command], capture_output=True, check=False
        )
        assert output.exit_code == direct.returncode
        assert output.stdout.text.encode() == direct.stdout

    async def test_a_command_killed_by_a_signal_says_so(self, bound: Any) -> None:
        assert (await bound.run("kill -KILL $$")).exit_code in (-9, 128 + 9)

    async def test_it_starts_in_the_workspace_and_reads_nothing(
        self, bound: Any, world: Any
    ) -> None:
        output = await bound.run("pwd; cat; touch made")

        assert output.stdout.text == f"{world.inside}\n"
        assert (world.inside / "made").exists()

    @pytest.mark.parametrize("size", [MAX_STREAM_BYTES, MAX_STREAM_BYTES + 1, 3_000_000])
    async def test_long_output_keeps_both_ends_and_a_file(self, bound: Any, size: Any) -> None:
        program = (
            f"import sys; sys.stdout.write(''.join(chr(97 + n % 26) for n in range({size})))"
        )
        output = (await bound.run(f'/usr/bin/python3 -c "{program}"')).stdout
        whole = "".join(chr(97 + n % 26) for n in range(size))

        if size <= MAX_STREAM_BYTES:
            assert output.text == whole
            assert output.file is None
            return
        assert output.missing == size - MAX_STREAM_BYTES
        assert output.text.startswith(whole[: MAX_STREAM_BYTES // 2])
        assert output.text.endswith(whole[-MAX_STREAM_BYTES // 2 :])
        assert output.file is not None
        pieces: list[str] = []
        byte: Any = 0
        while byte is not None:
            window = await bound.read_window(output.file, byte=byte)
            pieces.append(window.text)
            byte = window.next_byte
        assert "".join(pieces) == whole

    async def test_outputs_go_with_the_session(self, backend: Any) -> None:
        sandbox = Sandbox(backend)
        async with sandbox.session("s"):
            bound = sandbox.bind(session_id="s", call_id="c", permissions=MUTATE)
            output: Any = await bound.run("head -c 100000 /dev/zero")
            with pytest.raises(SandboxError):
                await bound.read_window("@output/../../etc/passwd")
            other = sandbox.bind(session_id="other", call_id="c", permissions=MUTATE)
            with pytest.raises(SandboxError):
                await other.read_window(output.stdout.file)
        with pytest.raises(SandboxError):
            await bound.read_window(output.stdout.file)

    async def test_the_result_does_not_wait_for_a_helper_that_holds_the_pipe(
        self, bound: Any
    ) -> None:
        with trio.fail_after(30):
            output = await bound.run("sleep 300 & echo hi")
        assert output.stdout.text == "hi\n"
        assert OUTPUT_GRACE < 1

    async def test_blank_long_and_impossible_commands_are_refused(self, bound: Any) -> None:
        for command in ("", " \n", "x" * (MAX_COMMAND_BYTES + 1), "a\0b", "\ud800"):
            with pytest.raises(SandboxError):
                await bound.run(command)


class TestEnvironment:
    async def test_no_variable_of_the_engine_is_passed_on(
        self, bound: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        monkeypatch.setenv("ANYTHING_ELSE", "sk-secret")
        monkeypatch.setenv("BASH_ENV", "/tmp/evil")
        monkeypatch.setenv("LD_PRELOAD", "")
        output = await bound.run("env; tr '\\0' '\\n' < /proc/$$/environ")

        assert "sk-secret" not in output.stdout.text
        assert "BASH_ENV" not in output.stdout.text

    async def test_what_the_embedder_names_is_there(self, bound: Any, marker: Any) -> None:
        assert (await bound.run('echo "$MARKER"')).stdout.text == f"{marker}\n"


class TestPermissions:
    async def test_nothing_runs_or_changes_without_the_right(
        self, backend: Any, world: Any
    ) -> None:
        sandbox = Sandbox(backend, ApprovalPolicy.FULL_ACCESS)
        async with sandbox.session("s"):
            bound = sandbox.bind(session_id="s", call_id="c", permissions=Permissions())
            for attempt in (
                lambda: bound.run("touch x"),
                lambda: bound.start("touch x"),
                lambda: bound.write_text("x", "x"),
            ):
                with pytest.raises(SandboxError):
                    await attempt()
        assert os.listdir(world.inside) == []

    @pytest.mark.parametrize("network", [False, True])
    async def test_the_network_is_there_only_if_granted(
        self, isolated: Any, network: Any
    ) -> None:
        bound = Sandbox(isolated).bind(
            session_id="s", call_id="c", permissions=Permissions(mutate=True, network=network)
        )
        output = await bound.run("ls /sys/class/net >/dev/null; cat /proc/net/dev | wc -l")
        alone = int(output.stdout.text) == 3  # two lines of heading, and the loopback

        host = len(Path("/proc/net/dev").read_text().splitlines())  # noqa: ASYNC240
        assert alone is (not network or host == 3)

    async def test_full_access_leaves_the_sandbox(self, isolated: Any, world: Any) -> None:
        def bind(**rights: Any) -> Any:
            return Sandbox(isolated).bind(
                session_id="s", call_id="c", permissions=Permissions(mutate=True, **rights)
            )

        command = f"cat {world.secret}"
        assert (await bind().run(command)).exit_code != 0
        assert (await bind(full_access=True).run(command)).stdout.text == "secret"


class TestNothingIsLeft:
    DAEMONS = (
        "(setsid sleep 300 &) ; (trap '' TERM; sleep 300) & sh -c 'sh -c \"sleep 300\" &' ;"
    )

    async def test_after_the_end(self, bound: Any, marker: Any) -> None:
        if isinstance(bound._backend, LocalSandbox) and bound._backend.isolation == "none":
            command = "sleep 300 & sh -c 'sleep 300 &'"
        else:
            command = self.DAEMONS
        await bound.run(f"{command} echo up")
        await wait_none_left(marker)

    async def test_after_the_time_is_up(self, isolated_marked: Any, marker: Any) -> None:
        output = await isolated_marked.run(f"{self.DAEMONS} echo up; sleep 300", timeout=1)

        assert output.timed_out
        assert output.stdout.text == "up\n"
        await wait_none_left(marker)

    async def test_after_a_cancellation(self, isolated_marked: Any, marker: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(isolated_marked.run, f"{self.DAEMONS} sleep 300")
            with trio.fail_after(10):  # noqa: ASYNC912
                while len(processes_with(marker)) < 5:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        await wait_none_left(marker)

    @pytest.fixture
    async def isolated_marked(self, world: Any, marker: Any) -> Any:
        sandbox = Sandbox(LocalSandbox(world.inside, environment={"MARKER": marker}))
        async with sandbox.session("s"):
            yield sandbox.bind(session_id="s", call_id="c", permissions=MUTATE)

    @pytest.mark.parametrize("mode", MODES)
    async def test_after_the_engine_was_killed(
        self, world: Any, marker: Any, mode: Any
    ) -> None:
        daemon = "(setsid sleep 300 &);" if mode == "bubblewrap" else "(sleep 300 &);"
        engine = textwrap.dedent(f"""
            import trio
            from trio_agent.sandbox import LocalSandbox, Permissions, Sandbox

            async def main():
                sandbox = Sandbox(LocalSandbox({str(world.inside)!r}, isolation={mode!r},
                                               environment={{"MARKER": {marker!r}}}))
                bound = sandbox.bind(session_id="s", call_id="c",
                                     permissions=Permissions(mutate=True))
                await bound.run("{daemon} touch up; sleep 300")

            trio.run(main)
        """)
        path = str(Path(__file__).parents[3])
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", engine], env={**os.environ, "PYTHONPATH": path}
        )
        with trio.fail_after(30):  # noqa: ASYNC912
            while not (world.inside / "up").exists():  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert processes_with(marker)
        process.send_signal(signal.SIGKILL)
        process.wait()

        await wait_none_left(marker)

    async def test_a_command_outlives_idle_threads(self, bound: Any) -> None:
        """The kernel ties a child to the thread that started it; that one must stay."""
        started = threading.get_ident()
        await trio.to_thread.run_sync(lambda: None)
        output = await bound.run("sleep 0.1; echo alive")

        assert output.stdout.text == "alive\n"
        assert started == threading.get_ident()

    @pytest.mark.parametrize("mode", MODES)
    async def test_nothing_grows_over_200_runs(self, world: Any, mode: Any) -> None:
        def counts() -> tuple[int, int, int]:
            children = Path("/proc/self/task").glob("*/children")
            return (
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                sum(len(path.read_text().split()) for path in children),
            )

        sandbox = Sandbox(LocalSandbox(world.inside, isolation=mode))
        async with sandbox.session("s"):
            bound = sandbox.bind(session_id="s", call_id="c", permissions=MUTATE)
            for _ in range(3):
                await bound.run("true")
            before = counts()
            for number in range(200):
                with trio.move_on_after(0.001 if number % 4 == 0 else 60):
                    await bound.run("true" if number % 3 else "echo x; exit 1")
            after = counts()
        assert all(now <= then for now, then in zip(after, before, strict=True))


class TestRefusals:
    async def test_without_bubblewrap_commands_are_refused(
        self, isolated: Any, world: Any, monkeypatch: Any
    ) -> None:
        empty = world.outside / "bin"
        empty.mkdir()
        monkeypatch.setenv("PATH", str(empty))
        bound = Sandbox(isolated).bind(session_id="s", call_id="c", permissions=MUTATE)
        with pytest.raises(SandboxError):
            await bound.run(f"/usr/bin/touch {world.inside}/ran")
        assert os.listdir(world.inside) == []

    async def test_bubblewrap_from_the_workspace_is_not_trusted(
        self, isolated: Any, world: Any, monkeypatch: Any
    ) -> None:
        fake = world.inside / "bwrap"
        fake.write_text("#!/bin/sh\ntouch ran\n")
        fake.chmod(0o755)
        (world.outside / "bwrap").symlink_to(fake)
        for directory in (world.inside, world.outside):
            monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
            bound = Sandbox(isolated).bind(session_id="s", call_id="c", permissions=MUTATE)
            with pytest.raises(SandboxError):
                await bound.run("true")
        assert not (world.inside / "ran").exists()

    async def test_a_bubblewrap_that_does_not_isolate_is_found_out(
        self, isolated: Any, world: Any, monkeypatch: Any
    ) -> None:
        """It obeys the flags, but for the ones that count."""
        real = shutil.which("bwrap")
        directory = world.outside / "bin"
        directory.mkdir()
        fake = directory / "bwrap"
        fake.write_text(
            "#!/usr/bin/python3 -IS\n"
            "import os, sys\n"
            "flags = os.read(int(sys.argv[2]), 1 << 20)\n"
            "flags = flags.replace(b'--unshare-net\\0', b'').replace(b'--ro-bind\\0/\\0', "
            "b'--bind\\0/\\0')\n"
            "fd = os.memfd_create('flags', 0)\n"
            "os.write(fd, flags); os.lseek(fd, 0, 0)\n"
            f"os.execv({real!r}, [{real!r}, '--args', str(fd), *sys.argv[3:]])\n"
        )
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        bound = Sandbox(isolated).bind(session_id="s", call_id="c", permissions=MUTATE)
        with pytest.raises(SandboxError):
            await bound.run("touch ran")
        assert not (world.inside / "ran").exists()

        monkeypatch.undo()
        assert (await bound.run("touch ran")).exit_code == 0

    async def test_other_systems_refuse_to_isolate(
        self, isolated: Any, world: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        bound = Sandbox(isolated).bind(session_id="s", call_id="c", permissions=MUTATE)
        with pytest.raises(SandboxError):
            await bound.run("touch ran")
        assert os.listdir(world.inside) == []
