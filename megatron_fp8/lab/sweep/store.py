"""The runs of a sweep and their curves, in one SQLite file that several sweeps may work on at once.

    about     name, value                       the plan's outline, the version of these tables
    runs      a row each: arm, seed, learning rate, data set; command; state; who runs it, and since when
    points    run, name, step, value            every number that a run logged; NULL is NaN

States, and who changes them:

    waiting -> running     `claim`: one UPDATE in an immediate transaction, so each run is given out once
    running -> waiting     `release`: interrupted; it starts over
    running -> done, failed, or not finite: the run ended itself for a loss or a gradient that was not finite
    failed -> waiting      `retry`

A worker that is killed cannot release its run. So a running run has a beat, the time its worker last wrote; a run
whose worker is of this machine and no longer lives, or whose last beat is LOST seconds old, is given out again. Its
`attempt` then goes up by one, and every write names the attempt that it is of: a worker that was only asleep writes
nothing more.

Journal.  WAL lets a report be made while a sweep writes, but needs all processes on one machine. For a store on a
shared file system, which the tasks of a cluster write to, SQLite's rollback journal: `shared`. File locks must work
there (NFSv4, Lustre with flock, GPFS).
"""

import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...processes import identity, living
from .plan_file import SweepPlan, SweepRun

VERSION = 1
WAITING, RUNNING, DONE, FAILED, NOT_FINITE = "waiting", "running", "done", "failed", "not finite"
STATES = (WAITING, RUNNING, DONE, FAILED, NOT_FINITE)
LOST = 300.0  # seconds without a beat
_BUSY = 60.0  # seconds to wait for another's transaction
_MOMENT = 3.0  # seconds to wait for another to begin or to end its use of a store
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, arm TEXT, seed INTEGER, learning_rate REAL, data TEXT, command TEXT,
    state TEXT DEFAULT 'waiting', attempt INTEGER DEFAULT 0,
    machine TEXT, worker TEXT, process TEXT, code TEXT,
    beat REAL, started REAL, ended REAL, exit_code INTEGER, error TEXT,
    UNIQUE (arm, seed, learning_rate, data)
);
CREATE INDEX by_state ON runs (state);
CREATE TABLE points (
    run INTEGER REFERENCES runs (id), name TEXT, step INTEGER, value REAL, PRIMARY KEY (run, name, step)
) WITHOUT ROWID;
"""


class TakenAway(RuntimeError):
    """This worker was thought dead, and its run given to another."""


@dataclass(frozen=True)
class Row:
    """A run as it stands: columns of the table; times in Unix seconds; `code` is the version that ran."""

    id: int
    arm: str
    seed: int
    learning_rate: float
    data: str
    command: tuple[str, ...]
    state: str
    attempt: int
    machine: str | None
    worker: str | None
    process: str | None
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str | None
    code: str | None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.arm}, seed {self.seed}, learning rate {self.learning_rate:g}, {self.data}"


_COLUMNS = ", ".join(Row.__dataclass_fields__)


class Store:
    """A store; raises UserError of one line for a file that is none.

    Args:
        path: the file.
        create: make it where it is not there.
        shared: processes of several machines will use it, one that there is already included.
    """

    def __init__(self, path: str | Path, create: bool = False, shared: bool = False):
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise UserError(f"{path}: no such store; `megatron-fp8 lab sweep PLAN --store {path}` makes it")
        if not self.path.absolute().parent.is_dir():
            raise UserError(f"{path}: no such folder; make it, or name another file")
        try:
            self._db = sqlite3.connect(self.path, timeout=_BUSY, isolation_level=None)
            with ExitStack() as on_error:
                on_error.callback(self._db.close)
                self._open(create, shared)
                on_error.pop_all()
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: {error}; give a file that `lab sweep` made, or a new one") from None

    def _open(self, create: bool, shared: bool) -> None:
        new = create and self._empty()
        if new or shared:  # the journal's kind is a property of the file
            self._set_journal("DELETE" if shared else "WAL")
        if new:
            with self._transaction():
                if self._empty():  # still: two sweeps may begin at once
                    for statement in filter(str.strip, _TABLES.split(";")):
                        self._db.execute(statement)
                    self._put("version", VERSION)
        version = self._get("version")
        if version != VERSION:
            raise UserError(f"{self.path}: tables of version {version}, not {VERSION}; take a new --store")

    def _set_journal(self, kind: str) -> None:
        end = time.monotonic() + _MOMENT
        while True:  # SQLite does not wait here; another sweep may be making the tables
            try:
                self._db.execute(f"PRAGMA journal_mode = {kind}")
                return
            except sqlite3.OperationalError as error:
                if time.monotonic() > end:
                    line = f"{self.path}: {error}: in use on this machine; wait until that has ended"
                    raise UserError(line) from None
                time.sleep(0.05)

    def _empty(self) -> bool:
        return not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing. Raises UserError of one line where the disc, or who else uses the file, forbids it."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise UserError(f"{self.path}: {error}; mend that, and the same command continues") from None
        finally:
            if self._db.in_transaction:  # SQLite may have rolled it back itself
                with suppress(sqlite3.OperationalError):
                    self._db.execute("ROLLBACK")

    def _put(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, json.dumps(value)))

    def _get(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    # The plan.

    def add(self, plan: SweepPlan) -> None:
        """Have the runs of a plan wait here, but those that are here already.

        Of those that wait or failed, what the plan no longer has, or has with another command, goes. Raises UserError
        where another run that was begun had another command.
        """
        with self._transaction():
            wanted = {_key(run): run for run in plan.runs()}
            for row in self.runs():
                run = wanted.get(_key(row))
                if row.state in (WAITING, FAILED) and run != _planned(row):
                    self._db.execute("DELETE FROM points WHERE run = ?", (row.id,))
                    self._db.execute("DELETE FROM runs WHERE id = ?", (row.id,))
                elif run is not None and run != _planned(row):
                    old, new = _first_difference(row.command, run.command)
                    raise UserError(
                        f"{self.path}: {row.name} was run with {old} where the plan has {new}; take another --store"
                    )
            self._db.executemany(
                "INSERT OR IGNORE INTO runs (arm, seed, learning_rate, data, command) VALUES (?, ?, ?, ?, ?)",
                [(*key, json.dumps(run.command)) for key, run in wanted.items()],
            )
            self._put("plan", plan.outline())

    def outline(self) -> dict[str, Any]:
        """The outline of the last plan that was added."""
        return self._get("plan")

    # A worker's part.

    def claim(self, code: str) -> Row | None:
        """Take a waiting run for this process, whose attempt it now is; None: there is none.

        code: the version that will run it.
        """
        now, worker = time.time(), identity(os.getpid())
        with self._transaction():
            self._lose()
            found = self._db.execute(
                f"""UPDATE runs SET state = '{RUNNING}', attempt = attempt + 1, machine = ?, worker = ?, process = NULL,
                    beat = ?, started = ?, ended = NULL, exit_code = NULL, error = NULL, code = ?
                    WHERE id = (SELECT min(id) FROM runs WHERE state = '{WAITING}') RETURNING {_COLUMNS}""",
                (socket.gethostname(), worker, now, now, code),
            ).fetchone()
        return _row(found) if found else None

    def recover(self) -> None:
        """Have the runs of dead workers wait again, as `claim` does."""
        with self._transaction():
            self._lose()

    def _lose(self) -> None:
        here, late = socket.gethostname(), time.time() - LOST
        running = f"SELECT id, machine, worker, beat FROM runs WHERE state = '{RUNNING}'"
        for run, machine, worker, beat in self._db.execute(running).fetchall():
            if beat < late or (machine == here and living(worker) is None):
                self._wait(run)

    def _wait(self, run: int) -> None:
        """Have a run wait, as if it had never begun."""
        self._db.execute(f"UPDATE runs SET state = '{WAITING}' WHERE id = ?", (run,))
        self._db.execute("DELETE FROM points WHERE run = ?", (run,))

    def left_behind(self) -> list[str]:
        """The identities of processes that dead workers of this machine left behind."""
        sql = "SELECT process, worker FROM runs WHERE machine = ? AND process IS NOT NULL"
        rows = self._db.execute(sql, (socket.gethostname(),)).fetchall()
        return [process for process, worker in rows if living(worker) is None and living(process)]

    def _own(self, run: Row, change: str, *values: Any) -> None:
        """Change columns of a run whose attempt is still ours."""
        sql = f"UPDATE runs SET {change} WHERE id = ? AND attempt = ? AND state = '{RUNNING}'"
        if not self._db.execute(sql, (*values, run.id, run.attempt)).rowcount:
            raise TakenAway(f"{run.name}: this worker was silent for {LOST:g} s, and its run given to another")

    def write(self, run: Row, points: Iterable[tuple[int, str, float]], process: str | None = None) -> None:
        """Write (step, name, value), beat, and say which `process` runs the run. Raises TakenAway."""
        with self._transaction():
            self._own(run, "beat = ?, process = coalesce(?, process)", time.time(), process)
            rows = [(run.id, name, step, None if math.isnan(value) else value) for step, name, value in points]
            self._db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", rows)

    def finish(self, run: Row, state: str, exit_code: int | None, error: str | None = None) -> None:
        """A run ended as DONE, FAILED or NOT_FINITE; `error`: the end of its log. Raises TakenAway."""
        with self._transaction():
            change = "state = ?, ended = ?, exit_code = ?, error = ?, process = NULL"
            self._own(run, change, state, time.time(), exit_code, error)

    def release(self, run: Row) -> None:
        """A run was interrupted: have it wait again, as if it had never begun. Raises TakenAway."""
        with self._transaction():
            self._own(run, "process = NULL")
            self._wait(run.id)

    def retry(self) -> int:
        """Have failed runs wait again; returns how many."""
        with self._transaction():
            failed = [row.id for row in self.runs() if row.state == FAILED]
            for run in failed:
                self._wait(run)
        return len(failed)

    # A reader's part.

    def counts(self) -> dict[str, int]:
        """How many runs are in each of STATES."""
        found = dict(self._db.execute("SELECT state, count(*) FROM runs GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in STATES}

    def runs(self) -> list[Row]:
        """All runs, in the order they are given out."""
        return [_row(row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM runs ORDER BY id")]

    def series(self, run: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{name: (steps, values)} of a run, steps rising, names in order; values are FP64."""
        found: dict[str, list[tuple[int, float]]] = {}
        sql = "SELECT name, step, value FROM points WHERE run = ? ORDER BY name, step"
        for name, step, value in self._db.execute(sql, (run,)):
            found.setdefault(name, []).append((step, math.nan if value is None else value))
        return {name: tuple(map(np.array, zip(*pairs, strict=True))) for name, pairs in found.items()}  # type: ignore[misc]


def _row(columns: tuple) -> Row:
    values = dict(zip(Row.__dataclass_fields__, columns, strict=True))
    return Row(**{**values, "command": tuple(json.loads(values["command"]))})


def _key(run: SweepRun | Row) -> tuple[str, int, float, str]:
    return run.arm, run.seed, run.learning_rate, run.data


def _planned(row: Row) -> SweepRun:
    return SweepRun(row.arm, row.seed, row.learning_rate, row.data, row.command)


def _first_difference(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, str]:
    """The first word of each that differs, a value behind its flag."""
    size = max(len(old), len(new))
    pairs = zip(old + ("",) * (size - len(old)), new + ("",) * (size - len(new)), strict=True)
    at, pair = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    before = old[at - 1] if at else ""
    if not before.startswith("-") or any(word.startswith("-") for word in pair):
        before = ""
    one, other = (f"{before} {word}".strip() or "nothing" for word in pair)
    return one, other
