"""Files of one directory tree, reached by descriptors so that nothing leads out of it.

Three rules:

1. A path is walked component by component, each opened relative to the
   descriptor of the one before and never through a link. What a check saw and
   what is used are the same descriptor, so a directory that is swapped for a link
   in between makes the operation fail, not escape.
2. Links are resolved by this module, against the stack of open descriptors. One
   that leads outside is refused, also for files that do not exist yet.
3. A file changes by a rename over it in the same directory, so that readers see
   the old or the new content and a link or another name of the old file is never
   written through.

Everything here is synchronous and meant for a worker thread. No descriptor is
kept between two operations: the root is opened again each time and compared with
the device and inode seen at first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path, PurePosixPath

import attrs

from trio_agent.ambient import new_id
from trio_agent.errors import ConfigError, SandboxError
from trio_agent.sandbox.base import (
    ANY_CONTENT,
    MAX_BINARY_FILE_BYTES,
    MAX_TEXT_FILE_BYTES,
    FileChange,
    FileKind,
)

MAX_LINKS = 40
"""Links followed for one path, as the kernel does."""

MAX_PATH_BYTES = 4_096

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

TEMPORARY_PREFIX = ".trio-agent-"
"""What the names of files that are being written begin with."""


@attrs.frozen(kw_only=True, eq=False)
class Place:
    """Where a path ended: an open directory and a name in it that is no link.

    Attributes:
        directory: The descriptor; closed when the walk's context is left.
        name: The last component, ``"."`` for a directory that was walked into.
        trail: All components from the root, links resolved.
        status: What is there, or None.
    """

    directory: int
    name: str
    trail: tuple[str, ...]
    status: os.stat_result | None

    @property
    def path(self) -> str:
        """The place relative to the root, as text."""
        return "/".join(self.trail) or "."

    @property
    def kind(self) -> FileKind | None:
        """What is there, or None."""
        return None if self.status is None else kind_of(self.status.st_mode)


def kind_of(mode: int) -> FileKind:
    """Name what a mode stands for."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


