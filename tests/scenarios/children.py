"""Processes that are killed at random points, and the tale of them that a failure tells.

A `Nursery` is a process of ours that forks others: for each command of `store_child`
one. It writes down whom it killed when, and how each of them ended, so that a test
that fails says what had happened before.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

CHILD = Path(__file__).with_name("store_child.py")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
POINTS = 200 if DEEP else 20
"""Random points in all; the deep profile takes more."""

REMEMBERED = 30
"""Lines of the tale that a failure shows."""


class Tale:
    """What happened to the processes of one test, line by line."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        """Add one thing that happened."""
        self.lines.append(f"{time.monotonic() - self.begun:9.3f} s: {line}")

    @contextlib.contextmanager
    def on_failure(self, *files: Path) -> Generator[None]:
        """Add the tale, and what lies beside *files*, to whatever a block raises."""
        try:
            yield
        except BaseException as exc:
            left_out = len(self.lines) - REMEMBERED
            if left_out > 0:
                exc.add_note(f"({left_out} earlier lines are left out)")
            for line in self.lines[-REMEMBERED:]:
                exc.add_note(line)
            for file in files:
                for part in sorted(file.parent.glob(f"{file.name}*")):
                    exc.add_note(f"{part}: {part.stat().st_size:,} bytes")
            raise


class Nursery:
    """The process that forks those that are killed."""

    def __init__(self) -> None:
        self.tale = Tale()
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(CHILD.parents[2])},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def write(self, line: str) -> None:
        """Bring a line to whoever reads standard input there."""
        self.input.write(line + "\n")
        self.input.flush()

    def killed(self, pause: float, *command: str, saved: bool = False) -> list[str]:
        """Run *command*, kill it that long after it began, or first *saved*.

        Returns what it said.
        """
        self.write(json.dumps([command]))
        word, pid = self.output.readline().split()
        assert word == "pid"
        said = [self.output.readline()]
        while saved and len(said) == 1 and said[0] == "go\n":
            said.append(self.output.readline())
        time.sleep(pause)  # the random point
        with contextlib.suppress(ProcessLookupError):  # it was done already
            os.kill(int(pid), signal.SIGKILL)
        said += list(iter(self.output.readline, "all ended\n"))
        how = said.pop().strip()
        begun = "its first save" if saved else "its beginning"
        last = said[-1].strip() if said else "nothing"
        self.tale.tell(
            f"{command[0]}: killed {pause * 1000:.1f} ms after {begun}: {how};"
            f" it had said {len(said)} lines, the last: {last}"
        )
        assert how in {f"exit {pid} -9", f"exit {pid} 0"}, self.what_failed()
        assert said.pop(0) == "go\n"
        return said

    def together(self, *commands: Sequence[str]) -> list[str]:
        """Run *commands* at the same time; return all that they said, once all have ended."""
        self.write(json.dumps(commands))
        said = list(iter(self.output.readline, "all ended\n"))
        for line in said:
            if line.startswith("exit"):
                self.tale.tell(line.strip())
        failed = [line for line in said if line.startswith("exit") and line.split()[2] != "0"]
        assert not failed, self.what_failed()
        return said

    def what_failed(self) -> str:
        """Return what processes wrote to standard error."""
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        """Let it end, and check that it did so in order."""
        self.input.close()
        assert self.process.wait() == 0, self.what_failed()
        self.output.close()
        self.errors.close()


@contextlib.contextmanager
def nursery() -> Generator[Nursery]:
    """Hold a nursery for a block."""
    one = Nursery()
    try:
        yield one
    finally:
        one.close()
