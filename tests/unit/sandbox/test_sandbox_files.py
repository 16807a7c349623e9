"""Files are confined, whatever a path says and whatever happens to it meanwhile."""


# ruff: noqa: PTH123, PTH208, PTH211
# (a test looks from outside, and may block)

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import ConfigError, SandboxError
from trio_agent.sandbox.base import (
    ANY_CONTENT,
    MAX_BINARY_FILE_BYTES,
    MAX_TEXT_FILE_BYTES,
    FileChange,
)
from trio_agent.sandbox.files import TEMPORARY_PREFIX, WorkspaceFiles
from trio_agent.sandbox.local import LocalSandbox

ESCAPES = (
    "link/secret.txt",
    "link/new.txt",
    "link/sub/new.txt",
    "link/../x",
    "../outside/secret.txt",
    "../outside/new.txt",
    "dir/../../outside/secret.txt",
    "chain/secret.txt",
    "upward/secret.txt",
    "file-link",
    "new-link",
    "dir/deep/secret.txt",
    "..",
    "link",
)


def write(path: str, data: bytes) -> FileChange:
    return FileChange(path=path, before=ANY_CONTENT, after=data)


@pytest.fixture
def files(world: Any) -> Any:
    inside = world.inside
    (inside / "dir").mkdir()
    (inside / "dir" / "a.txt").write_text("a")
    (inside / "link").symlink_to(world.outside)
    (inside / "chain").symlink_to("link")
    (inside / "upward").symlink_to("../outside")
    (inside / "file-link").symlink_to(world.secret)
    (inside / "new-link").symlink_to(world.outside / "new.txt")
    (inside / "dir" / "deep").symlink_to("../../outside")
    (inside / "in").symlink_to(inside / "dir")
    (inside / "in-relative").symlink_to("dir/../dir")
    return WorkspaceFiles(inside)


