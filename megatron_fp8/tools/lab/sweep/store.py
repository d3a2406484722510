"""The runs of a sweep and their curves, in one SQLite file that several sweeps may work on at once.

    about     name, value                       the plan's outline, the version of these tables
    runs      a row each: arm, seed, learning rate, data set; command; state; its worker, and since when
    points    run, name, step, value            every number that a run logged; NULL is NaN

States and their changes:

    waiting -> running     `claim`: one UPDATE in an immediate transaction, so each run is given out once
    running -> waiting     `release`: interrupted; it starts over
    running -> done, failed, or not finite: the run ended itself because a loss or a gradient was not finite
    failed -> waiting      `retry`

A killed worker cannot release its run. So a running run has a beat, the time of its worker's last write. A run is given
out again if its worker is a dead process of this machine, or if its beat is LOST seconds old. Its `attempt` then goes
up by one. Every write names its attempt, so a worker that was only asleep can write nothing more.

Trust.  Others may be able to write to a store. What is read is checked (rows.py), a store with code of its own
(triggers, views) is refused, and no command is run only because it is in the store: `claim` gives out the runs of the
added plan, if the store has the same command for them.

Journal.  WAL allows a report while a sweep writes, but needs all processes on one machine. A store on a shared file
system, which the tasks of a cluster write to, uses SQLite's rollback journal: `shared`. File locks must work there
(NFSv4, Lustre with flock, GPFS).
"""

