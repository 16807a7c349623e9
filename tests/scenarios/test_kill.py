"""A process that works on a session is killed at random moments, over and over.

Each time another one opens the session. Nothing that was accepted is lost or doubled,
no effect happens twice, and no model is ever sent a broken history.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import trio

from tests.scenarios.children import POINTS, Tale
from tests.scenarios.story import journal, stored
from trio_agent import AgentConfig, SqliteCheckpoint, UserInput, create_agent, tool
from trio_agent.model.base import Emit, ModelCall, ModelOutput, ModelRequest
from trio_agent.protocol.events import SubmissionAccepted
from trio_agent.protocol.items import UserItem
from trio_agent.state.machine import Phase, phase_of
from trio_agent.state.recovery import Recovery
from trio_agent.testing.crashes import in_child
from trio_agent.testing.invariants import JournalCheck, check_checkpoint
from trio_agent.testing.models import StrictModel

SESSION = "s"


class Asks:
    """Asks for two calls whenever a user has spoken, and then says that it is done."""

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        for word in ("on ", "my ", "way "):
            await emit(word)
        if isinstance(request.items[-1], UserItem):
            count = sum(isinstance(item, UserItem) for item in request.items)
            asked = [
                ModelCall(name="count", arguments=f'{{"key": "{count}.{n}"}}') for n in range(2)
            ]
            return ModelOutput.answer("on my way ", *asked)
        return ModelOutput.answer("on my way done")


def configure(store: SqliteCheckpoint, directory: Path, policy: Recovery) -> AgentConfig:
    @tool(exclusive=False)
    async def count(key: str) -> str:
        """Leave a line, as a payment would."""
        with (directory / "effects").open("a") as file:
            file.write(f"{key}\n")
        await trio.sleep(0.002)
        return "counted"

    return AgentConfig(
        model=StrictModel(Asks()),
        checkpoints=store,
        session_id=SESSION,
        tools=(count,),
        recovery=policy,
    )


async def work(directory: Path, policy: Recovery, first: int, pipe: int) -> None:
    """Submit messages for ever, and note each receipt once it is there.

    Write a line to *pipe* when the session is open and at each receipt.
    """
    with (directory / "receipts").open("a", buffering=1) as receipts:
        async with SqliteCheckpoint(directory / "db") as store:
            config = configure(store, directory, policy)
            assert isinstance(config.model, StrictModel)
            async with create_agent(config) as agent:
                os.write(pipe, b"open\n")
                for number in range(first, first + 10_000):
                    op = UserInput(text=f"message {number}", delivery="queue")
                    await agent.submit(op, id=f"m{number}")
                    receipts.write(f"m{number}\n")
                    os.write(pipe, b"receipt\n")
                    await agent.wait_idle()
                    assert not config.model.refusals, config.model.refusals


MOMENTS = ("its birth", "its opening", "its first receipt")
"""What a life reaches before its random time is counted: on a busy machine a life that is
timed from its birth may never get as far as to open the session."""

PATIENCE_SECONDS = 120
"""After that a life hangs."""


def kill(moment: str, seconds: float, life: Callable[[int], None], faults: Path) -> str:
    """Run *life* in a child, kill it that long after *moment*, and return how it ended.

    What ended it before that is left in *faults*.
    """
    reader, writer = os.pipe()
    pid = forked()
    if pid == 0:
        try:
            life(writer)
        except BaseException:  # noqa: ASYNC103  # the process ends here
            faults.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            reached = all(heard(pipe) for _ in range(MOMENTS.index(moment)))
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        more = len(pipe.readall().split())
    fault = faults.read_text(encoding="utf-8") if faults.exists() else ""
    assert os.WIFSIGNALED(status), f"it ended before it was killed: {fault}"
    assert reached, f"it hung before {moment}"
    return f"killed {seconds * 1000:.1f} ms after {moment}, when it had said {more} lines more"


def heard(pipe: FileIO) -> bool:
    """Wait for a line, and return whether there was one."""
    ready, _, _ = select.select([pipe], [], [], PATIENCE_SECONDS)
    return bool(ready) and bool(pipe.readline())


def forked() -> int:
    with warnings.catch_warnings():
        # idle threads of earlier event loops hold no lock that the child needs
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


async def finish(directory: Path) -> list[str]:
    """Open once more, resubmit the first message of all, say a last one, and end in order."""
    async with SqliteCheckpoint(directory / "db") as store:
        config = configure(store, directory, Recovery.RESUME)
        async with create_agent(config) as agent:
            again = UserInput(text="message 0", delivery="queue")
            receipt = await agent.submit(again, id="m0")
            await agent.submit(UserInput(text="the last", delivery="queue"), id="last")
            await agent.wait_idle()
        assert isinstance(config.model, StrictModel)
        assert not config.model.refusals, config.model.refusals
        checkpoint = await stored(store)
        assert phase_of(checkpoint) is Phase.IDLE
        assert not checkpoint.queue
        check_checkpoint(checkpoint)
        events = await journal(store)
        page = await store.execution_page(SESSION, limit=100_000)
        assert await store.verify() == ()
    check = JournalCheck()
    check.read(events)
    check.settle(checkpoint, list(reversed(page.executions)))
    accepted = [one.submission_id for one in events if isinstance(one.msg, SubmissionAccepted)]
    said = [item.submission_id for item in checkpoint.context if isinstance(item, UserItem)]
    return [receipt.status, *map(str, accepted), "|", *map(str, said)]


@pytest.mark.parametrize("policy", list(Recovery))
def test_nothing_is_lost_or_doubled_wherever_a_process_is_killed(
    tmp_path: Path, policy: Recovery
) -> None:
    chance = random.Random(len(policy.value))  # the same moments each time
    tale, first = Tale(), 0
    receipts, faults = tmp_path / "receipts", tmp_path / "faults"
    with tale.on_failure(tmp_path / "db"):
        for _ in range(POINTS // 2):
            moment = chance.choice(MOMENTS)
            seconds = chance.uniform(0, 0.4 if moment == "its birth" else 0.2)

            def life(pipe: int, number: int = first) -> None:
                trio.run(work, tmp_path, policy, number, pipe)

            how = kill(moment, seconds, life, faults)
            told = receipts.read_text(encoding="utf-8").split() if receipts.exists() else []
            tale.tell(f"{how}: m{first} was the first, {told[-1:]} the last with a receipt")
            first = 1 + max((int(one[1:]) for one in told), default=-1)
        status, *found = in_child(lambda: trio.run(finish, tmp_path))
        accepted, delivered = found[: found.index("|")], found[found.index("|") + 1 :]
        promised = receipts.read_text(encoding="utf-8").split()
        assert promised
        assert status == "duplicate"
        assert set(promised) - set(accepted) == set(), "a promise was lost"
        assert repeated(delivered) == {}, "a message was delivered twice"
        assert set(accepted) == set(delivered), "an accepted message was lost"
        effects = (tmp_path / "effects").read_text(encoding="utf-8").split()
        assert len(effects) >= 2, "the last message has its effects in any case"
        assert repeated(effects) == {}, "an effect happened twice"


def repeated(names: list[str]) -> dict[str, int]:
    return {name: count for name, count in Counter(names).items() if count > 1}