class WorkspaceFiles:
    """The files under one directory; see the rules above.

    Args:
        root: The directory; it may be reached through links, which are resolved now.
        protected: Paths below it that are never changed, nor anything below them.

    Raises:
        ConfigError: If *root* is no directory.
    """

    def __init__(self, root: str | os.PathLike[str], *, protected: Iterable[str] = ()) -> None:
        try:
            given = Path(root).absolute()
            self.root = given.resolve(strict=True)
            status = self.root.stat()
        except (OSError, RuntimeError, ValueError) as exc:
            raise ConfigError(f"workspace {os.fspath(root)!r} cannot be used: {exc}") from exc
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"workspace {os.fspath(root)!r} is not a directory")
        self._identity = (status.st_dev, status.st_ino)
        self._prefixes = (given.parts, self.root.parts)
        self._protected = tuple(
            tuple(part.casefold() for part in PurePosixPath(path).parts) for path in protected
        )

    # --- reading

    def read(self, path: str, *, limit: int = MAX_BINARY_FILE_BYTES) -> bytes:
        """Return the bytes of a regular file.

        Raises:
            SandboxError: If it is outside, missing, not regular or longer than *limit*.
        """
        with self.open(path) as descriptor:
            return _read_all(descriptor, path, limit)

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[int]:
        """Open a regular file for reading and yield its descriptor."""
        with self.place(path) as place:
            descriptor = _open_regular(place, path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    # --- changing

    def change(self, changes: Sequence[FileChange], *, full_access: bool = False) -> None:
        """Make all *changes* or none; see `BoundSandbox.change`.

        All are checked and all new contents are written beside their places
        first; what remains are renames. If one of those fails, the ones before it
        are taken back. Only empty directories that were made on the way may stay.

        Raises:
            SandboxError: If a file is not what its change expects, or cannot be
                written; nothing was changed.
        """
        paths = [change.path for change in changes]
        with contextlib.ExitStack() as stack:
            prepared = [
                stack.enter_context(self._prepare(change, full_access=full_access))
                for change in changes
            ]
            places = [step.place.trail for step in prepared]
            if len(set(places)) != len(places):
                raise SandboxError(f"one file is named twice in one change: {', '.join(paths)}")
            done: list[_Prepared] = []
            try:
                for step in prepared:
                    step.apply()
                    done.append(step)
            except OSError as exc:
                for step in reversed(done):
                    step.take_back()
                raise SandboxError(_words(exc, prepared[len(done)].path)) from exc
            for directory in {step.place.directory for step in prepared}:
                os.fsync(directory)

    @contextlib.contextmanager
    def _prepare(self, change: FileChange, *, full_access: bool) -> Generator[_Prepared]:
        """Check one change, write its new content beside the place, remove it if unused."""
        after = change.after
        check = None if full_access else self.check_unprotected
        with self.place(change.path, create=after is not None, check=check) as place:
            if check is not None:
                check(place.trail)
            if place.kind not in (None, "file"):
                raise SandboxError(f"{change.path}: is a {_noun(place.kind)}, not a file")
            old: bytes | None = None
            model = place.status
            if change.before is not ANY_CONTENT:
                old = None if place.status is None else _read_place(place, change.path)
                if old != change.before:
                    raise SandboxError(
                        f"{change.path}: has changed or appeared meanwhile; read it again"
                    )
            if change.mode_from is not None and model is None:
                with self.place(change.mode_from) as source:
                    model = source.status
            step = _Prepared(path=change.path, place=place, replaces=place.status is not None)
            try:
                if after is not None:
                    step.new = _write_beside(place, after, model, change.path)
                yield step
            finally:
                step.clean_up()

    def check_unprotected(self, place: Sequence[str]) -> None:
        """Refuse a place that is protected, given by its components from the root.

        Raises:
            SandboxError: It says what to do instead.
        """
        trail = tuple(part.casefold() for part in place)
        for protected in self._protected:
            if trail[: len(protected)] == protected:
                raise SandboxError(
                    f"{'/'.join(place)} is protected from changes, because the user's own"
                    " programs run what it says; ask the user to change it"
                )

    # --- walking

    @contextlib.contextmanager
    def opened_root(self) -> Generator[int]:
        """Open the root and check that it is still the directory it was at first.

        Raises:
            SandboxError: If another directory is in its place.
        """
        try:
            descriptor = os.open(self.root, _DIRECTORY)
        except OSError as exc:
            raise SandboxError(f"the workspace {self.root} is gone: {exc.strerror}") from exc
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != self._identity:
                raise SandboxError(f"the workspace {self.root} is another directory by now")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def place(
        self,
        path: str,
        *,
        create: bool = False,
        check: Callable[[Sequence[str]], None] | None = None,
    ) -> Generator[Place]:
        """Walk to *path* and yield where it ends; *create* makes missing directories.

        Before it makes the first, *check* is asked about the whole way.

        Raises:
            SandboxError: If it leads outside, through a file, or through a missing
                directory that is not to be made.
        """
        with self.opened_root() as root:
            stack = [root]
            try:
                yield self._walk(path, stack, create=create, check=check)
            except OSError as exc:
                raise SandboxError(_words(exc, path)) from exc
            finally:
                for descriptor in stack[1:]:
                    os.close(descriptor)

    def _walk(
        self,
        path: str,
        stack: list[int],
        *,
        create: bool,
        check: Callable[[Sequence[str]], None] | None,
    ) -> Place:
        todo = list(reversed(self._components(path, path)))
        trail: list[str] = []
        links = 0
        while todo:
            name = todo.pop()
            if name == "..":
                if not trail:
                    raise _outside(path)
                os.close(stack.pop())
                trail.pop()
                continue
            status = _status(name, stack[-1])
            kind = None if status is None else kind_of(status.st_mode)
            if kind == "link":
                links += 1
                if links > MAX_LINKS:
                    raise SandboxError(f"{path}: more than {MAX_LINKS} links on the way")
                target = os.readlink(name, dir_fd=stack[-1])
                if target.startswith("/"):
                    while trail:
                        os.close(stack.pop())
                        trail.pop()
                todo.extend(reversed(self._components(target, path)))
                continue
            if kind is None and create and todo:
                if check is not None:
                    check((*trail, name, *reversed(todo)))
                with contextlib.suppress(FileExistsError):  # made by someone else: look at it
                    os.mkdir(name, dir_fd=stack[-1])
                kind = "directory"
            if kind == "directory":
                stack.append(os.open(name, _DIRECTORY, dir_fd=stack[-1]))
                trail.append(name)
                continue
            if todo:
                if kind is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            return Place(directory=stack[-1], name=name, trail=(*trail, name), status=status)
        return Place(
            directory=stack[-1], name=".", trail=tuple(trail), status=os.fstat(stack[-1])
        )

    def _components(self, text: str, asked: str) -> list[str]:
        """Split a path or a link's target; an absolute one must begin with the root."""
        try:
            size = len(os.fsencode(text))
        except UnicodeEncodeError:
            raise SandboxError(f"{asked!r}: a path must be valid Unicode") from None
        if "\0" in text or size > MAX_PATH_BYTES:
            raise SandboxError(
                f"a path must have at most {MAX_PATH_BYTES} bytes and no NUL character"
            )
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if not text.startswith("/"):
            return parts
        for prefix in self._prefixes:
            inner = list(prefix[1:])
            if parts[: len(inner)] == inner:
                return parts[len(inner) :]
        raise _outside(asked)


@attrs.define(kw_only=True, eq=False)
class _Prepared:
    """One change that only needs its renames."""

    path: str
    place: Place
    replaces: bool
    new: str | None = None
    old: str | None = None

    def apply(self) -> None:
        """Put the new content in place; keep the old one under a name of its own."""
        at = self.place.directory
        if self.replaces:
            kept = _temporary_name()
            if self.new is None:
                os.rename(self.place.name, kept, src_dir_fd=at, dst_dir_fd=at)
                self.old = kept
                return
            with contextlib.suppress(OSError):  # no hard links here: then nothing to take back
                _link(self.place.name, kept, at)
                self.old = kept
            os.replace(self.new, self.place.name, src_dir_fd=at, dst_dir_fd=at)
        elif self.new is not None:
            # A link fails where a rename would overwrite what has just appeared there.
            try:
                _link(self.new, self.place.name, at)
            except OSError as exc:
                if exc.errno not in _NO_HARD_LINKS:
                    raise
                os.rename(self.new, self.place.name, src_dir_fd=at, dst_dir_fd=at)
            else:
                os.unlink(self.new, dir_fd=at)
        self.new = None

    def take_back(self) -> None:
        """Undo `apply`, as far as the file system still allows it."""
        at = self.place.directory
        with contextlib.suppress(OSError):
            if self.old is not None:
                os.replace(self.old, self.place.name, src_dir_fd=at, dst_dir_fd=at)
                self.old = None
            elif not self.replaces:
                os.unlink(self.place.name, dir_fd=at)

    def clean_up(self) -> None:
        """Remove what was only needed while the change was made."""
        for name in (self.new, self.old):
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.place.directory)


