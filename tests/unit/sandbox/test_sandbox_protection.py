"""Protected paths hold against commands, also before they exist, and leave no trace."""


# ruff: noqa: PTH208
# (a test looks from outside, and may block)

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trio_agent.errors import SandboxError
from trio_agent.sandbox.files import WorkspaceFiles
from trio_agent.sandbox.local import LocalSandbox
from trio_agent.sandbox.policy import Permissions
from trio_agent.sandbox.protection import PROTECTED_PATHS, Protection
from trio_agent.sandbox.sandbox import Sandbox

MUTATE = Permissions(mutate=True)


def git_init(workspace: Path) -> None:
    subprocess.run(["git", "init", "-q", str(workspace)], check=True)


def snapshot(workspace: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(workspace)): path.read_bytes() if path.is_file() else b"/"
        for path in sorted(workspace.rglob("*"))
    }


def bind(backend: LocalSandbox, **rights: bool) -> Any:
    return Sandbox(backend).bind(
        session_id="s", call_id="c", permissions=Permissions(mutate=True, **rights)
    )


ATTACKS = (
    "echo evil > .git/hooks/pre-commit",
    "echo evil >> .git/config",
    "git config core.fsmonitor evil",
    "rm -rf .git/hooks; mkdir .git/hooks; echo evil > .git/hooks/pre-commit",
    "mv .git x; mkdir -p .git/hooks; cp -r x/* .git/; echo evil > .git/hooks/pre-commit",
    "ln -sfn /tmp .git/hooks",
    "echo evil > .bashrc",
    "ln -s /tmp/x .zshrc",
    "mkdir .profile",
    "rm -f .bashrc .profile; echo evil > .profile",
    "umount .git/hooks; echo evil > .git/hooks/x",
    "mkdir fake; echo ../fake > .git/commondir",
)


@pytest.mark.parametrize("with_git", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_attacks_change_nothing_protected(
    isolated: Any, world: Any, attack: Any, with_git: Any
) -> None:
    if with_git:
        git_init(world.inside)
    before = snapshot(world.inside)
    await bind(isolated).run(attack)
    after = snapshot(world.inside)

    touched = {path for path in after if after[path] != before.get(path)}
    assert not {path for path in touched if path.startswith((".git", ".b", ".z", ".p"))}


@pytest.mark.parametrize("attack", ATTACKS[:2])
async def test_the_attacks_work_without_the_protection(world: Any, attack: Any) -> None:
    git_init(world.inside)
    before = snapshot(world.inside)
    await bind(LocalSandbox(world.inside, protected=())).run(attack)
    assert snapshot(world.inside) != before


async def test_git_works_and_sees_no_placeholder(isolated: Any, world: Any) -> None:
    git_init(world.inside)
    (world.inside / "a.txt").write_text("a")
    output = await bind(isolated).run(
        "git -c user.name=x -c user.email=x@y add a.txt &&"
        " git -c user.name=x -c user.email=x@y commit -qm first && git status --porcelain"
    )
    assert output.exit_code == 0, output.stderr.text
    assert output.stdout.text == ""
    assert not [name for name in os.listdir(world.inside) if name not in (".git", "a.txt")]


async def test_placeholders_stay_until_the_last_command_ends(world: Any) -> None:
    files = WorkspaceFiles(world.inside)
    first, second = (Protection(files, PROTECTED_PATHS) for _ in range(2))
    first.acquire()
    second.acquire()
    second.release()
    assert (world.inside / ".bashrc").exists()
    first.release()
    assert os.listdir(world.inside) == []


async def test_placeholders_of_a_killed_engine_are_removed(world: Any) -> None:
    files = WorkspaceFiles(world.inside)
    killed = Protection(files, PROTECTED_PATHS)
    killed.acquire()
    os.close(killed._root)  # type: ignore[arg-type]  # what the kernel does with a dead process
    again = Protection(files, PROTECTED_PATHS)
    again.acquire()
    again.release()
    assert os.listdir(world.inside) == []


async def test_what_the_user_writes_into_a_placeholder_is_kept(world: Any) -> None:
    protection = Protection(WorkspaceFiles(world.inside), PROTECTED_PATHS)
    protection.acquire()
    (world.inside / ".bashrc").chmod(0o644)
    (world.inside / ".bashrc").write_text("mine")
    protection.release()
    assert os.listdir(world.inside) == [".bashrc"]


async def test_a_link_cannot_be_protected_and_nothing_runs(isolated: Any, world: Any) -> None:
    (world.inside / ".bashrc").symlink_to(world.secret)
    with pytest.raises(SandboxError):
        await bind(isolated).run("touch ran")
    assert os.listdir(world.inside) == [".bashrc"]


async def test_a_git_file_is_protected_itself(isolated: Any, world: Any) -> None:
    (world.inside / ".git").write_text("gitdir: elsewhere\n")
    await bind(isolated).run("echo evil > .git; rm -f .git; mkdir .git")
    assert (world.inside / ".git").read_text() == "gitdir: elsewhere\n"
