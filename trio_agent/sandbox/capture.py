"""What is kept of a command's output: head and tail in memory, everything in a file.

The file is made when the output no longer fits, lies in a directory of the session
and goes with it. The model reads it by its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

import trio

from trio_agent.errors import SandboxError
from trio_agent.protocol.text import CUT_NOTICE
from trio_agent.sandbox.base import MAX_STREAM_BYTES, OUTPUT_PREFIX, StreamOutput

MAX_KEPT_BYTES: Final = 33_554_432
"""What a file holds of one stream; more is counted and dropped."""

MAX_KEPT_FILES: Final = 16
"""Files of one session; the oldest goes when another is needed."""


class OutputFiles:
    """The full outputs of one session's commands, in a private temporary directory.

    Nothing is made before the first output needs it. `close` removes everything.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._names: list[str] = []
        self._made = 0
        self._closed = False

    def create(self, stream: str) -> tuple[str, int]:
        """Make a file and return its name and a descriptor to write to. Blocks."""
        if self._closed:
            raise OSError("the session is over")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="trio-agent-output-"))
        self._made += 1
        name = f"{self._made}-{stream}"
        descriptor = os.open(
            self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self._names.append(name)
        while len(self._names) > MAX_KEPT_FILES:
            with contextlib.suppress(OSError):
                (self._directory / self._names.pop(0)).unlink()
        return OUTPUT_PREFIX + name, descriptor

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[int]:
        """Open one of the files for reading and yield its descriptor. Blocks.

        Raises:
            SandboxError: If there is no such output, or not any more.
        """
        name = path.removeprefix(OUTPUT_PREFIX)
        if self._directory is None or name not in self._names:
            raise SandboxError(
                f"{path}: no such output (the newest {MAX_KEPT_FILES} are kept until the"
                " session is left); run the command again"
            )
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove every file. Blocks; more than once does nothing."""
        self._closed = True
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
            self._names.clear()


class Capture:
    """A bounded `Sink`: the first and the last bytes, and all of them in a file if too many.

    Args:
        files: Where the full output goes; without it only its size is kept.
        name: The stream's, part of the file's name.
        limit: Bytes kept in memory.
    """

    def __init__(
        self, files: OutputFiles | None, name: str, *, limit: int = MAX_STREAM_BYTES
    ) -> None:
        self._files = files
        self._name = name
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._written = 0
        self._unkept = 0
        self._path: str | None = None
        self._descriptor: int | None = None
        self._lock = trio.Lock()

    async def write(self, data: bytes) -> None:
        """Take the next bytes. A checkpoint; several tasks may write at a time."""
        async with self._lock:
            fits = self._descriptor is None and self._total + len(data) <= self._limit
            if not fits and self._files is not None and not self._unkept:
                with trio.CancelScope(shield=True):  # a moment: what was read must not get lost
                    await trio.to_thread.run_sync(self._keep, self._files, data)
            elif not fits:
                self._unkept += len(data)
            self._add(data)

    def _add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._limit // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        excess = len(self._tail) - (self._limit - self._limit // 2)
        if excess > 0:
            del self._tail[:excess]

    def _keep(self, files: OutputFiles, data: bytes) -> None:
        """Write *data* to the file, which begins with what was in memory only."""
        view = memoryview(data)
        try:
            if self._descriptor is None:
                self._path, self._descriptor = files.create(self._name)
                view = memoryview(bytes(self._head + self._tail) + data)
            room = MAX_KEPT_BYTES - self._written
            self._unkept += max(0, len(view) - room)
            view = view[:room]
            while view:
                count = os.write(self._descriptor, view)
                self._written += count
                view = view[count:]
        except OSError:  # the disk is full, or the session was left: the command goes on
            self._unkept += len(view)

    def drain(self) -> StreamOutput:
        """Return what came since the last drain and begin anew; the file goes on."""
        output = self.output()
        self._head.clear()
        self._tail.clear()
        self._total = 0
        return output

    def output(self) -> StreamOutput:
        """Return what was kept."""
        missing = self._total - len(self._head) - len(self._tail)
        if not missing:
            return StreamOutput(text=bytes(self._head + self._tail).decode(errors="replace"))
        head, tail = _whole_characters(bytes(self._head), bytes(self._tail))
        missing = self._total - len(head) - len(tail)
        text = (
            head.decode(errors="replace")
            + CUT_NOTICE.format(f"{missing:,}")
            + tail.decode(errors="replace")
        )
        return StreamOutput(text=text, missing=missing, file=self._path, unkept=self._unkept)

    def close(self) -> None:
        """Close the file; it stays readable. Not a checkpoint."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _whole_characters(head: bytes, tail: bytes) -> tuple[bytes, bytes]:
    """Move the two edges of a cut so that neither stands inside a character."""
    for back in range(1, min(4, len(head) + 1)):
        byte = head[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            head = head[:-back] if length > back else head
            break
        if byte < 0x80:
            break
    start = 0
    while start < min(3, len(tail)) and 0x80 <= tail[start] < 0xC0:
        start += 1
    return head, tail[start:]
