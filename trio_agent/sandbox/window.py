"""Parts of text files that may be long, have huge lines, or hold bytes that are no text."""

from __future__ import annotations

import os

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import MAX_BINARY_FILE_BYTES, TextWindow

MAX_WINDOW_BYTES = 32_768
"""What one window shows: under the bound of a tool's output, with room for notes around it."""

_CHUNK = 1 << 20


def show(data: bytes) -> str:
    r"""Decode *data* as UTF-8 and show every other byte as ``\xNN``."""
    return data.decode(errors="backslashreplace")


def read_window(
    descriptor: int, path: str, *, line: int, lines: int, byte: int | None
) -> TextWindow:
    """Return a part of an open file; see `BoundSandbox.read_window`.

    Raises:
        SandboxError: If the position is not positive or behind the end, or the
            file is too long to page through.
    """
    size = os.fstat(descriptor).st_size
    if size > MAX_BINARY_FILE_BYTES:
        raise SandboxError(
            f"{path}: has {size:,} bytes; at most {MAX_BINARY_FILE_BYTES:,} can be paged"
        )
    if lines < 1:
        raise SandboxError(f"{path}: at least one line must be asked for, not {lines}")
    if byte is None:
        start = _start_of_line(descriptor, path, line)
    elif 0 <= byte < max(size, 1):
        start, line = byte, 1 + _newlines(descriptor, byte)
    else:
        raise SandboxError(f"{path}: has {size:,} bytes; there is no byte {byte:,}")
    data = os.pread(descriptor, MAX_WINDOW_BYTES + 1, start)
    shown, counted = _fit(data, lines)
    end = start + len(shown)
    if end >= size:
        return TextWindow(text=show(shown), first_line=line, size=size)
    return TextWindow(
        text=show(shown),
        first_line=line,
        next_line=line + counted,
        next_byte=end,
        size=size,
    )


def _fit(data: bytes, lines: int) -> tuple[bytes, int]:
    """Cut *data* to *lines* lines and the window, and count the lines that are whole.

    A byte that is no text takes four places when it is shown, so there is a quarter
    of the room then. The cut stands at the end of a line, or inside the only line
    at the end of a character.
    """
    room = MAX_WINDOW_BYTES if _is_text(data) else MAX_WINDOW_BYTES // 4
    piece = data[:room]
    end, counted = -1, 0
    while counted < lines:
        newline = piece.find(b"\n", end + 1)
        if newline < 0:
            break
        end, counted = newline, counted + 1
    else:
        return piece[: end + 1], lines
    if len(data) <= room:  # the end of the file
        return piece, counted
    if end >= 0:
        return piece[: end + 1], counted
    for back in range(1, 4):
        if piece[-back] >= 0xC0:  # the first byte of a character that is cut off
            return piece[:-back], 0
        if piece[-back] < 0x80:
            break
    return piece, 0


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as exc:
        return exc.reason == "unexpected end of data"
    return True


def _start_of_line(descriptor: int, path: str, line: int) -> int:
    if line < 1:
        raise SandboxError(f"{path}: lines are counted from 1, not {line}")
    seen, position = 1, 0
    while seen < line:
        chunk = os.pread(descriptor, _CHUNK, position)
        if not chunk:
            raise SandboxError(f"{path}: has {seen:,} lines; there is no line {line:,}")
        count = chunk.count(b"\n")
        if seen + count < line:
            seen, position = seen + count, position + len(chunk)
            continue
        at = -1
        while seen < line:
            at = chunk.index(b"\n", at + 1)
            seen += 1
        position += at + 1
    return position


def _newlines(descriptor: int, end: int) -> int:
    count, position = 0, 0
    while position < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - position), position)
        if not chunk:
            break
        count += chunk.count(b"\n")
        position += len(chunk)
    return count
