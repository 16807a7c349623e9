"""The terminal: lines that the user types, and whether there is anybody to ask."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import attrs
import trio

_CHUNK = 65_536


def is_interactive() -> bool:
    """Return whether a person can be asked: both input and output are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def shows_colours(stream: TextIO) -> bool:
    """Return whether *stream* is a terminal that wants colours."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


@attrs.define(eq=False)
class Lines:
    """The lines of a file descriptor, read only when somebody asks for one.

    A cancelled `read` takes nothing away: the thread that waits for input lives on
    in *nursery* and what it brings is kept for the next `read`. The thread itself
    cannot be stopped; it ends with the process.
    """

    _nursery: trio.Nursery
    _descriptor: int = 0
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)
    _reading: bool = attrs.field(default=False, init=False)
    _over: bool = attrs.field(default=False, init=False)
    _arrived: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def read(self) -> str | None:
        """Return the next line without its end, or None at the end of the input.

        A checkpoint; for one task at a time.
        """
        await trio.lowlevel.checkpoint()
        while (line := self._take()) is None and not self._over:
            if not self._reading:
                self._reading = True
                self._arrived = trio.Event()
                self._nursery.start_soon(self._fill, name="terminal input")
            await self._arrived.wait()
        return line

    def forget(self) -> None:
        """Drop what was typed ahead: it is no answer to a question not yet asked."""
        self._buffer.clear()
        if sys.platform != "win32" and os.isatty(self._descriptor):
            import termios  # noqa: PLC0415  # POSIX only

            termios.tcflush(self._descriptor, termios.TCIFLUSH)

    def _take(self) -> str | None:
        end = self._buffer.find(b"\n")
        if end < 0 and not (self._over and self._buffer):
            return None
        size = len(self._buffer) if end < 0 else end + 1
        line = bytes(self._buffer[:size])
        del self._buffer[:size]
        return line.decode(errors="replace").rstrip("\r\n")

    async def _fill(self) -> None:
        await trio.lowlevel.checkpoint()
        try:
            data = await trio.to_thread.run_sync(
                os.read, self._descriptor, _CHUNK, abandon_on_cancel=True
            )
        except OSError:
            data = b""  # a terminal that went away is the end of the input
        self._buffer += data
        self._over = not data
        self._reading = False
        self._arrived.set()
