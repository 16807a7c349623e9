"""Files that released versions left behind: each opens, tells all it held, and goes on.

There is one file a version of the schema; ``released/make.py`` says how they came to be.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.store.released.make import CUT_OFF, HERE, facts
from trio_agent import AgentConfig, SqliteCheckpoint, create_agent, tool
from trio_agent.protocol.text import Json
from trio_agent.store.schema import MIGRATIONS, prepare
from trio_agent.testing.invariants import check_checkpoint
from trio_agent.testing.models import ScriptedModel, StrictModel
from trio_agent.testing.store_parts import save_turns

VERSIONS = range(1, len(MIGRATIONS) + 1)


def unpacked(version: int, directory: Path) -> Path:
    path = directory / f"version_{version}.db"
    path.write_bytes(gzip.decompress((HERE / f"{path.name}.gz").read_bytes()))
    return path


def told(version: int) -> Json:
    text = (HERE / f"version_{version}.json").read_text(encoding="utf-8")
    return json.loads(text)


def assert_kept(old: Json, new: Json, where: str = "") -> None:
    """All that was told before is told again; later versions may tell more of it."""
    if isinstance(old, dict):
        for key, value in cast("dict[str, Json]", old).items():
            assert_kept(value, new[key], f"{where}/{key}")
    elif isinstance(old, list):
        values = cast("Sequence[Json]", old)
        assert len(new) == len(values), where
        for number, value in enumerate(values):
            assert_kept(value, new[number], f"{where}/{number}")
    else:
        assert new == old, where


def test_each_released_version_has_its_file() -> None:
    assert {path.name for path in HERE.glob("*.gz")} == {f"version_{n}.db.gz" for n in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_old_file_tells_all_that_it_held_and_goes_on(
    tmp_path: Path, version: int
) -> None:
    """Its last process was killed in a tool; the turn is closed by whoever opens it next.

    Mutant: a released step of the schema, or the form of a row, that is changed.
    """
    async with SqliteCheckpoint(unpacked(version, tmp_path)) as store:
        assert await store.verify() == ()
        assert_kept(told(version), await facts(store))
        long = await store.load("long")
        assert long is not None
        after = await save_turns(store, long, 2, first=100)
        assert await store.load("long") == after

        @tool
        async def die() -> str:
            raise AssertionError("entered again")

        model = StrictModel(ScriptedModel("It was not done."))
        config = AgentConfig(model=model, checkpoints=store, session_id=CUT_OFF, tools=(die,))
        async with create_agent(config) as agent:
            result = await agent.run("And?")
        assert (result.outcome, result.text) == ("completed", "It was not done.")
        assert not model.refusals
        turns = (await store.execution_page(CUT_OFF)).executions
        assert [turn.outcome for turn in turns] == ["completed", "aborted"]
        closed = await store.load(CUT_OFF)
        assert closed is not None
        check_checkpoint(closed)
        assert await store.verify() == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_upgraded_file_has_the_form_of_a_fresh_one(tmp_path: Path, version: int) -> None:
    fresh, empty = tmp_path / "fresh.db", tmp_path / "empty.db"
    prepare(fresh)
    prepare(empty, migrations=MIGRATIONS[:version])
    prepare(empty)
    used = unpacked(version, tmp_path)
    prepare(used)
    assert form(empty) == form(used) == form(fresh)


def form(path: Path) -> dict[str, Any]:
    """Return what SQLite understands of a schema, whatever the words that made it."""
    with closing(sqlite3.connect(path)) as connection:

        def ask(pragma: str) -> list[tuple[Any, ...]]:
            return connection.execute(f"PRAGMA {pragma}").fetchall()

        objects = connection.execute("SELECT type, name FROM sqlite_schema ORDER BY name")
        found: dict[str, Any] = {
            name: ask(name)
            for name in ("user_version", "application_id", "auto_vacuum", "journal_mode")
        }
        for kind, name in objects.fetchall():
            if kind == "index":
                found[name] = (kind, ask(f"index_xinfo({name})"), partial(connection, name))
            else:
                # columns and keys by name: a column that was added stands at the end
                columns = sorted(
                    (name, *rest) for _, name, *rest in ask(f"table_xinfo({name})")
                )
                keys = sorted(row[2:] for row in ask(f"foreign_key_list({name})"))
                listed = [row[2:] for row in ask("table_list") if row[1] == name]
                found[name] = (kind, columns, keys, listed)
        return found


def partial(connection: sqlite3.Connection, name: str) -> str | None:
    """Return the condition of a partial index."""
    (sql,) = connection.execute(
        "SELECT sql FROM sqlite_schema WHERE name=?", (name,)
    ).fetchone()
    return None if sql is None else " ".join(sql.partition(" WHERE ")[2].split())