def _link(name: str, other: str, directory: int) -> None:
    os.link(name, other, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{new_id()}.tmp"


def _write_beside(place: Place, data: bytes, model: os.stat_result | None, path: str) -> str:
    """Write *data* to a new file in the place's directory, as durable as a file can be."""
    name = _temporary_name()
    # Without a model the kernel applies the umask; with one the file stays closed to
    # others until it has its permissions.
    mode = 0o666 if model is None else 0o600
    try:
        descriptor = os.open(name, _CREATE, mode, dir_fd=place.directory)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if model is not None:
                own = os.fstat(descriptor)
                if (own.st_uid, own.st_gid) != (model.st_uid, model.st_gid):
                    with contextlib.suppress(OSError):  # only root may; the mode is what counts
                        os.fchown(descriptor, model.st_uid, model.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(model.st_mode))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=place.directory)
        raise SandboxError(_words(exc, path)) from exc
    return name


def _open_regular(place: Place, path: str) -> int:
    # The type is looked at before opening, since opening a device can do something,
    # and again on the descriptor, since the name may mean something else by then.
    if place.status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if place.kind != "file":
        raise SandboxError(f"{path}: is a {_noun(place.kind)}, not a file")
    descriptor = os.open(place.name, _READ, dir_fd=place.directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SandboxError(f"{path}: is not a regular file any more")
    return descriptor


def _read_place(place: Place, path: str) -> bytes:
    descriptor = _open_regular(place, path)
    try:
        return _read_all(descriptor, path, MAX_BINARY_FILE_BYTES)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, path: str, limit: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > limit:
        raise _too_large(path, size, limit)
    pieces: list[bytes] = []
    room = limit + 1
    while room and (piece := os.read(descriptor, min(room, 1 << 20))):
        pieces.append(piece)
        room -= len(piece)
    if not room:
        raise _too_large(path, limit + 1, limit)
    return b"".join(pieces)


def _too_large(path: str, size: int, limit: int) -> SandboxError:
    advice = "; read it in parts" if limit == MAX_TEXT_FILE_BYTES else ""
    return SandboxError(f"{path}: has {size:,} bytes; at most {limit:,} are allowed{advice}")


def _status(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _outside(path: str) -> SandboxError:
    return SandboxError(f"{path}: leads outside the workspace; use a path inside it")


def _noun(kind: FileKind | None) -> str:
    return "device, FIFO or socket" if kind == "other" else str(kind)


def _words(exc: OSError, path: str) -> str:
    match exc.errno:
        case errno.ENOENT:
            return f"{path}: no such file or directory; list_files shows what there is"
        case errno.ENOTDIR:
            return f"{path}: a part of the path is not a directory (any more)"
        case errno.ELOOP:
            return f"{path}: was replaced by a link while it was used"
        case errno.EEXIST:
            return f"{path}: has appeared meanwhile; read it again"
        case errno.ENAMETOOLONG:
            return f"{path}: a name has at most 255 bytes"
        case _:
            return f"{path}: {exc.strerror or exc}"
