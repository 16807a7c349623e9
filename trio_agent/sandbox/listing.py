"""Walking a workspace: what is there, without what ``.gitignore`` files leave out.

Links are shown and never followed. Every directory is opened relative to its
parent's descriptor, so a walk cannot leave the workspace. Synchronous.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import attrs

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import FileEntry, Listing
from trio_agent.sandbox.files import Place, WorkspaceFiles, kind_of

IGNORE_FILE = ".gitignore"
ALWAYS_IGNORED = ".git"
MAX_IGNORE_BYTES = 262_144
MAX_DEPTH = 64
"""Directories below one another that a walk enters; each holds a descriptor open."""

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """One entry of a walk, with the descriptor of its directory while it is looked at."""

    entry: FileEntry
    directory: int
    name: str


class IgnoreRules:
    """The ``.gitignore`` files from the root down to one directory; the last match wins."""

    def __init__(self, specs: tuple[tuple[str, GitIgnoreSpec], ...] = ()) -> None:
        self._specs = specs

    def below(self, directory: int, path: str) -> IgnoreRules:
        """Return these rules and those of the directory at *path*, if it has any."""
        try:
            descriptor = os.open(IGNORE_FILE, _READ, dir_fd=directory)
        except OSError:  # missing, a link, or not ours to read: no rules
            return self
        try:
            data = os.read(descriptor, MAX_IGNORE_BYTES)
        except OSError:  # a directory of that name
            return self
        finally:
            os.close(descriptor)
        try:
            from pathspec import GitIgnoreSpec  # noqa: PLC0415  (an extra, imported when used)
        except ImportError:
            raise SandboxError(
                f"{IGNORE_FILE} cannot be respected without pathspec:"
                " pip install 'trio-agent[tools]'"
            ) from None
        lines = data.decode(errors="replace").splitlines()
        prefix = "" if path == "." else f"{path}/"
        with contextlib.suppress(ValueError):  # a pattern that git would not understand either
            return IgnoreRules((*self._specs, (prefix, GitIgnoreSpec.from_lines(lines))))
        return self

    def ignores(self, path: str, *, directory: bool) -> bool:
        """Say whether *path* is left out."""
        name = path.rpartition("/")[2]
        if name == ALWAYS_IGNORED:
            return True
        for prefix, spec in reversed(self._specs):
            inner = path[len(prefix) :] + ("/" if directory else "")
            verdict = spec.check_file(inner).include
            if verdict is not None:
                return verdict
        return False


def walk(files: WorkspaceFiles, path: str, *, depth: int = MAX_DEPTH) -> Generator[Found]:
    """Yield everything under *path*, in order, at most *depth* directories deep.

    A file as *path* yields that file, ignored or not. Directories that cannot be
    read are yielded and not entered.

    Raises:
        SandboxError: If *path* is outside or missing.
    """
    with files.opened_root() as root, files.place(path) as place:
        if place.status is None:
            raise SandboxError(f"{path}: no such file or directory")
        if place.kind != "directory":
            entry = FileEntry(
                path=place.path, kind=kind_of(place.status.st_mode), size=place.status.st_size
            )
            yield Found(entry=entry, directory=place.directory, name=place.name)
            return
        rules = _rules_above(root, place)
        yield from _enter(place.directory, place.path, rules, min(depth, MAX_DEPTH))


def _rules_above(root: int, place: Place) -> IgnoreRules:
    """Collect the rules of the directories between the root and *place*, without its own."""
    rules = IgnoreRules()
    opened: list[int] = []
    current, path = root, "."
    try:
        for name in place.trail:
            rules = rules.below(current, path)
            current = os.open(name, _DIRECTORY, dir_fd=current)
            opened.append(current)
            path = name if path == "." else f"{path}/{name}"
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return rules


def _enter(directory: int, path: str, rules: IgnoreRules, depth: int) -> Generator[Found]:
    rules = rules.below(directory, path)
    prefix = "" if path == "." else f"{path}/"
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:  # gone meanwhile
            continue
        kind = kind_of(status.st_mode)
        here = prefix + name
        if rules.ignores(here, directory=kind == "directory"):
            continue
        size = status.st_size if kind == "file" else 0
        entry = FileEntry(path=here, kind=kind, size=size)
        yield Found(entry=entry, directory=directory, name=name)
        if kind == "directory" and depth > 1:
            try:
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
            except OSError:  # no right to, or swapped for a link
                continue
            try:
                yield from _enter(inner, here, rules, depth - 1)
            finally:
                os.close(inner)


def list_directory(files: WorkspaceFiles, path: str, *, depth: int, limit: int) -> Listing:
    """Return at most *limit* entries under *path*; see `walk`."""
    entries: list[FileEntry] = []
    with contextlib.closing(walk(files, path, depth=depth)) as found:
        for item in found:
            if len(entries) == limit:
                return Listing(entries=tuple(entries), truncated=True)
            entries.append(item.entry)
    return Listing(entries=tuple(entries))
