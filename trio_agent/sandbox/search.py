"""Finding lines in a workspace: by ripgrep if there is one, else by reading the files here.

Plain text can be searched either way, with the same result. A regular expression
needs ripgrep: its matching takes linear time, while a pattern from a model could
keep Python's busy for ever in a thread that nothing can end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trio_agent.errors import SandboxError
from trio_agent.protocol.text import cut_end
from trio_agent.sandbox.base import MAX_BINARY_FILE_BYTES, Match, SearchResult
from trio_agent.sandbox.files import WorkspaceFiles
from trio_agent.sandbox.listing import walk

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_LINE_BYTES: Final = 400
"""What is shown of one line."""

_BINARY_PROBE: Final = 8_192
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@attrs.frozen(kw_only=True)
class Query:
    """What to look for, and where."""

    pattern: str
    path: str = "."
    regex: bool = False
    glob: str | None = None
    limit: int = 200

    def __attrs_post_init__(self) -> None:
        if not self.pattern or "\n" in self.pattern or "\0" in self.pattern:
            raise SandboxError("the pattern must be one line of text, and not empty")
        if self.limit < 1:
            raise SandboxError("at least one match must be asked for")


def search_plainly(
    files: WorkspaceFiles, query: Query, check_cancelled: Callable[[], object]
) -> SearchResult:
    """Search file by file, in a worker thread.

    Args:
        files: The workspace.
        query: What to look for; as plain text.
        check_cancelled: Called between files; what it raises ends the search.
    """
    wanted = query.pattern.encode()
    globs = None if query.glob is None else _glob(query.glob)
    matches: list[Match] = []
    with contextlib.closing(walk(files, query.path)) as found:
        for item in found:
            check_cancelled()
            entry = item.entry
            if entry.kind != "file" or entry.size > MAX_BINARY_FILE_BYTES:
                continue
            if globs is not None and not globs.match_file(entry.path):
                continue
            data = _read(item.directory, item.name)
            if wanted not in data or b"\0" in data[:_BINARY_PROBE]:
                continue
            for number, line in enumerate(data.split(b"\n"), 1):
                if wanted in line:
                    if len(matches) == query.limit:
                        return SearchResult(matches=tuple(matches), truncated=True)
                    matches.append(_match(entry.path, number, line))
    return SearchResult(matches=tuple(matches))


def _read(directory: int, name: str) -> bytes:
    try:
        descriptor = os.open(name, _READ, dir_fd=directory)
    except OSError:  # gone, a link by now, or not ours to read
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_BINARY_FILE_BYTES)


def _glob(pattern: str) -> GitIgnoreSpec:
    try:
        from pathspec import GitIgnoreSpec  # noqa: PLC0415  (an extra, imported when used)
    except ImportError:
        raise SandboxError("a glob needs pathspec: pip install 'trio-agent[tools]'") from None
    try:
        return GitIgnoreSpec.from_lines([pattern])
    except ValueError as exc:
        raise SandboxError(f"glob {pattern!r} is not valid: {exc}") from None


def _match(path: str, number: int, line: bytes) -> Match:
    text = line.rstrip(b"\r").decode(errors="replace")
    return Match(path=path, line=number, text=cut_end(text, MAX_LINE_BYTES))


# --- ripgrep


def find_ripgrep(workspace: Path, emptied: Sequence[str]) -> str | None:
    """Return ripgrep's path if it can be run, and the model cannot have written it."""
    found = shutil.which("rg")
    if found is None:
        return None
    real = Path(found).resolve()
    if any(real.is_relative_to(path) for path in (str(workspace), *emptied)):
        return None
    return str(real)


def ripgrep_arguments(query: Query, path: str) -> list[str]:
    """Return ripgrep's arguments for *query* in *path*, which is relative and resolved."""
    return [
        "--no-config",
        "--no-heading",
        "--with-filename",
        "--line-number",
        "--null",
        "--color=never",
        "--no-messages",
        "--hidden",
        "--glob=!.git",
        *(() if query.glob is None else (f"--glob={query.glob}",)),
        "--no-ignore-dot",
        "--no-ignore-exclude",
        "--no-ignore-global",
        "--no-ignore-parent",
        "--no-require-git",
        "--sort=path",
        f"--max-columns={MAX_LINE_BYTES}",
        "--max-columns-preview",
        f"--max-filesize={MAX_BINARY_FILE_BYTES}",
        *(() if query.regex else ("--fixed-strings",)),
        "--regexp",
        query.pattern,
        "--",
        "./" if path == "." else f"./{path}",
    ]


class MatchLines:
    """A `Sink` that turns ripgrep's output into matches and stops it when there are enough."""

    def __init__(self, limit: int, scope: trio.CancelScope) -> None:
        self._limit = limit
        self._scope = scope
        self._rest = b""
        self._matches: list[Match] = []
        self._truncated = False

    async def write(self, data: bytes) -> None:
        """Take the next piece. A checkpoint."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, separator, tail = line.partition(b"\0")
            number, _, text = tail.partition(b":")
            if not separator or not number.isdigit():
                continue
            if len(self._matches) == self._limit:
                self._truncated = True
                self._scope.cancel(reason="enough matches")
                break
            path = os.fsdecode(name).removeprefix("./")
            self._matches.append(_match(path, int(number), text))
        await trio.lowlevel.checkpoint()

    def result(self) -> SearchResult:
        """Return what was found so far."""
        return SearchResult(matches=tuple(self._matches), truncated=self._truncated)