import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import UserError
from ....processes import identity, living
from .plan_file import SweepPlan, SweepRun
from .rows import (
    COLUMNS,
    ENDED,
    FAILED,
    RUNNING,
    STATES,
    WAITING,
    Damaged,
    Row,
    key_of,
    printable,
    read_json,
    read_outline,
    read_points,
    read_row,
)

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
LOST = 300.0  # seconds without a beat
_BUSY = 60.0  # seconds to wait for another process's transaction
_MOMENT = 3.0  # seconds to wait for another process to begin or end its use of a store
_OUTSIDE = tuple(  # SQLite's names of errors that do not mean damage
    f"SQLITE_{name}" for name in ("BUSY", "LOCKED", "FULL", "IOERR", "READONLY", "CANTOPEN", "PERM", "NOLFS", "NOMEM")
)
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, arm TEXT, seed INTEGER, learning_rate REAL, data TEXT, command TEXT,
    state TEXT DEFAULT 'waiting', attempt INTEGER DEFAULT 0,
    machine TEXT, worker TEXT, code TEXT,
    beat REAL, started REAL, ended REAL, exit_code INTEGER, error TEXT,
    UNIQUE (arm, seed, learning_rate, data)
);
CREATE INDEX by_state ON runs (state);
CREATE TABLE points (
    run INTEGER REFERENCES runs (id), name TEXT, step INTEGER, value REAL, PRIMARY KEY (run, name, step)
) WITHOUT ROWID;
"""


class TakenAway(RuntimeError):
    """This worker was thought dead, and its run was given to another."""


class Store:
    """A store. Raises UserError with one line if the file is not a store, or is damaged.

    Args:
        path: the file.
        create: make it if it does not exist.
        shared: processes of several machines will use it, even if it exists already.
    """

    def __init__(self, path: str | Path, create: bool = False, shared: bool = False):
        self.path = Path(path)
        self._commands: dict[tuple, str] = {}  # the plan's commands by key_of: only these may be run
        self._faster: Mapping[str, tuple[str, ...]] = {}  # the plan's flags that change no number, by arm
        if not create and not os.path.isfile(self.path):
            raise UserError(f"{path}: no such store; `megatron-fp8 lab sweep PLAN --store {path}` makes it")
        folder = self.path.absolute().parent
        if not folder.is_dir():
            raise UserError(f"{path}: no such folder; make it, or name another file")
        if self.path.is_dir():
            raise UserError(f"{path}: is a folder; name a file")
        own = os.access(folder, os.W_OK)
        if create and not own:
            raise UserError(f"{path}: its folder cannot be written; name a file in another")
        # In a folder that cannot be written SQLite cannot make the files beside the store that reading WAL needs. They
        # are not needed if no sweep has left a journal. Other stores are read as ever: with "immutable" SQLite takes no
        # locks, so it would miss what several machines' sweeps write meanwhile.
        fixed = "" if own or not _in_wal(self.path) or os.path.exists(f"{self.path}-wal") else "?immutable=1"
        with self._one_line(), ExitStack() as on_error:
            uri = self.path.absolute().as_uri() + fixed
            self._db = sqlite3.connect(uri, timeout=_BUSY, isolation_level=None, uri=True)
            on_error.callback(self._db.close)
            self._open(create, shared)
            on_error.pop_all()

    def _open(self, create: bool, shared: bool) -> None:
        for guard in ("trusted_schema = OFF", "cell_size_check = ON"):  # sqlite.org/security.html
            self._db.execute(f"PRAGMA {guard}")
        new = create and self._empty()
        if new or shared:  # the journal's kind is a property of the file
            self._set_journal("DELETE" if shared else "WAL")
        if new:
            with self._transaction():
                if self._empty():  # checked again: two sweeps may begin at once
                    for statement in filter(str.strip, _TABLES.split(";")):
                        self._db.execute(statement)
                    self._put("version", VERSION)
        ours = "type IN ('table', 'index') AND coalesce(sql, '') NOT LIKE '%VIRTUAL TABLE%'"
        for kind, name in self._db.execute(f"SELECT type, name FROM sqlite_master WHERE NOT ({ours})"):
            raise UserError(f"{self.path}: holds a {kind}, {name!a}, which no sweep makes; take a new --store")
        version = self._get("version")
        if version != VERSION:
            raise UserError(f"{self.path}: tables of version {version}, not {VERSION}; take a new --store")

    def _set_journal(self, kind: str) -> None:
        end = time.monotonic() + _MOMENT
        while True:  # SQLite does not wait here, and another sweep may be making the tables
            try:
                self._db.execute(f"PRAGMA journal_mode = {kind}")
                return
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                    raise  # such as a full disk
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
    def _one_line(self) -> Iterator[None]:
        """Turn SQLite's errors into a UserError of one line: the disk, another user of the file, or damage."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_NOTADB":
                line = f"{self.path}: {error}; give a file that `lab sweep` made, or a new one"
                raise UserError(line) from None
            if name.startswith(_OUTSIDE):
                raise UserError(f"{self.path}: {error}; mend that, and the same command continues") from None
            raise Damaged(self.path, str(error)) from None
        except UnicodeDecodeError:  # SQLite's message quotes a name of the file
            raise Damaged(self.path, "a name is not in UTF-8") from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Make all changes inside, or none."""
        try:
            with self._one_line():
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # unless SQLite has rolled it back itself
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    def _rows(self, sql: str, *values: Any) -> list[tuple]:
        with self._one_line():
            return self._db.execute(sql, values).fetchall()

    def _put(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, json.dumps(value)))

    def _get(self, name: str) -> Any:
        rows = self._rows("SELECT value FROM about WHERE name = ?", name)
        return read_json(self.path, f"the {name}", rows[0][0]) if rows else None

    # The plan.

    def add(self, plan: SweepPlan, arms: Collection[str] | None = None) -> None:
        """Add the runs of a plan that are not here yet, as waiting; from now on `claim` gives out the plan's runs, or
        those of some of its arms.

        Waiting or failed runs are deleted if the plan no longer has them, or has another command for them. Raises
        UserError if any other run was begun with another command.
        """
        wanted = {key_of(run): run for run in plan.runs()}
        commands = {key: json.dumps(run.command) for key, run in wanted.items()}
        with self._transaction():
            for row in self.runs():
                run = wanted.get(key_of(row))
                if row.state in (WAITING, FAILED) and run != _planned(row):
                    self._delete(row)
                elif run is not None and run != _planned(row):
                    old, new = _first_difference(row.command, run.command)
                    raise UserError(
                        f"{self.path}: {row.name} was run with {old} but the plan has {new}; take another --store"
                    )
            self._db.executemany(
                "INSERT OR IGNORE INTO runs (arm, seed, learning_rate, data, command) VALUES (?, ?, ?, ?, ?)",
                [(*key, command) for key, command in commands.items()],
            )
            self._put("plan", plan.outline())
        self._commands = {key: command for key, command in commands.items() if arms is None or key[0] in arms}
        self._faster = plan.faster

    def outline(self) -> dict[str, Any]:
        """The outline of the last plan added."""
        return read_outline(self.path, self._get("plan"))

    # A worker's part.

    def claim(self, code: str) -> Row | None:
        """Take a waiting run of the plan for this process, as a new attempt; None if there is none.

        A run that is not in the plan's chosen arms, or has another command there, is not taken.
        code: the version that will run it. The store adds the arm's flags of the plan's `faster`.
        """
        now, worker = time.time(), identity(os.getpid())
        waiting = f"SELECT id, arm, seed, learning_rate, data, command FROM runs WHERE state = '{WAITING}' ORDER BY id"
        with self._transaction():
            self._lose()
            planned = (row for row in self._rows(waiting) if self._commands.get(row[1:-1]) == row[-1])
            if (first := next(planned, None)) is None:
                return None
            run, arm = first[:2]
            found = self._rows(
                f"""UPDATE runs SET state = '{RUNNING}', attempt = attempt + 1, machine = ?, worker = ?,
                    beat = ?, started = ?, ended = NULL, exit_code = NULL, error = NULL, code = ?
                    WHERE id = ? RETURNING {COLUMNS}""",
                *(socket.gethostname(), worker, now, now, " ".join([code, *self._faster.get(arm, ())]), run),
            )
            return read_row(self.path, found[0])

    def recover(self) -> None:
        """Let the runs of dead workers wait again, as `claim` does too."""
        with self._transaction():
            self._lose()

    def _lose(self) -> None:
        here, late = socket.gethostname(), time.time() - LOST
        running = f"SELECT id, machine, worker, beat FROM runs WHERE state = '{RUNNING}'"
        for run, machine, worker, beat in self._rows(running):
            beats = isinstance(beat, float) and beat >= late
            if not beats or (machine == here and not (isinstance(worker, str) and living(worker))):
                self._wait(run)

    def _wait(self, run: int) -> None:
        """Let a run wait, as if it had never begun."""
        self._db.execute(f"UPDATE runs SET state = '{WAITING}' WHERE id = ?", (run,))
        self._db.execute("DELETE FROM points WHERE run = ?", (run,))

    def _own(self, run: Row, change: str, *values: Any) -> None:
        """Change columns of a run, if its attempt is still ours. Raises TakenAway."""
        sql = f"UPDATE runs SET {change} WHERE id = ? AND attempt = ? AND state = '{RUNNING}'"
        if not self._db.execute(sql, (*values, run.id, run.attempt)).rowcount:
            raise TakenAway(f"{run.name}: this worker was silent for {LOST:g} s, and its run given to another")

    def write(self, run: Row, points: Iterable[tuple[int, str, float]]) -> None:
        """Write (step, name, value) points and the beat. Raises TakenAway."""
        with self._transaction():
            self._own(run, "beat = ?", time.time())
            self._put_points(run.id, points)

    def _put_points(self, run: int, points: Iterable[tuple[int, str, float]]) -> None:
        rows = [(run, name, step, None if math.isnan(value) else value) for step, name, value in points]
        self._db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", rows)

    def finish(self, run: Row, state: str, exit_code: int | None, error: str | None = None) -> None:
        """End a run as DONE, FAILED or NOT_FINITE; error: the end of its log. Raises TakenAway."""
        with self._transaction():
            self._own(run, "state = ?, ended = ?, exit_code = ?, error = ?", state, time.time(), exit_code, error)

    def release(self, run: Row) -> None:
        """Let an interrupted run wait again, as if it had never begun. Raises TakenAway."""
        with self._transaction():
            self._own(run, "error = NULL")
            self._wait(run.id)

    def retry(self, arms: Collection[str] | None = None) -> int:
        """Let failed runs wait again, of all arms or of these. Returns their number."""
        with self._transaction():
            failed = [row.id for row in self.runs() if row.state == FAILED and (arms is None or row.arm in arms)]
            for run in failed:
                self._wait(run)
        return len(failed)

    # Another store's runs.

    def take(self, others: Iterable["Store"]) -> list[tuple[int, int]]:
        """Add the runs that have ended in other stores of the plan, well or not finite, with all their points.

        A run that waits here, or has failed, is replaced. One that has ended here, or in a store before, stays as it
        is. A store without a plan gets the first one's. The change is made as a whole or not at all.

        Returns (runs added, runs that had ended here too) of each store.

        Raises UserError if the plans have other steps or processes, if a run was made with another command, or if a
        sweep makes the run here at this moment.
        """
        with self._transaction():
            self._lose()
            return [self._take(other) for other in others]

    def _take(self, other: "Store") -> tuple[int, int]:
        plan, added, kept = other.outline(), 0, 0
        if self._get("plan") is None:
            self._put("plan", plan)
        for key in ("steps", "processes"):
            if (ours := self.outline().get(key)) != plan.get(key):
                what = f"{other.path}: its plan has {key}: {plan.get(key)}, that of {self.path} {ours}"
                raise UserError(f"{what}; merge the stores of one plan")
        here = {key_of(row): row for row in self.runs()}
        for row in other.runs():
            ours = here.get(key_of(row))
            if row.state not in ENDED:
                continue
            if ours is not None and ours.command != row.command:
                new, old = _first_difference(row.command, ours.command)
                what = f"{other.path}: {row.name} was run with {new} but {self.path} has {old}"
                raise UserError(f"{what}; merge the stores of one plan")
            if ours is not None and ours.state == RUNNING:
                raise UserError(f"{self.path}: {row.name} is running; wait until that sweep has ended")
            if ours is not None and ours.state in ENDED:
                kept += 1
            else:
                self._copy(row, other._points(row.id), ours)
                added += 1
        return added, kept

    def _copy(self, row: Row, points: dict[str, list[tuple[int, float]]], instead: Row | None) -> None:
        """Write another store's run; instead: the run with its key here."""
        if instead is not None:
            self._delete(instead)
        values = {**vars(row), "command": json.dumps(row.command)}
        del values["id"]
        sql = f"INSERT INTO runs ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        run = self._db.execute(sql, tuple(values.values())).lastrowid
        assert run is not None  # it was inserted
        for name, pairs in points.items():
            self._put_points(run, ((step, name, value) for step, value in pairs))

    def _delete(self, row: Row) -> None:
        self._db.execute("DELETE FROM points WHERE run = ?", (row.id,))
        self._db.execute("DELETE FROM runs WHERE id = ?", (row.id,))

    # A reader's part.

    def counts(self, arms: Collection[str] | None = None) -> dict[str, int]:
        """{state: number of runs} for each of STATES, of all arms or of these."""
        found = self._rows("SELECT arm, state, count(*) FROM runs GROUP BY arm, state")
        mine = [(state, count) for arm, state, count in found if arms is None or arm in arms]
        return {state: sum(count for its, count in mine if its == state) for state in STATES}

    def runs(self) -> list[Row]:
        """All runs, in the order in which they are given out."""
        return [read_row(self.path, row) for row in self._rows(f"SELECT {COLUMNS} FROM runs ORDER BY id")]

    def series(self, run: int) -> "dict[str, tuple[np.ndarray, np.ndarray]]":
        """{name: (steps, values)} of a run, with rising steps and sorted names; values are FP64."""
        import numpy as np  # half of the time in which a sweep starts, and it needs no arrays

        return {name: tuple(map(np.array, zip(*pairs, strict=True))) for name, pairs in self._points(run).items()}  # type: ignore[misc]

    def _points(self, run: int) -> dict[str, list[tuple[int, float]]]:
        rows = self._rows("SELECT name, step, value FROM points WHERE run = ? ORDER BY name, step", run)
        return read_points(self.path, run, rows)


def _in_wal(path: Path) -> bool:
    """Whether the file's header names SQLite's write-ahead log (sqlite.org/fileformat.html, offset 18)."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:] == b"\2\2"
    except OSError:  # SQLite says it
        return False


def _planned(row: Row) -> SweepRun:
    return SweepRun(row.arm, row.seed, row.learning_rate, row.data, row.command)


def _first_difference(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, str]:
    """The first word that differs in each, after its flag if it is a value."""
    size = max(len(old), len(new))
    pairs = zip(old + ("",) * (size - len(old)), new + ("",) * (size - len(new)), strict=True)
    at, pair = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    before = old[at - 1] if at else ""
    if not before.startswith("-") or any(word.startswith("-") for word in pair):
        before = ""
    one, other = (f"{before} {printable(word)}".strip() or "nothing" for word in pair)
    return one, other
