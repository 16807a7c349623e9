"""Who may write a session: claims, the processes that hold them, and whether those still live.

Rules:

1.  A claim names its owner, a row a process, and an incarnation that grows with every
    claim of the file and is never given twice. Saves compare the incarnation.
2.  Whether an owner lives is a question to the kernel if it runs under this one, in
    this process namespace: the process must exist, with the same start time, and
    be no zombie. A stopped process lives.
3.  Of any other owner only its renewal counter is known. A challenger watches it, on its
    own monotonic clock, for `LEASE_SECONDS`; if it stands still, the owner is dead.
    No wall clock decides anything.
4.  What this process itself holds, it knows: `held_here`. A session that was left
    while the file could not be written is free for whoever opens it here again.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import Struct

from trio_agent.errors import SessionOwnedError
from trio_agent.store.base import Lease

RENEW_SECONDS: Final = 5.0
"""How often a process that guards sessions raises its counter."""

CHECK_SECONDS: Final = 1.0
"""How often it looks whether somebody took one of them."""

LEASE_SECONDS: Final = 15.0
"""How long a counter may stand still before its owner counts as dead."""

Claim: TypeAlias = tuple[int, int, int]
"""Device and number of the file, and an incarnation in it."""

held_here: Final[set[Claim]] = set()
"""The claims of this process that somebody still uses."""


class Process(Struct, frozen=True):
    """One process, as others can recognise it."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """Return the process that calls."""
        pid = os.getpid()
        return cls(socket.gethostname(), _kernel(), pid, start_time(pid) or "")

    def lives(self) -> bool | None:
        """Ask the kernel; None if it is not ours to ask."""
        if not self.boot or self.boot != _kernel() or not self.started:
            return None
        return start_time(self.pid) == self.started


def _kernel() -> str:
    """Name this boot of this kernel and our process namespace; empty without ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """Return when *pid* started, in the kernel's ticks; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, started = fields[0], fields[19]
    return None if state in {b"Z", b"X"} else started.decode()


class Holder(Struct, frozen=True):
    """Who holds a session now."""

    session_id: str
    incarnation: int
    owner: int
    name: str
    since_ms: int
    process: Process
    renewals: int

    def lives(self, connection: sqlite3.Connection) -> bool | None:
        """Whether whoever holds it still does; None if nobody can be asked."""
        lives = self.process.lives()
        if lives and self.process.pid == os.getpid():
            return claim_of(connection, self.incarnation) in held_here
        return lives

    def refusal(self) -> SessionOwnedError:
        """Return the error for somebody who wants the session, too."""
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC)
        return SessionOwnedError(
            f"session {self.session_id!r} is held by {self.name}: process {self.process.pid}"
            f" on {self.process.host}, since {since:%Y-%m-%d %H:%M:%S} UTC; close it there,"
            " or open it with takeover=True"
        )


def holder(connection: sqlite3.Connection, key: str) -> Holder | None:
    """Return who holds a session, dead or alive; None if nobody does."""
    found = connection.execute(
        "SELECT claim.key, incarnation, owner.id, name, claim.since_ms, host, boot, pid,"
        " started, renewals FROM claim JOIN owner ON owner.id=claim.owner WHERE claim.key=?",
        (key,),
    ).fetchone()
    if found is None:
        return None
    session_id, incarnation, owner, name, since, *process, renewals = found
    return Holder(session_id, incarnation, owner, name, since, Process(*process), renewals)


def claim_of(connection: sqlite3.Connection, incarnation: int) -> Claim:
    """Return what tells a claim of this file from those of all others.

    Raises:
        OSError: If the file is gone.
    """
    (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
    file = Path(path).stat()
    return file.st_dev, file.st_ino, incarnation


def enrol(connection: sqlite3.Connection, process: Process, now_ms: int) -> int:
    """Give *process* a row of its own, and forget those known to be dead."""
    for owner, *columns in connection.execute(
        "SELECT id, host, boot, pid, started FROM owner"
    ).fetchall():
        if Process(*columns).lives() is False:
            dismiss(connection, owner)
    row = (process.host, process.boot, process.pid, process.started, now_ms)
    (owner,) = connection.execute(
        "INSERT INTO owner(host, boot, pid, started, since_ms) VALUES(?,?,?,?,?) RETURNING id",
        row,
    ).fetchone()
    return int(owner)


def enrolled(connection: sqlite3.Connection, owner: int) -> bool:
    """Whether *owner* still has its row."""
    found = connection.execute("SELECT 1 FROM owner WHERE id=?", (owner,)).fetchone()
    return found is not None


def dismiss(connection: sqlite3.Connection, owner: int) -> None:
    """Free everything that *owner* holds, and forget it."""
    connection.execute("UPDATE claim SET owner=NULL WHERE owner=?", (owner,))
    connection.execute("DELETE FROM owner WHERE id=?", (owner,))


def give_back(connection: sqlite3.Connection, key: str, incarnation: int) -> None:
    """Make a session free, if *incarnation* is still the one that holds it."""
    connection.execute(
        "UPDATE claim SET owner=NULL WHERE key=? AND incarnation=?", (key, incarnation)
    )


def held(connection: sqlite3.Connection, owner: int) -> dict[str, int]:
    """Return the sessions that *owner* holds, and their incarnations."""
    found = connection.execute("SELECT key, incarnation FROM claim WHERE owner=?", (owner,))
    return dict(found.fetchall())


def require_free(connection: sqlite3.Connection, key: str) -> None:
    """Refuse to change a session whose owner lives, or might.

    Raises:
        SessionOwnedError: It names the owner.
    """
    found = holder(connection, key)
    if found is not None and found.lives(connection) is not False:
        raise found.refusal()


class Claims:
    """The claims of one store.

    What a method says is true at once for this process, and for others once it is
    committed. All but `drop` are called in the store's writing thread.

    Args:
        now_ms: The wall clock, for the times that a refusal tells.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.owner: int | None = None
        self._now_ms = now_ms
        self._mine: dict[tuple[str, int], Claim] = {}
        self._newest: tuple[str, int] | None = None

    def take(
        self,
        connection: sqlite3.Connection,
        session_id: str,
        name: str,
        takeover: bool,
        dead: Holder | None,
    ) -> Lease | Holder:
        """Take a session, or return the holder of whom nobody knows whether it lives.

        Raises:
            SessionOwnedError: If it lives.
        """
        self._newest = None
        found = holder(connection, session_id)
        if found is not None and not takeover and found != dead:
            lives = found.lives(connection)
            if lives:
                raise found.refusal()
            if lives is None:
                return found
        now = self._now_ms()
        if self.owner is None or not enrolled(connection, self.owner):
            self.owner = enrol(connection, Process.this(), now)
        (incarnation,) = connection.execute(
            "UPDATE counter SET value=value+1 WHERE name='incarnation' RETURNING value"
        ).fetchone()
        connection.execute(
            "INSERT OR REPLACE INTO claim VALUES(?,?,?,?,?)",
            (session_id, incarnation, self.owner, name, now),
        )
        claim = claim_of(connection, incarnation)
        self._newest = session_id, incarnation
        self._mine[self._newest] = claim
        held_here.add(claim)
        return Lease(session_id=session_id, incarnation=incarnation, owner=name)

    def undo(self) -> None:
        """Forget what the last `take` took: its transaction failed."""
        if self._newest is not None:
            self.drop(*self._newest)

    def drop(self, session_id: str, incarnation: int) -> None:
        """Hold a session no longer, whatever becomes of the file."""
        claim = self._mine.pop((session_id, incarnation), None)
        if claim is not None:
            held_here.discard(claim)

    def drop_all(self) -> None:
        """Hold nothing any longer."""
        held_here.difference_update(self._mine.values())
        self._mine.clear()

    def renew(self, connection: sqlite3.Connection) -> None:
        """Raise the counter that challengers on other machines watch.

        Give back what could not be given back before.
        """
        assert self.owner is not None
        connection.execute("UPDATE owner SET renewals=renewals+1 WHERE id=?", (self.owner,))
        for session_id, incarnation in held(connection, self.owner).items():
            if (session_id, incarnation) not in self._mine:
                give_back(connection, session_id, incarnation)

    def dismiss(self, connection: sqlite3.Connection) -> None:
        """Give everything back, and leave the owners."""
        assert self.owner is not None
        dismiss(connection, self.owner)
