"""The store: what is written can be read, each run is given out once, and a worker's death does no harm."""

import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from lab_runs import ROOT
from lab_runs import small_plan as plan

from megatron_fp8.tools.lab.sweep.rows import DONE, FAILED, NOT_FINITE, RUNNING, STATES, WAITING
from megatron_fp8.tools.lab.sweep.store import LOST, Store, TakenAway

DEAD = "1:100.00"  # process 1 did not start at this time


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sweep.sqlite"


@pytest.fixture
def store(path):
    made = Store(path, create=True)
    made.add(plan())
    yield made
    made.close()


def change(path, sql, *values) -> None:
    with sqlite3.connect(path) as db:
        db.execute(sql, values)


def test_runs_wait_in_an_order_that_completes_pairs(store):
    runs = store.runs()
    assert [(run.seed, run.learning_rate, run.arm) for run in runs] == [
        (seed, rate, arm) for seed in (1, 2) for rate in (1e-3, 3e-3) for arm in ("BF16", "E8M3")
    ]
    assert {run.state for run in runs} == {WAITING} and store.counts()[WAITING] == 8
    assert runs[0].command == plan().runs()[0].command
    assert store.outline()["arms"] == ["BF16", "E8M3"] and store.outline()["steps"] == 10


def test_curves_come_back_as_written(store, path):
    run = store.claim("abc")
    store.write(run, [(2, "loss", math.nan), (1, "loss", 3.25), (3, "loss", -math.inf), (2, "grad_norm", 1e-300)])
    store.write(run, [(3, "loss", math.inf), (10, "loss", 0.1)])
    store.finish(run, DONE, 0)
    again = Store(path)
    series = again.series(run.id)
    again.close()
    steps, values = series["loss"]
    assert list(series) == ["grad_norm", "loss"] and steps.tolist() == [1, 2, 3, 10]
    assert np.array_equal(values, [3.25, math.nan, math.inf, 0.1], equal_nan=True)
    assert series["grad_norm"][1].tolist() == [1e-300]
    row = next(row for row in store.runs() if row.id == run.id)
    assert (row.state, row.exit_code, row.code, row.machine) == (DONE, 0, "abc", socket.gethostname())
    assert 0 <= row.ended - row.started < 60 and store.series(run.id + 1) == {}


def test_every_state_is_counted(store):
    for state in (DONE, FAILED, NOT_FINITE):
        store.finish(store.claim(""), state, 1, "the end of the log")
    store.claim("")
    assert store.counts() == {WAITING: 4, RUNNING: 1, DONE: 1, FAILED: 1, NOT_FINITE: 1} and len(STATES) == 5
    assert store.retry() == 1 and store.counts()[FAILED] == 0
    assert store.claim("").error is None  # the failed run, as if new


def test_a_run_that_was_interrupted_starts_over(store):
    run = store.claim("")
    store.write(run, [(1, "loss", 3.0)])
    store.release(run)
    assert store.series(run.id) == {}
    again = store.claim("")
    assert (again.id, again.attempt) == (run.id, run.attempt + 1)


