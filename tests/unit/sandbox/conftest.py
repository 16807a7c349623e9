"""A workspace with something outside it."""


# ruff: noqa: PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest

from trio_agent.sandbox.local import LocalSandbox


@attrs.frozen
class World:
    """``inside`` is the workspace, ``outside`` holds a file that nothing may reach."""

    inside: Path
    outside: Path

    @property
    def secret(self) -> Path:
        return self.outside / "secret.txt"

    def tree(self) -> dict[str, bytes]:
        """All regular files of the outside."""
        return {
            str(path.relative_to(self.outside)): path.read_bytes()
            for path in sorted(self.outside.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path / "ws", tmp_path / "outside")
    world.inside.mkdir()
    world.outside.mkdir()
    world.secret.write_text("secret")
    return world


@pytest.fixture
def bare(world: World) -> LocalSandbox:
    """Commands run unconfined."""
    return LocalSandbox(world.inside, isolation="none")


@pytest.fixture
def isolated(world: World) -> LocalSandbox:
    """Commands run in bubblewrap."""
    return LocalSandbox(world.inside)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
