"""Background commands: incremental, owned by one session, and gone with it."""


# (a test looks from outside, and may block)

from __future__ import annotations

from typing import Any

import pytest
import trio

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import MAX_BACKGROUND_COMMANDS
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.policy import Permissions
from trio_agent.sandbox.sandbox import Sandbox

MUTATE = Permissions(mutate=True)


@pytest.fixture(params=["none", "bubblewrap"])
def sandbox(request: Any, world: Any) -> Any:
    return Sandbox(LocalSandbox(world.inside, isolation=request.param))


def bind(sandbox: Any, session_id: Any = "s") -> Any:
    return sandbox.bind(session_id=session_id, call_id="c", permissions=MUTATE)


async def poll_until(bound: Any, command_id: Any, done: Any) -> Any:
    """Poll until *done* says so, and return all output and the last answer."""
    text = ""
    with trio.fail_after(20):
        while True:
            told = await bound.poll(command_id)
            text += told.output.text
            if done(told, text):
                return text, told
            await trio.sleep(0.01)


async def test_polls_are_incremental_and_tell_the_end_once(sandbox: Any, world: Any) -> None:
    async with sandbox.session("s"):
        bound = bind(sandbox)
        command = "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two; exit 5"
        command_id = await bound.start(command)
        first, told = await poll_until(bound, command_id, lambda _, text: "one" in text)
        assert (first, told.status) == ("one\n", "running")

        await bound.write_text("go", "")
        rest, told = await poll_until(
            bound, command_id, lambda told, _: told.status != "running"
        )
        assert (rest, told.status, told.exit_code) == ("two\n", "exited", 5)
        with pytest.raises(SandboxError):
            await bound.poll(command_id)


async def test_stopping_ends_it_and_returns_the_rest(sandbox: Any) -> None:
    async with sandbox.session("s"):
        bound = bind(sandbox)
        command_id = await bound.start("echo up; sleep 300")
        await poll_until(bound, command_id, lambda _, text: "up" in text)
        told = await bound.stop(command_id)
        assert told.status == "stopped"
        with pytest.raises(SandboxError):
            await bound.stop(command_id)


async def test_stopping_an_ended_one_tells_its_true_end(sandbox: Any) -> None:
    async with sandbox.session("s"):
        bound = bind(sandbox)
        command_id = await bound.start("echo done; exit 7")
        commands = sandbox._sessions["s"].commands
        with trio.fail_after(20):
            await commands._commands[command_id].ended.wait()
        told = await bound.stop(command_id)
        assert (told.status, told.exit_code, told.output.text) == ("exited", 7, "done\n")


async def test_another_session_does_not_know_it(sandbox: Any) -> None:
    async with sandbox.session("s"), sandbox.session("other"):
        command_id = await bind(sandbox).start("sleep 300")
        with pytest.raises(SandboxError) as unknown:
            await bind(sandbox, "other").poll("no-such-id")
        with pytest.raises(SandboxError) as foreign:
            await bind(sandbox, "other").stop(command_id)
        assert str(foreign.value).replace(command_id, "") == str(unknown.value).replace(
            "no-such-id", ""
        )
        assert (await bind(sandbox).poll(command_id)).status == "running"


async def test_each_session_has_its_own_cap(sandbox: Any) -> None:
    async with sandbox.session("s"), sandbox.session("other"):
        command_id = ""
        for _ in range(MAX_BACKGROUND_COMMANDS):
            command_id = await bind(sandbox).start("sleep 300")
        with pytest.raises(SandboxError):
            await bind(sandbox).start("sleep 300")
        await bind(sandbox, "other").start("sleep 300")
        await bind(sandbox).stop(command_id)
        await bind(sandbox).start("sleep 300")


@pytest.mark.parametrize("ending", ["plain", "error", "cancelled"])
async def test_leaving_the_session_ends_them_however(
    sandbox: Any, world: Any, ending: Any
) -> None:
    pids: list[int] = []
    # Bare commands promise their process group only.
    bare = sandbox._backend.isolation == "none"

    async def session() -> None:
        async with sandbox.session("s"):
            helper = "sleep 300 &" if bare else "(setsid sleep 300 &);"
            await bind(sandbox).start(f"{helper} echo x > up; exec sleep 300")
            with trio.fail_after(20):  # noqa: ASYNC912
                while not (world.inside / "up").exists():  # noqa: ASYNC110
                    await trio.sleep(0.01)
            pids.extend(children())
            assert pids
            if ending == "error":
                raise KeyError("mine")
            if ending == "cancelled":
                scope.cancel()
                await trio.sleep_forever()

    with trio.CancelScope() as scope:
        if ending == "error":
            with pytest.raises(KeyError, match="mine"):
                await session()
        else:
            await session()
    assert scope.cancelled_caught is (ending == "cancelled")
    assert not set(pids) & set(children())


async def test_what_the_block_raises_beats_a_cancellation(sandbox: Any) -> None:
    """An error is not lost when the session is cancelled while it is being left."""
    with pytest.raises(KeyError), trio.CancelScope() as scope:
        async with sandbox.session("s"):
            await bind(sandbox).start("sleep 300")
            scope.cancel()
            raise KeyError


async def test_a_command_that_cannot_start_is_told_at_once(
    world: Any, monkeypatch: Any
) -> None:
    sandbox = Sandbox(LocalSandbox(world.inside))
    monkeypatch.setenv("PATH", str(world.outside))
    async with sandbox.session("s"):
        with pytest.raises(SandboxError):
            await bind(sandbox).start("true")


async def test_a_cancelled_start_leaves_nothing(sandbox: Any) -> None:
    async with sandbox.session("s"):
        with trio.move_on_after(0):
            await bind(sandbox).start("sleep 300")
        with trio.fail_after(20):  # noqa: ASYNC912
            while children():  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_without_a_session_there_are_none(sandbox: Any) -> None:
    with pytest.raises(SandboxError):
        await bind(sandbox).start("true")


def children() -> list[int]:
    from pathlib import Path

    paths = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text().split()]