CLAIMS = """
import sys, time
from lab_runs import small_plan as plan
from megatron_fp8.tools.lab.sweep.rows import DONE
from megatron_fp8.tools.lab.sweep.store import Store
store = Store(sys.argv[1])
store.add(plan(seeds=tuple(range(1, 21))))
print("ready", flush=True)
sys.stdin.readline()
while run := store.claim(""):
    store.write(run, [(1, "loss", 1.0)])
    store.finish(run, DONE, 0)
    print(run.id)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("shared", [False, True])
def test_processes_never_get_the_same_run(path, shared):
    store = Store(path, create=True, shared=shared)
    store.add(plan(seeds=tuple(range(1, 21))))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/unit"}
    command = [sys.executable, "-c", CLAIMS, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(4)]
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 4
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    given = [worker.communicate(timeout=250)[0].split() for worker in workers]
    assert all(worker.returncode == 0 for worker in workers)
    assert sorted(int(run) for of in given for run in of) == [row.id for row in store.runs()]
    assert {(row.attempt, row.state) for row in store.runs()} == {(1, DONE)}
    assert sum(bool(of) for of in given) > 1
    store.close()
    assert path.with_name(path.name + "-wal").exists() is False


def test_the_journal_is_for_one_machine_or_several(path):
    def journal():
        with closing(sqlite3.connect(path)) as db:
            return db.execute("PRAGMA journal_mode").fetchone()[0]

    used = Store(path, create=True)
    assert journal() == "wal"
    with pytest.raises(ValueError, match="in use on this machine; wait"):
        Store(path, create=True, shared=True)
    used.close()
    Store(path, create=True, shared=True).close()
    assert journal() == "delete"
    Store(path, create=True).close()  # a task of the array
    assert journal() == "delete"


def test_a_full_disk_is_not_another_sweep(path, monkeypatch):
    """The remedy used to be to wait until that had ended."""
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Full))
    with pytest.raises(ValueError, match="database or disk is full; mend that"):
        Store(path, create=True)


class Full(sqlite3.Connection):
    """A database whose first write finds no space."""

    def execute(self, sql, *more):
        if "journal_mode" in sql:
            super().execute("PRAGMA max_page_count = 1")
            super().execute("CREATE TABLE t (x)")
        return super().execute(sql, *more)


connect = sqlite3.connect


def test_a_store_in_a_folder_that_cannot_be_written_is_read(store, path, monkeypatch):
    """A colleague's, say. SQLite makes files beside a store that is in WAL, also to read it."""
    run = store.claim("")
    store.write(run, [(1, "loss", 3.0)])
    store.finish(run, DONE, 0)
    store.close()
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    before = set(path.parent.iterdir())
    with closing(Store(path)) as again:
        assert again.series(run.id)["loss"][1].tolist() == [3.0]
        assert set(path.parent.iterdir()) == before
    with pytest.raises(ValueError, match="its folder cannot be written; name a file in another"):
        Store(path, create=True)


def test_a_store_of_several_machines_is_read_while_they_write(path, monkeypatch):
    """In a folder that this reader cannot write. What it had read before used to stay."""
    with closing(Store(path, create=True, shared=True)) as shared:
        shared.add(plan())
        monkeypatch.setattr(os, "access", lambda file, mode: False)
        with closing(Store(path)) as reader:
            assert reader.counts()[RUNNING] == 0
            shared.claim("")
            assert reader.counts()[RUNNING] == 1


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(ValueError, match="is a folder; name a file"):
        Store(tmp_path, create=True)


@pytest.mark.parametrize("how", ["dead here", "silent elsewhere"])
def test_the_run_of_a_lost_worker_is_given_out_again(store, path, how):
    run = store.claim("")
    store.write(run, [(1, "loss", 3.0)])
    if how == "dead here":
        change(path, "UPDATE runs SET worker = ? WHERE id = ?", DEAD, run.id)
    else:
        change(
            path,
            "UPDATE runs SET machine = 'other', worker = ?, beat = ? WHERE id = ?",
            DEAD,
            time.time() - LOST - 1,
            run.id,
        )
    again = store.claim("")
    assert (again.id, again.attempt) == (run.id, 2) and store.series(run.id) == {}
    # the first worker was only asleep
    for late in (
        lambda: store.write(run, [(2, "loss", 1.0)]),
        lambda: store.finish(run, DONE, 0),
        lambda: store.release(run),
    ):
        with pytest.raises(TakenAway, match="seed 1"):
            late()
    assert store.series(run.id) == {} and store.runs()[0].state == RUNNING
    store.write(again, [(1, "loss", 2.0)])
    assert store.series(run.id)["loss"][1].tolist() == [2.0]


def test_the_run_of_a_living_worker_is_not(store, path):
    run = store.claim("")
    change(path, "UPDATE runs SET machine = 'other', worker = ? WHERE id = ?", DEAD, run.id)  # its beat is recent
    assert store.claim("").id != run.id