class TestEscapes:
    @pytest.mark.parametrize("path", [*ESCAPES, "absolute"])
    def test_reading_is_refused(self, files: Any, world: Any, path: Any) -> None:
        path = str(world.secret) if path == "absolute" else path
        with pytest.raises(SandboxError):
            files.read(path)

    @pytest.mark.parametrize("path", [*ESCAPES, "absolute"])
    def test_writing_is_refused_and_nothing_outside_changes(
        self, files: Any, world: Any, path: Any
    ) -> None:
        path = str(world.outside / "new.txt") if path == "absolute" else path
        before = world.tree()
        with pytest.raises(SandboxError):
            files.change([write(path, b"evil")])
        assert world.tree() == before

    @pytest.mark.parametrize("path", ["link/secret.txt", "chain/secret.txt", "file-link"])
    def test_the_paths_do_lead_out_without_the_check(
        self, files: Any, world: Any, path: Any
    ) -> None:
        """What a comparison of path texts would let through."""
        assert os.path.normpath(world.inside / path).startswith(str(world.inside))
        assert (world.inside / path).read_text() == "secret"

    @pytest.mark.parametrize("path", ["in/a.txt", "in-relative/a.txt", "./dir//a.txt"])
    def test_links_that_stay_inside_work(self, files: Any, path: Any) -> None:
        assert files.read(path) == b"a"

    def test_writing_through_an_inner_link_changes_its_target(
        self, files: Any, world: Any
    ) -> None:
        (world.inside / "alias").symlink_to("dir/a.txt")
        files.change([write("alias", b"b"), write("in/new/n.txt", b"n")])

        assert (world.inside / "dir" / "a.txt").read_bytes() == b"b"
        assert (world.inside / "dir" / "new" / "n.txt").read_bytes() == b"n"
        assert (world.inside / "alias").is_symlink()

    def test_absolute_paths_inside_are_taken(self, files: Any, world: Any) -> None:
        assert files.read(str(world.inside / "dir" / "a.txt")) == b"a"

    def test_an_absolute_path_that_only_begins_like_the_workspace_is_outside(
        self, files: Any, world: Any
    ) -> None:
        sibling = world.inside.with_name("ws-sibling")
        sibling.mkdir()
        (sibling / "x").write_text("x")
        with pytest.raises(SandboxError):
            files.read(str(sibling / "x"))

    def test_the_workspace_may_be_reached_through_a_link(
        self, files: Any, world: Any, tmp_path: Any
    ) -> None:
        (tmp_path / "door").symlink_to(world.inside)
        through = WorkspaceFiles(tmp_path / "door")

        assert through.read("dir/a.txt") == b"a"
        assert through.read(str(tmp_path / "door" / "dir" / "a.txt")) == b"a"

    def test_a_loop_of_links_is_refused(self, files: Any, world: Any) -> None:
        (world.inside / "loop").symlink_to("loop")
        with pytest.raises(SandboxError):
            files.read("loop")

    def test_a_replaced_workspace_is_refused(self, files: Any, world: Any) -> None:
        world.inside.rename(world.inside.with_name("moved"))
        world.outside.rename(world.inside)
        with pytest.raises(SandboxError):
            files.read("secret.txt")

    @given(
        st.lists(
            st.sampled_from(
                ["..", ".", "dir", "deep", "link", "chain", "in", "a.txt", "new", "", "upward"]
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_no_mixture_of_components_leads_out(self, components: Any) -> None:
        import shutil
        import tempfile

        base = Path(tempfile.mkdtemp())
        try:
            inside, outside = base / "ws", base / "outside"
            (inside / "dir").mkdir(parents=True)
            outside.mkdir()
            (outside / "a.txt").write_text("secret")
            (inside / "dir" / "a.txt").write_text("a")
            (inside / "dir" / "deep").symlink_to("../../outside")
            (inside / "link").symlink_to(outside)
            (inside / "chain").symlink_to("link")
            (inside / "upward").symlink_to("..")
            (inside / "in").symlink_to(inside / "dir")
            files = WorkspaceFiles(inside)
            path = "/".join(components).lstrip("/") or "."
            with contextlib.suppress(SandboxError):
                assert files.read(path) != b"secret"
            with contextlib.suppress(SandboxError):
                files.change([write(path, b"evil")])
            assert [entry.name for entry in outside.iterdir()] == ["a.txt"]
            assert (outside / "a.txt").read_text() == "secret"
            assert {entry.name for entry in base.iterdir()} == {"ws", "outside"}
        finally:
            shutil.rmtree(base)


class TestRaces:
    """Another process swaps a directory for a link to the outside, 10,000 times.

    A thread would have to share the interpreter's lock, and lose most of the races.
    """

    SWAPPER = """
import ctypes, os, select, sys
inside, outside = sys.argv[1:]
os.chdir(inside)
os.symlink(outside, "y")
swap = ctypes.CDLL(None, use_errno=True).renameat2
swaps = 0
while swaps < 10_000 or not select.select([0], [], [], 0)[0]:
    for _ in range(100):
        if swap(-100, b"x", -100, b"y", 2):
            sys.exit(os.strerror(ctypes.get_errno()))
    swaps += 100
"""

    def run(self, world: Any, attempt: Any, *, attempts: Any = 2_000) -> int:
        """Try until something gets out, *attempts* times at most; return how often it did."""
        (world.inside / "x").mkdir()
        (world.inside / "x" / "secret.txt").write_text("mine")
        arguments = [str(world.inside), str(world.outside)]
        command = [sys.executable, "-I", "-S", "-c", self.SWAPPER, *arguments]
        escapes = 0
        with subprocess.Popen(command, stdin=subprocess.PIPE) as swapper:
            while not os.path.lexists(world.inside / "y"):
                assert swapper.poll() is None
            for _ in range(attempts):
                if attempt():
                    escapes += 1
                    break
            swapper.communicate()
        assert swapper.returncode == 0
        return escapes

    def test_reads_never_see_the_outside(self, world: Any) -> None:
        files = WorkspaceFiles(world.inside)

        def attempt() -> bool:
            try:
                return files.read("x/secret.txt") != b"mine"
            except SandboxError:
                return False

        assert self.run(world, attempt) == 0

    def test_writes_never_land_outside(self, world: Any) -> None:
        files = WorkspaceFiles(world.inside)

        def attempt() -> bool:
            with contextlib.suppress(SandboxError):
                files.change([write("x/secret.txt", b"mine")])
            return False

        before = world.tree()
        self.run(world, attempt)
        assert world.tree() == before

    def test_a_check_of_the_real_path_loses_the_race(self, world: Any) -> None:
        """The naive way: resolve, compare, open. The same attempts get out."""
        root = os.path.realpath(world.inside)

        def attempt() -> bool:
            path = f"{root}/x/secret.txt"
            try:
                if not os.path.realpath(path).startswith(f"{root}/"):
                    return False
                with open(path) as file:
                    return file.read() != "mine"
            except OSError:
                return False

        assert self.run(world, attempt, attempts=1_000_000) == 1


class TestKinds:
    @pytest.mark.parametrize("name", ["fifo", "device", "socket", "directory"])
    def test_what_is_no_regular_file_is_neither_read_nor_replaced(
        self, world: Any, name: Any
    ) -> None:
        import socket

        path = world.inside / name
        server = socket.socket(socket.AF_UNIX)
        match name:
            case "fifo":
                os.mkfifo(path)
            case "device":
                os.symlink("/dev/zero", path)
                if os.geteuid() == 0:
                    path.unlink()
                    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
            case "socket":
                server.bind(str(path))
            case _:
                path.mkdir()
        files = WorkspaceFiles(world.inside)
        with pytest.raises(SandboxError):
            files.read(name)
        with pytest.raises(SandboxError):
            files.change([write(name, b"x")])
        assert name in os.listdir(world.inside)
        server.close()

    def test_another_name_of_a_file_outside_is_not_written_through(self, world: Any) -> None:
        os.link(world.secret, world.inside / "hard")
        WorkspaceFiles(world.inside).change([write("hard", b"mine")])

        assert world.secret.read_text() == "secret"
        assert (world.inside / "hard").read_text() == "mine"

    def test_writing_in_place_would_go_through_the_other_name(self, world: Any) -> None:
        """The naive way, to show that the test above can fail."""
        os.link(world.secret, world.inside / "hard")
        (world.inside / "hard").write_text("mine")
        assert world.secret.read_text() == "mine"


class TestWriting:
    def test_mode_and_bytes_are_kept(self, world: Any) -> None:
        path = world.inside / "run.sh"
        path.write_bytes(b"old")
        path.chmod(0o751)
        WorkspaceFiles(world.inside).change([write("run.sh", b"one\r\ntwo\xff")])

        assert path.read_bytes() == b"one\r\ntwo\xff"
        assert stat.S_IMODE(path.stat().st_mode) == 0o751

    def test_a_new_file_follows_the_umask(self, world: Any) -> None:
        old = os.umask(0o027)
        try:
            WorkspaceFiles(world.inside).change([write("new", b"")])
        finally:
            os.umask(old)
        assert stat.S_IMODE((world.inside / "new").stat().st_mode) == 0o640

    def test_readers_see_the_old_or_the_new_content(self, world: Any) -> None:
        files = WorkspaceFiles(world.inside)
        contents = [bytes([65 + n]) * 200_000 for n in range(2)]
        files.change([write("f", contents[0])])
        stop = threading.Event()
        seen: set[bytes] = set()

        def read() -> None:
            while not stop.is_set():
                seen.add((world.inside / "f").read_bytes())

        thread = threading.Thread(target=read)
        thread.start()
        for n in range(30):
            files.change([write("f", contents[n % 2])])
        stop.set()
        thread.join()

        assert seen <= set(contents)

    def test_a_change_that_expects_other_content_is_refused_whole(self, world: Any) -> None:
        (world.inside / "a").write_text("a")
        (world.inside / "b").write_text("other")
        with pytest.raises(SandboxError):
            WorkspaceFiles(world.inside).change(
                [
                    FileChange(path="a", before=b"a", after=b"A"),
                    FileChange(path="c", before=None, after=b"C"),
                    FileChange(path="b", before=b"b", after=b"B"),
                ]
            )
        assert (world.inside / "a").read_text() == "a"
        assert sorted(os.listdir(world.inside)) == ["a", "b"]

    def test_a_file_that_must_not_exist_is_not_overwritten(self, world: Any) -> None:
        (world.inside / "a").write_text("a")
        with pytest.raises(SandboxError):
            WorkspaceFiles(world.inside).change([FileChange(path="a", before=None, after=b"")])
        assert (world.inside / "a").read_text() == "a"

    def test_deleting_and_moving_leave_no_trace(self, world: Any) -> None:
        (world.inside / "a").write_text("a")
        (world.inside / "a").chmod(0o700)
        WorkspaceFiles(world.inside).change(
            [
                FileChange(path="a", before=b"a", after=None),
                FileChange(path="sub/b", before=None, after=b"b", mode_from="a"),
            ]
        )
        assert os.listdir(world.inside) == ["sub"]
        assert os.listdir(world.inside / "sub") == ["b"]
        assert stat.S_IMODE((world.inside / "sub" / "b").stat().st_mode) == 0o700

    def test_one_file_under_two_names_is_refused(self, world: Any) -> None:
        (world.inside / "a").write_text("a")
        (world.inside / "b").symlink_to("a")
        with pytest.raises(SandboxError):
            WorkspaceFiles(world.inside).change([write("a", b"1"), write("b", b"2")])
        assert (world.inside / "a").read_text() == "a"

    def test_no_temporary_file_is_left_when_the_directory_is_read_only(
        self, world: Any
    ) -> None:
        files = WorkspaceFiles(world.inside)
        with pytest.raises(SandboxError):
            files.change([write("ok", b"x"), write("n" * 300, b"x")])
        assert [n for n in os.listdir(world.inside) if n.startswith(TEMPORARY_PREFIX)] == []
        assert os.listdir(world.inside) == []

    @pytest.mark.parametrize(
        "name",
        ["a b", ".hidden", "-rf", "--help", "ünï", "日本", "a\nb", "e\u0301", "$(x)", "a.b.c"],
    )
    def test_any_name_works(self, world: Any, name: Any) -> None:
        files = WorkspaceFiles(world.inside)
        files.change([write(name, b"x")])

        assert files.read(name) == b"x"
        assert os.listdir(world.inside) == [name]

    @pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 5_000])
    def test_impossible_names_are_refused(self, world: Any, name: Any) -> None:
        with pytest.raises(SandboxError):
            WorkspaceFiles(world.inside).read(name)


class TestLimits:
    async def test_text_ends_at_one_mebibyte(self, world: Any, bare: Any) -> None:
        (world.inside / "full").write_bytes(b"x" * MAX_TEXT_FILE_BYTES)
        (world.inside / "more").write_bytes(b"x" * (MAX_TEXT_FILE_BYTES + 1))

        assert len(await bare.read_text("full")) == MAX_TEXT_FILE_BYTES
        with pytest.raises(SandboxError):
            await bare.read_text("more")

    async def test_bytes_end_at_fifty_mebibytes(self, world: Any, bare: Any) -> None:
        with open(world.inside / "huge", "wb") as file:  # noqa: ASYNC230
            file.truncate(MAX_BINARY_FILE_BYTES + 1)
        with pytest.raises(SandboxError):
            await bare.read_bytes("huge", limit=2 * MAX_BINARY_FILE_BYTES)
        with pytest.raises(SandboxError):
            await bare.read_window("huge")

    async def test_a_file_that_claims_no_size_is_bounded_too(self, world: Any) -> None:
        proc = LocalSandbox("/proc/self", isolation="none", protected=())
        assert b"Name" in await proc.read_bytes("status")
        with pytest.raises(SandboxError):
            await proc.read_bytes("status", limit=10)

    async def test_undecodable_bytes_are_shown(self, world: Any, bare: Any) -> None:
        (world.inside / "f").write_bytes(b"ok\xff\xfe\x00")
        assert await bare.read_text("f") == "ok\\xff\\xfe\x00"


class TestProtected:
    @pytest.mark.parametrize(
        "path",
        [
            ".git/config",
            ".git/hooks/pre-commit",
            ".GIT/Config",
            ".bashrc",
            "sub/../.bashrc",
            "alias",
            "to-git/hooks/x",
        ],
    )
    async def test_tools_do_not_change_them(self, world: Any, bare: Any, path: Any) -> None:
        (world.inside / ".git" / "hooks").mkdir(parents=True)
        (world.inside / "sub").mkdir()
        (world.inside / ".GIT").mkdir()
        (world.inside / "alias").symlink_to(".git/config")
        (world.inside / "to-git").symlink_to(".git")
        with pytest.raises(SandboxError):
            await bare.change([write(path, b"evil")])

    async def test_a_refused_change_makes_no_directory(self, world: Any, bare: Any) -> None:
        with pytest.raises(SandboxError):
            await bare.change([write(".git/hooks/deep/x", b"evil")])
        assert os.listdir(world.inside) == []

    async def test_full_access_changes_them_and_reading_is_free(
        self, world: Any, bare: Any
    ) -> None:
        await bare.change([write(".bashrc", b"x")], full_access=True)
        assert await bare.read_text(".bashrc") == "x"

    async def test_names_that_only_begin_like_them_are_free(
        self, world: Any, bare: Any
    ) -> None:
        await bare.change([write(".bashrc.d/x", b"x"), write(".git/config2", b"x")])


class TestConstruction:
    def test_a_workspace_must_be_a_directory(self, world: Any) -> None:
        for path in (world.secret, world.inside / "missing"):
            with pytest.raises(ConfigError):
                LocalSandbox(path)

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "", "/"])
    def test_protected_paths_lie_in_the_workspace(self, world: Any, path: Any) -> None:
        with pytest.raises(ConfigError):
            LocalSandbox(world.inside, protected=[path])

    def test_an_unknown_isolation_is_refused(self, world: Any) -> None:
        with pytest.raises(ConfigError):
            LocalSandbox(world.inside, isolation="docker")  # type: ignore[arg-type]

    def test_the_root_directory_cannot_be_isolated(self) -> None:
        with pytest.raises(ConfigError):
            LocalSandbox("/")

    def test_nothing_is_held_open(self, world: Any) -> None:
        before = len(os.listdir("/proc/self/fd"))
        files = WorkspaceFiles(world.inside)
        for _ in range(50):
            files.change([write("a/b/c", b"x")])
            files.read("a/b/c")
            with pytest.raises(SandboxError):
                files.read("a/b/missing")
            with pytest.raises(SandboxError):
                files.change([write("a/b", b"x")])
        assert len(os.listdir("/proc/self/fd")) == before
