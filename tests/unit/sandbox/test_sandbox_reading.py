"""Windows into files, listings and searches: complete, bounded, and confined."""


# ruff: noqa: PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_agent.errors import SandboxError
from trio_agent.sandbox.base import Match
from trio_agent.sandbox.files import WorkspaceFiles
from trio_agent.sandbox.listing import list_directory
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.search import Query, search_plainly
from trio_agent.sandbox.window import MAX_WINDOW_BYTES, read_window, show


def window(data: bytes, **where: Any) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_window(
            file.fileno(),
            "f",
            line=where.get("line", 1),
            lines=where.get("lines", 2_000),
            byte=where.get("byte"),
        )


PIECES = st.sampled_from(
    [
        b"\n",
        b"a",
        b"\r\n",
        "é".encode(),
        "日本".encode(),
        b"\xff",
        b"\0",
        b"x" * 9_000,
        b"\n" * 50,
    ]
)


class TestWindow:
    @given(st.lists(PIECES, max_size=30).map(b"".join), st.integers(1, 40))
    def test_reading_on_gives_everything_once(self, data: Any, lines: Any) -> None:
        shown = b""
        byte: Any = 0
        while byte is not None:
            part = window(data, byte=byte, lines=lines)
            assert part.size == len(data)
            assert len(part.text.encode()) <= MAX_WINDOW_BYTES + 16
            end = len(data) if part.next_byte is None else part.next_byte
            assert part.text == show(data[byte:end])
            assert part.first_line == 1 + data[:byte].count(b"\n")
            shown += data[byte:end]
            assert part.next_byte is None or part.next_byte > byte
            byte = part.next_byte
        assert shown == data

    @given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=30), st.data())
    def test_lines_are_counted_from_one(self, lines: Any, data: Any) -> None:
        text = "\n".join(lines) + "\n"
        first = data.draw(st.integers(1, len(lines)))
        count = data.draw(st.integers(1, len(lines)))
        part = window(text.encode(), line=first, lines=count)

        wanted = lines[first - 1 : first - 1 + count]
        assert part.text == "".join(f"{line}\n" for line in wanted)
        more = first - 1 + count < len(lines)
        assert part.next_line == (first + count if more else None)

    def test_valid_text_is_never_cut_inside_a_character(self) -> None:
        text = "€" * 30_000
        part = window(text.encode())
        assert part.text == "€" * len(part.text)
        assert part.next_line == 1

    @pytest.mark.parametrize("where", [{"line": 0}, {"line": 9}, {"byte": 99}, {"lines": 0}])
    def test_positions_outside_are_refused(self, where: Any) -> None:
        with pytest.raises(SandboxError):
            window(b"a\nb\n", **where)


@pytest.fixture
def tree(world: Any) -> Any:
    inside = world.inside
    for path, text in {
        "a.txt": "needle\n",
        "src/b.py": "no\nneedle two\nneedle three\n",
        "src/deep/c.py": "x needle\r\n",
        "build/out.txt": "needle\n",
        "src/keep.log": "needle\n",
        "drop.log": "needle\n",
        ".hidden": "needle\n",
        ".git/config": "needle\n",
        "binary": "\0needle\n",
        ".gitignore": "build/\n*.log\n",
        "src/.gitignore": "!keep.log\n",
    }.items():
        target = inside / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
    (inside / "out").symlink_to(world.outside)
    (inside / "-e").write_text("needle\n")
    world.secret.write_text("needle")
    return world


class TestListing:
    def test_it_respects_gitignore_and_enters_no_link(self, tree: Any) -> None:
        listing = list_directory(WorkspaceFiles(tree.inside), ".", depth=9, limit=100)

        assert [(entry.path, entry.kind) for entry in listing.entries] == [
            ("-e", "file"),
            (".gitignore", "file"),
            (".hidden", "file"),
            ("a.txt", "file"),
            ("binary", "file"),
            ("out", "link"),
            ("src", "directory"),
            ("src/.gitignore", "file"),
            ("src/b.py", "file"),
            ("src/deep", "directory"),
            ("src/deep/c.py", "file"),
            ("src/keep.log", "file"),
        ]

    def test_rules_from_above_hold_below(self, tree: Any) -> None:
        listing = list_directory(WorkspaceFiles(tree.inside), "src", depth=1, limit=100)
        assert [entry.path for entry in listing.entries] == [
            "src/.gitignore",
            "src/b.py",
            "src/deep",
            "src/keep.log",
        ]

    def test_it_stops_at_the_limit(self, tree: Any) -> None:
        listing = list_directory(WorkspaceFiles(tree.inside), ".", depth=9, limit=3)
        assert len(listing.entries) == 3
        assert listing.truncated

    @pytest.mark.parametrize("path", ["out", "..", "missing", "/etc"])
    def test_outside_is_refused(self, tree: Any, path: Any) -> None:
        with pytest.raises(SandboxError):
            list_directory(WorkspaceFiles(tree.inside), path, depth=1, limit=9)

    def test_no_descriptor_is_left(self, tree: Any) -> None:
        before = os.listdir("/proc/self/fd")
        for _ in range(20):
            list_directory(WorkspaceFiles(tree.inside), ".", depth=9, limit=2)
        assert os.listdir("/proc/self/fd") == before