WRITES = """
import itertools, sys
from lab_runs import small_plan as plan
from megatron_fp8.tools.lab.sweep.store import Store
store = Store(sys.argv[1])
store.add(plan())
run = store.claim("")
for step in itertools.count(1):
    store.write(run, [(step, name, step) for name in "abcdefgh"])
    print(step, flush=True)
"""


def test_a_worker_killed_while_writing_leaves_a_sound_store(store, path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/unit"}
    command = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        for line in worker.stdout:
            if int(line) >= 20:
                break
        os.kill(worker.pid, signal.SIGKILL)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    series = store.series(1)
    assert len({steps[-1] for steps, _ in series.values()}) == 1 and len(series) == 8  # whole writes only
    assert store.claim("").attempt == 2


def test_a_plan_grows_and_shrinks(store):
    done = store.claim("")
    store.finish(done, DONE, 0)
    store.add(plan(seeds=(1, 2, 3)))
    assert store.counts()[WAITING] == 11
    store.add(plan(seeds=(2,), arms=("E8M3",)))
    assert [(row.seed, row.arm, row.state) for row in store.runs() if row.state == WAITING] == [
        (2, "E8M3", WAITING)
    ] * 2
    assert done.id in [row.id for row in store.runs()]
    store.add(plan())
    assert store.counts() == {**dict.fromkeys(STATES, 0), WAITING: 7, DONE: 1}


def test_only_chosen_arms_are_given_out(store):
    store.add(plan(), ["E8M3"])
    assert len(store.runs()) == 8 and store.counts(["E8M3"])[WAITING] == 4
    taken = [store.claim("") for _ in range(5)]
    assert taken[4] is None and {run.arm for run in taken[:4]} == {"E8M3"}
    for run in taken[:4]:
        store.finish(run, FAILED, 1)
    assert store.retry(["BF16"]) == 0 and store.counts() == {**dict.fromkeys(STATES, 0), WAITING: 4, FAILED: 4}
    assert store.counts(["BF16"])[FAILED] == 0 and store.retry(["E8M3", "BF16"]) == 4
    store.add(plan())
    assert store.claim("").arm == "BF16"


def test_a_failed_run_may_change_or_go(store):
    """A mistyped arm is corrected in the plan, or removed; the good runs stay."""
    while row := store.claim(""):
        store.write(row, [(1, "loss", 2.0)])
        store.finish(row, DONE if row.arm == "BF16" else FAILED, 0)
    store.add(plan())
    assert store.counts()[FAILED] == 4  # with the same command they stay failed until a retry
    store.add(replace(plan(), arms={"BF16": (), "E8M3": ("--fp8-level", "O1")}))
    assert store.counts() == {**dict.fromkeys(STATES, 0), DONE: 4, WAITING: 4}
    failed = store.claim("")
    assert "--fp8-level" in failed.command and not store.series(failed.id)
    store.finish(failed, FAILED, 1)
    store.add(plan(arms=("BF16",)))
    assert store.counts() == {**dict.fromkeys(STATES, 0), DONE: 4}


def test_a_plan_may_not_change_what_has_run(store, path):
    store.add(plan(flags=("--bf16",)))  # nothing has run yet
    assert "--bf16" in store.runs()[0].command
    store.finish(store.claim(""), DONE, 0)
    said = r"BF16, .* was run with --train-iters 10 but .* --train-iters 20; take another"
    with pytest.raises(ValueError, match=said):
        store.add(plan(steps=20, flags=("--bf16",)))
    assert store.counts()[WAITING] == 7 and store.outline()["steps"] == 10  # nothing was changed


def test_what_is_no_store_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no such store; `megatron-fp8 lab sweep PLAN"):
        Store(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()
    text = tmp_path / "text"
    text.write_text("not a database, but long enough for a header of one " * 10)
    with pytest.raises(ValueError, match="file is not a database; give a file that"):
        Store(text, create=True)
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE about (name, value)")
    with pytest.raises(ValueError, match="tables of version None, not 1"):
        Store(tmp_path / "other.sqlite")
