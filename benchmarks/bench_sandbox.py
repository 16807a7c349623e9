"""What a command costs to start, confined and bare; what reading and patching 1 MiB costs.

    python -m benchmarks.bench_sandbox [RUNS]

Prints the median and the 90th percentile of each, in milliseconds. A command's cost is
that of ``true``: all but nothing is the command itself. The first command of a sandbox
also pays for the self-test and is shown alone.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from trio_agent.sandbox import LocalSandbox, Permissions, Sandbox
from trio_agent.tools.base import ToolContext
from trio_agent.tools.files import apply_patch, edit_file, read_file, search

LINES = 16_384
LINE = "x" * 62


async def measure(name: str, runs: int, act: Callable[[], Awaitable[object]]) -> None:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        await act()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    print(f"{name:<34} {statistics.median(times):8.2f} {times[int(0.9 * (runs - 1))]:8.2f}")


async def main(runs: int) -> None:
    print(f"{'milliseconds':<34} {'median':>8} {'p90':>8}")
    with tempfile.TemporaryDirectory() as directory:
        workspace = Path(directory, "ws")
        workspace.mkdir()  # noqa: ASYNC240

        async def bare_process() -> None:
            subprocess.run(["/bin/bash", "-c", "true"], check=True)  # noqa: ASYNC221
            await trio.lowlevel.checkpoint()

        await measure("a bare process", runs, bare_process)
        for isolation in ("none", "bubblewrap"):
            sandbox = Sandbox(LocalSandbox(workspace, isolation=isolation))
            async with sandbox.session("s"):
                bound = sandbox.bind(
                    session_id="s", call_id="c", permissions=Permissions(mutate=True)
                )
                command = functools.partial(bound.run, "true")
                await measure(f"the first command, {isolation}", 1, command)
                await measure(f"a command, {isolation}", runs, command)

        sandbox = Sandbox(LocalSandbox(workspace))
        permissions = Permissions(mutate=True)
        bound = sandbox.bind(session_id="s", call_id="c", permissions=permissions)
        (workspace / "long").write_text(
            "".join(f"{n:>5} {LINE}\n" for n in range(LINES))[: 1 << 20]
        )
        context = ToolContext(
            session_id="s",
            turn_id="t",
            call_id="c",
            idempotency_key="k",
            workspace=workspace,
            sandbox=bound,
        )
        turn = iter(range(1_000_000))
        await measure("read 1 MiB whole", runs, lambda: bound.read_text("long"))
        arguments = {"path": "long", "offset": LINES - 3_000}
        await measure(
            "read_file near the end of 1 MiB", runs, lambda: read_file.call(arguments, context)
        )

        def edit() -> Awaitable[object]:
            n = next(turn)
            old, new = (f"{LINES // 2:>5} {LINE[:-1]}" + "xy"[(n + k) % 2] for k in range(2))
            return edit_file.call({"path": "long", "old": old, "new": new}, context)

        def patch() -> Awaitable[object]:
            n = next(turn)
            old, new = (
                f"{LINES // 2 + 9:>5} {LINE[:-1]}" + "xy"[(n + k) % 2] for k in range(2)
            )
            body = f"*** Begin Patch\n*** Update File: long\n@@\n-{old}\n+{new}\n*** End Patch"
            return apply_patch.call({"patch": body}, context)

        await measure("edit_file in 1 MiB", runs - runs % 2, edit)
        await measure("apply_patch in 1 MiB", runs - runs % 2, patch)
        query = {"pattern": f"{LINES // 2:>5} "}
        await measure("search 1 MiB", runs, lambda: search.call(query, context))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 50)