FOUND = (
    Match(path="-e", line=1, text="needle"),
    Match(path=".hidden", line=1, text="needle"),
    Match(path="a.txt", line=1, text="needle"),
    Match(path="src/b.py", line=2, text="needle two"),
    Match(path="src/b.py", line=3, text="needle three"),
    Match(path="src/deep/c.py", line=1, text="x needle"),
    Match(path="src/keep.log", line=1, text="needle"),
)


def plainly(world: Any, **query: Any) -> Any:
    return search_plainly(WorkspaceFiles(world.inside), Query(**query), lambda: None)


@pytest.mark.parametrize("isolation", ["none", "bubblewrap"])
class TestSearch:
    async def test_both_ways_find_the_same(self, tree: Any, isolation: Any) -> None:
        sandbox = LocalSandbox(tree.inside, isolation=isolation)
        result = await sandbox.search("needle")

        assert sorted(result.matches, key=lambda match: (match.path, match.line)) == sorted(
            FOUND, key=lambda match: (match.path, match.line)
        )
        assert plainly(tree, pattern="needle").matches == FOUND

    @pytest.mark.parametrize(
        "query",
        [
            {"pattern": "needle", "glob": "*.py"},
            {"pattern": "needle", "path": "src/deep"},
            {"pattern": "needle", "path": "build/out.txt"},
            {"pattern": "-e"},
            {"pattern": "--help"},
            {"pattern": "n..dle"},
            {"pattern": "needle t"},
        ],
    )
    async def test_with_all_kinds_of_queries(
        self, tree: Any, isolation: Any, query: Any
    ) -> None:
        sandbox = LocalSandbox(tree.inside, isolation=isolation)
        found = await sandbox.search(**query)
        assert set(found.matches) == set(plainly(tree, **query).matches)

    async def test_regular_expressions_take_linear_time(
        self, tree: Any, isolation: Any
    ) -> None:
        (tree.inside / "long").write_text("a" * 50_000 + "\n")
        sandbox = LocalSandbox(tree.inside, isolation=isolation)
        assert (await sandbox.search("(a+)+$x", regex=True)).matches == ()
        assert len((await sandbox.search("ne{2}dle t", regex=True)).matches) == 2
        with pytest.raises(SandboxError):
            await sandbox.search("(unclosed", regex=True)

    async def test_enough_is_enough(self, tree: Any, isolation: Any) -> None:
        (tree.inside / "many").write_text("needle\n" * 100_000)
        result = await LocalSandbox(tree.inside, isolation=isolation).search("needle", limit=5)
        assert len(result.matches) == 5
        assert result.truncated

    async def test_without_ripgrep_only_plain_text_is_searched(
        self, tree: Any, isolation: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        sandbox = LocalSandbox(tree.inside, isolation="none")
        assert (await sandbox.search("needle")).matches == FOUND
        with pytest.raises(SandboxError):
            await sandbox.search("needle", regex=True)

    @pytest.mark.parametrize("path", ["out", "..", "/etc", "missing"])
    async def test_outside_is_refused(self, tree: Any, isolation: Any, path: Any) -> None:
        with pytest.raises(SandboxError):
            await LocalSandbox(tree.inside, isolation=isolation).search("needle", path=path)


def test_a_query_is_one_line() -> None:
    for pattern in ("", "a\nb", "a\0"):
        with pytest.raises(SandboxError):
            Query(pattern=pattern)


def test_the_tree_is_what_git_would_list(tree: object) -> None:
    """The expectation above, as git itself sees it."""
    import subprocess

    inside: Path = tree.inside  # type: ignore[attr-defined]
    (inside / ".git" / "config").unlink()
    subprocess.run(["git", "init", "-q", str(inside)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"],
        cwd=inside,
        capture_output=True,
        check=True,
    ).stdout
    files = {name.decode() for name in listed.split(b"\0") if name}
    listing = list_directory(WorkspaceFiles(inside), ".", depth=9, limit=100)
    assert {e.path for e in listing.entries if e.kind in ("file", "link")} == files
