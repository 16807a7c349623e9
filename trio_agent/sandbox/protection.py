"""Paths that a command must not change, because the user's own programs run what they say.

Inside bubblewrap such a path is a read-only mount. A mount needs something to
stand on, so what does not exist yet is made, empty, while commands run, and removed
after the last of them. Such a placeholder is known by its size and time of
change, so that what a killed engine left behind is removed the next time.

A directory that holds a protected path is mounted onto itself, writable: a mount
point cannot be renamed, or a command could move ``.git`` away and put another there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Generator, Iterator
from typing import Final, Literal, TypeAlias

import attrs

from trio_agent.errors import SandboxError
from trio_agent.sandbox.files import WorkspaceFiles

PROTECTED_PATHS: Final = (
    ".git/hooks/",
    ".git/config",
    ".git/config.worktree",
    ".gitconfig",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".zlogout",
    ".envrc",
)
"""Relative to the workspace; a slash at the end says that the path is a directory."""

SWEPT_PATHS: Final = (".git/commondir",)
"""Files that git obeys and that no placeholder can stand for, since git would obey that too.
One that a command has made is removed when the command ends."""

_MARK_NS: Final = 981_173_106_000_000_000
"""The time of change that tells a placeholder from a file of the user's."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

MountKind: TypeAlias = Literal["read-only", "writable"]


@attrs.frozen(kw_only=True)
class Mount:
    """One path of the workspace that is mounted onto itself, and how."""

    path: str
    kind: MountKind
    placeholder: bool = False


class Protection:
    """The protected paths of one workspace, held in place while commands run.

    Safe for several threads, and for several processes on one workspace: a shared
    lock on the workspace's directory tells that commands run, and who gets the
    exclusive one removes the placeholders.
    """

    def __init__(self, files: WorkspaceFiles, paths: tuple[str, ...]) -> None:
        self._files = files
        self._paths = paths
        self._lock = threading.Lock()
        self._users = 0
        self._root: int | None = None
        self._placeholders: set[str] = set()
        self._absent: set[str] = set()

    @property
    def users(self) -> int:
        """How many commands hold the protection."""
        return self._users

    def acquire(self) -> tuple[Mount, ...]:
        """Return the mounts for one command, in order, and keep what they stand on. Blocks.

        Raises:
            SandboxError: If a protected path cannot be protected: it is a link, or a
                placeholder cannot be made. Nothing is held then.
        """
        with self._lock:
            if self._root is None:
                with self._files.opened_root() as root:
                    self._root = os.dup(root)
                fcntl.flock(self._root, fcntl.LOCK_SH)
                self._absent = {
                    path for path in SWEPT_PATHS if _status_of(self._root, path) is None
                }
            self._users += 1
            try:
                mounts: dict[str, Mount] = {}
                for path in self._paths:
                    for mount in self._mounts_for(self._root, path):
                        mounts.setdefault(mount.path, mount)
            except BaseException:
                self._release()
                raise
            return tuple(sorted(mounts.values(), key=lambda mount: mount.path.count("/")))

    def release(self) -> None:
        """Give up what one `acquire` took; the last one removes the placeholders. Blocks."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._users -= 1
        if self._users or self._root is None:
            return
        root, self._root = self._root, None
        try:
            for path in self._absent:
                _remove(root, path, only_placeholder=False)
            try:
                fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another process runs commands here and will remove them
                return
            for path in self._placeholders:
                _remove(root, path, only_placeholder=True)
        finally:
            self._placeholders.clear()
            os.close(root)

    def _mounts_for(self, root: int, path: str) -> Iterator[Mount]:
        parts = [part for part in path.split("/") if part]
        with contextlib.ExitStack() as stack:
            directory = root
            for depth, name in enumerate(parts, 1):
                here = "/".join(parts[:depth])
                last = depth == len(parts)
                wants_directory = not last or path.endswith("/")
                status = _entry(directory, name)
                if status is None:
                    _make_placeholder(directory, name, here, wants_directory=wants_directory)
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    raise SandboxError(
                        f"{here} is protected from commands and is a symbolic link, which"
                        " cannot be protected: make it a real file, or name the paths that you"
                        " want with LocalSandbox(protected=...)"
                    )
                placeholder = _is_placeholder(directory, name, status)
                if placeholder:
                    self._placeholders.add(here)
                if last or placeholder or not stat.S_ISDIR(status.st_mode):
                    yield Mount(path=here, kind="read-only", placeholder=placeholder)
                    return
                yield Mount(path=here, kind="writable")
                directory = os.open(name, _DIRECTORY, dir_fd=directory)
                stack.callback(os.close, directory)


def _entry(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _status_of(root: int, path: str) -> os.stat_result | None:
    """Look at *path* without following links; None if it, or its directory, is not there."""
    with _parent(root, path) as found:
        return None if found is None else _entry(*found)


@contextlib.contextmanager
def _parent(root: int, path: str) -> Generator[tuple[int, str] | None]:
    *parents, name = path.split("/")
    with contextlib.ExitStack() as stack:
        directory = root
        for parent in parents:
            try:
                directory = os.open(parent, _DIRECTORY, dir_fd=directory)
            except OSError:
                yield None
                return
            stack.callback(os.close, directory)
        yield directory, name


def _make_placeholder(directory: int, name: str, path: str, *, wants_directory: bool) -> None:
    try:
        if wants_directory:
            os.mkdir(name, 0o755, dir_fd=directory)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o444, dir_fd=directory))
        os.utime(name, ns=(_MARK_NS, _MARK_NS), dir_fd=directory, follow_symlinks=False)
    except FileExistsError:  # another process was quicker; the caller looks at what it made
        return
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            return
        raise SandboxError(
            f"{path} cannot be protected from commands: {exc.strerror}; the workspace must be"
            " writable for the user that runs the agent"
        ) from exc


def _is_placeholder(directory: int, name: str, status: os.stat_result) -> bool:
    if status.st_mtime_ns != _MARK_NS:
        return False
    if stat.S_ISREG(status.st_mode):
        return status.st_size == 0
    if stat.S_ISDIR(status.st_mode):
        descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
            return not os.listdir(descriptor)  # noqa: PTH208  (no path: a descriptor)
        finally:
            os.close(descriptor)
    return False


def _remove(root: int, path: str, *, only_placeholder: bool) -> None:
    with _parent(root, path) as found, contextlib.suppress(OSError):
        if found is None:
            return
        directory, name = found
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if only_placeholder and not _is_placeholder(directory, name, status):
            return
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)
