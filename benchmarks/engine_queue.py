"""How ops and events travel between tasks, beside a plain trio memory channel.

`events`: the live tail and its readers, beside one channel for each reader. `ops`: the
inbox with its receipts, beside a channel whose items carry an event to answer by. `deltas`:
what a model streams, through the journal of a whole session, beside one channel.

usage: python -m benchmarks.engine_queue
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import outcome
import trio

from benchmarks.workload import median, report
from trio_agent import AgentConfig, ModelOutput, ModelRequest, create_agent
from trio_agent.agent.inbox import AgentSender, Inbox
from trio_agent.agent.readers import Reader, Tail
from trio_agent.ambient import Ambient
from trio_agent.model.base import Emit
from trio_agent.protocol.events import AgentMessageDelta, Event, TurnComplete
from trio_agent.protocol.ops import Op, UserInput
from trio_agent.store import MemoryCheckpoint, SqliteCheckpoint
from trio_agent.store.base import Receipt

ROUNDS = 9
EVENTS = 1_000
"""As many as the tail keeps, or readers would go on from the store."""

OPS = 1_000
DELTAS = 2_000
BUFFER = 64

Contestant = Callable[[], Awaitable[float]]


async def compare(
    name: str, items: int, ours: Contestant, plain: Contestant, **case: int
) -> None:
    ratios: list[float] = []
    rates: list[float] = []
    for number in range(ROUNDS + 1):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            took[which] = await (ours, plain)[which]()
        if number:  # the first round warms up
            ratios.append(took[1] / took[0])
            rates.append(items / took[0])
    report("engine_queue", what=name, **case, of_channel=median(ratios), per_s=median(rates))


def events(count: int) -> list[Event]:
    msg = AgentMessageDelta(turn_id="t", step_id="s", text="twelve signs", phase="final_answer")
    return [Event(sequence=n, recorded_at_ms=1, msg=msg) for n in range(1, count + 1)]


async def follow(readers: int, batch: int) -> None:
    news = events(EVENTS)
    store = MemoryCheckpoint()

    async def ours() -> float:
        tail = Tail()

        async def read() -> None:
            async for _ in Reader(tail, store, "s", 0):
                pass

        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(readers):
                nursery.start_soon(read)
            for at in range(0, EVENTS, batch):
                await trio.lowlevel.checkpoint()  # what was published was written before
                tail.publish(news[at : at + batch])
            tail.end()
        return time.perf_counter() - begun

    async def plain() -> float:
        async def read(channel: trio.MemoryReceiveChannel[Event]) -> None:
            async for _ in channel:
                pass

        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            ends: list[trio.MemorySendChannel[Event]] = []
            for _ in range(readers):
                send, receive = trio.open_memory_channel[Event](BUFFER)
                ends.append(send)
                nursery.start_soon(read, receive)
            for event in news:
                for end in ends:
                    await end.send(event)
            for end in ends:
                end.close()
        return time.perf_counter() - begun

    count = EVENTS * readers
    await compare("events", count, ours, plain, readers=readers, batch=batch)


@attrs.define(eq=False)
class Asked:
    op: Op
    answered: trio.Event = attrs.field(factory=trio.Event)


async def submit(senders: int) -> None:
    op = UserInput(text="hello", delivery="queue")
    receipt = Receipt(submission_id="", status="accepted", sequence=1, digest="")

    async def ours() -> float:
        inbox = Inbox()
        sender = AgentSender(inbox, inbox.send, Ambient())

        async def take() -> None:
            async for envelope in inbox.receive:
                if envelope.take():
                    envelope.answer(outcome.Value(receipt))

        async def ask() -> None:
            for _ in range(OPS // senders):
                await sender.submit(op)

        return await _asked(take, ask, senders, inbox.close)

    async def plain() -> float:
        send, receive = trio.open_memory_channel[Asked](BUFFER)

        async def take() -> None:
            async for asked in receive:
                asked.answered.set()

        async def ask() -> None:
            for _ in range(OPS // senders):
                asked = Asked(op)
                await send.send(asked)
                await asked.answered.wait()

        return await _asked(take, ask, senders, send.close)

    await compare("ops", OPS, ours, plain, senders=senders)


async def _asked(
    take: Callable[[], Awaitable[None]],
    ask: Callable[[], Awaitable[None]],
    senders: int,
    close: Callable[[], None],
) -> float:
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        async with trio.open_nursery() as asking:
            for _ in range(senders):
                asking.start_soon(ask)
        close()
    return time.perf_counter() - begun


class Streaming:
    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:  # noqa: ARG002
        for _ in range(DELTAS):
            await emit("twelve signs")
        return ModelOutput.answer("twelve signs" * DELTAS)


async def stream(store: MemoryCheckpoint | SqliteCheckpoint, *, durable: bool) -> None:
    async def ours() -> float:
        async with create_agent(AgentConfig(model=Streaming(), checkpoints=store)) as agent:
            begun = time.perf_counter()
            await agent.submit(UserInput(text="go", delivery="queue"))
            async for event in agent.events:
                if isinstance(event.msg, TurnComplete):
                    break
            return time.perf_counter() - begun

    async def plain() -> float:
        send, receive = trio.open_memory_channel[Event](BUFFER)

        async def produce() -> None:
            with send:
                for event in events(DELTAS):
                    await send.send(event)

        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
            async for _ in receive:
                pass
        return time.perf_counter() - begun

    await compare("deltas", DELTAS, ours, plain, durable=durable)


async def main() -> None:
    for readers in (1, 10):
        for batch in (1, 8):
            await follow(readers, batch)
    for senders in (1, 8):
        await submit(senders)
    await stream(MemoryCheckpoint(), durable=False)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        async with SqliteCheckpoint(Path(directory, "s.db")) as store:
            await stream(store, durable=True)


if __name__ == "__main__":
    trio.run(main)
