"""Others may be able to write to a store and its folders: nothing there is run, ended or written through."""

import argparse
import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from lab_runs import PLAN, done, gone, lab, wait_for, write

from megatron_fp8.checkpoint.files import write_whole
from megatron_fp8.errors import UserError
from megatron_fp8.processes import identity
from megatron_fp8.tools.lab import files
from megatron_fp8.tools.lab.report import main as report
from megatron_fp8.tools.lab.report.document import Picture, Section
from megatron_fp8.tools.lab.sweep.orphans import MARK, end_left_behind, mark
from megatron_fp8.tools.lab.sweep.plan_file import read_plan
from megatron_fp8.tools.lab.sweep.rows import DONE, WAITING
from megatron_fp8.tools.lab.sweep.store import LOST, Store
from megatron_fp8.tools.lab.trial import bisect
from megatron_fp8.tools.lab.trial.run import loaded

SWEEP = ("sweep", "plan.yaml", "--store", "sweep.sqlite", "--jobs", "1")
DEAD = "1:100.00"


@pytest.fixture
def store(tmp_path):
    """A store of three seeds and two arms, in a folder that has its plan."""
    write(tmp_path, PLAN.replace("steps: 100", "steps: 5"))
    made = Store(tmp_path / "sweep.sqlite", create=True)
    made.add(read_plan(tmp_path / "plan.yaml"))
    yield made
    made.close()


def insert(store: Store, command: list[str], **values) -> None:
    """Add a row as a stranger could: its worker, on another machine, will be late in a moment."""
    row = {"arm": "x", "seed": 9, "learning_rate": 0.1, "data": "data", "command": json.dumps(command)}
    row |= {"state": "running", "attempt": 1, "machine": "other", "worker": DEAD, "beat": time.time() - LOST + 0.2}
    row |= values
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute(f"INSERT INTO runs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()])


def test_a_command_that_is_in_no_plan_is_not_run(store, tmp_path):
    """Also if its worker counts as lost only after the sweep has looked at the store."""
    (tmp_path / "evil.py").write_text("open('PROOF', 'w')")
    insert(store, ["evil.py"])
    store.add(read_plan(tmp_path / "plan.yaml"))
    time.sleep(0.3)
    given = []
    while row := store.claim(""):
        given.append(row.command[0])
        store.finish(row, DONE, 0)
    assert given == ["train.py"] * 6 and store.counts()[WAITING] == 1
    assert done(tmp_path, *SWEEP) == "6 done\n"  # a sweep first drops waiting runs that are in no plan
    assert not (tmp_path / "PROOF").exists()


@pytest.mark.parametrize("state", ["waiting", "running", "done"])
def test_a_row_of_the_plan_with_another_command_is_made_anew_or_refused(store, tmp_path, state):
    (tmp_path / "evil.py").write_text("open('PROOF', 'w')")
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("DELETE FROM runs WHERE id = 1")
    insert(store, ["evil.py"], arm="BF16", seed=1, state=state, beat=time.time() + 1e6)
    if state == "waiting":
        assert "6 done" in done(tmp_path, *SWEEP)
    else:
        output = done(tmp_path, *SWEEP, code=2)
        assert "was run with evil.py but the plan has train.py; take another --store" in output
        assert output.count("\n") == 1
    assert not (tmp_path / "PROOF").exists()


def test_what_changes_under_a_sweep_is_not_run(store):
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE runs SET command = ? WHERE id < 6", (json.dumps(["evil.py"]),))
    assert store.claim("").id == 6 and store.claim("") is None


def test_a_stranger_cannot_have_a_process_ended(store, tmp_path):
    """Not by a process number in the store, which was once believed."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        with closing(sqlite3.connect(store.path)) as db, db:
            db.execute("ALTER TABLE runs ADD COLUMN process TEXT")
            here = socket.gethostname(), DEAD, identity(bystander.pid)
            db.execute("UPDATE runs SET machine = ?, worker = ?, process = ?, state = 'running'", here)
        assert "6 done" in done(tmp_path, *SWEEP)
        assert bystander.poll() is None
        bystander.kill()


def test_only_processes_with_the_mark_of_a_dead_sweep_of_this_store_are_ended(tmp_path):
    ours, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    living, dead = mark(ours)[MARK], mark(ours)[MARK].replace(identity(os.getpid()), DEAD)
    marks = {"no": None, "living": living, "other": dead.replace("a.sqlite", "b.sqlite"), "odd": "x", "dead": dead}
    marks["container"] = dead.replace("pid:[", "pid:[1")
    environments = {name: {**os.environ, **({MARK: text} if text else {})} for name, text in marks.items()}
    started = {name: subprocess.Popen(["sleep", "60"], env=env) for name, env in environments.items()}
    try:
        end_left_behind(ours)
        assert {name for name, process in started.items() if process.poll() is not None} == {"dead"}
        other.symlink_to(ours)
        end_left_behind(other)
        assert started["other"].poll() is None  # b.sqlite is now a.sqlite
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_ranks_whose_launcher_was_killed_are_ended_too(tmp_path):
    """Their mark is in their own environment; no number in a store leads to them."""
    write(tmp_path, PLAN.replace("train.py", "train.py --gate gate").replace("seeds: 3", "seeds: [2]"))
    (tmp_path / "rank.py").write_text("import time\ntime.sleep(600)\n")
    script = tmp_path / "train.py"
    spawn = "import subprocess, sys\nrank = subprocess.Popen([sys.executable, 'rank.py'])\n"
    script.write_text(f"{spawn}open('rank.pid', 'a').write(f'{{rank.pid}} ')\n" + script.read_text())
    sweep = lab(tmp_path, *SWEEP)
    wait_for(lambda: (tmp_path / "gate.waiting").exists())
    rank = int((tmp_path / "rank.pid").read_text().split()[0])
    launcher = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    for process in (sweep.pid, launcher):
        os.kill(process, signal.SIGKILL)
    sweep.communicate()
    assert not gone(rank)
    end_left_behind(tmp_path / "sweep.sqlite")
    assert gone(rank)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER UPDATE ON runs BEGIN UPDATE runs SET state = 'done'; END",
        "CREATE VIEW v AS SELECT * FROM runs",
        "CREATE VIRTUAL TABLE f USING fts5(x)",
    ],
)
def test_a_store_with_code_of_its_own_is_refused(store, sql):
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute(sql)
    with pytest.raises(UserError, match=r"sweep.sqlite: holds a (trigger|view|table), '[tvf]', which no sweep makes"):
        Store(store.path)


# Links.


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with a file; nothing in it may change."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["precious"] and (folder / "precious").read_text() == "mine"


def test_a_run_s_folder_that_is_a_link_goes_without_its_target(tmp_path, elsewhere):
    run = tmp_path / "sweep.runs/0001"
    run.parent.mkdir()
    run.symlink_to(elsewhere)
    files.make_empty(run)
    assert run.is_dir() and not run.is_symlink() and list(run.iterdir()) == []


def test_the_folder_of_runs_is_not_another_user_s_link(store, tmp_path, elsewhere, monkeypatch):
    runs = tmp_path / "sweep.runs"
    runs.symlink_to(elsewhere)
    monkeypatch.setattr(files.os, "geteuid", lambda: 4242)
    if os.getuid() == 0:  # links that root made are followed
        os.lchown(runs, 1234, 1234)
    with pytest.raises(UserError, match=r"sweep.runs: is another user's link \(user \d+\) to '.*elsewhere'; remove it"):
        files.make_empty(runs / "0001")


def test_one_s_own_link_to_a_larger_disc_is_followed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "sweep.runs").symlink_to(tmp_path / "scratch")
    files.make_empty(tmp_path / "sweep.runs/0001")
    assert (tmp_path / "scratch/0001").is_dir()


def test_a_report_is_not_written_through_links(tmp_path, elsewhere):
    (tmp_path / "figures").mkdir()
    for name in ("report.html", "report.md", "figures/losses.svg"):
        (tmp_path / name).symlink_to(elsewhere / "precious")
    report.write(tmp_path, "report", "Title", [Section("one", [Picture("losses", "words", "<svg/>")])])
    assert (tmp_path / "figures/losses.svg").read_text() == "<svg/>"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.md", "figures", "elsewhere"}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_a_report_that_cannot_be_written_is_one_line(store, tmp_path, monkeypatch):
    store.finish(store.claim(""), DONE, 0)
    monkeypatch.setattr(report, "sections", lambda results, within: [])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/figures").write_text("")
    with pytest.raises(UserError, match=r"^--out .*/out: File exists; mend that, or name another folder$"):
        report.run(argparse.Namespace(store=store.path, out=tmp_path / "out", baseline=None, within=None))


def test_a_bisect_is_not_written_through_links(tmp_path, elsewhere):
    for name in ("bisect.tmp", "bisect.json.partial", "bisect.json"):
        (tmp_path / name).symlink_to(elsewhere / "precious")
    write_whole(tmp_path / "bisect.json", "{}")
    assert not (tmp_path / "bisect.json").is_symlink() and (tmp_path / "bisect.json").read_text() == "{}"


@pytest.mark.parametrize(
    "content",
    [
        '{"linears": ["--save=/x"], "runs": {}}',
        '{"linears": [5], "runs": {}}',
        '{"linears": "abc", "runs": {}}',
        '{"linears": []}',
        '{"linears": [], "runs": {"": {"loss": {"1": "x"}}}}',
        '{"linears": [], "runs": {"": {"loss": {"x": 1.0}}}}',
        '{"linears": [], "runs": {"": {"loss": [1.0]}}}',
        '{"linears": [], "runs": []}',
        "[" * 100_000,
        "[]",
        "\\xff",
    ],
)
def test_a_file_that_bisect_did_not_write_is_refused(tmp_path, content):
    """A linear's name becomes a word of a command line."""
    (tmp_path / "bisect.json").write_text(content)
    assert bisect._read(tmp_path / "bisect.json") is None


def test_a_bisect_s_own_file_is_read(tmp_path):
    text = '{"linears": ["decoder.layers.0.mlp.linear_fc1"], "runs": {"": {"loss": {"1": 5.5, "2": NaN}}}}'
    (tmp_path / "bisect.json").write_text(text)
    assert bisect._read(tmp_path / "bisect.json")["runs"][""]["loss"][1] == 5.5


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xc2\xb2", b"7" * 5000, b"-1", b"../x", b""])
def test_a_tracker_that_says_no_step_is_one_line(tmp_path, text):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(text)
    with pytest.raises(UserError, match=r"latest_checkpointed_iteration.txt: says .*, not a step; name one in"):
        loaded(["train.py", "--load", str(tmp_path)])
    assert loaded(["train.py", "--load", str(tmp_path), "--ckpt-step", "7"]) == "7"
    tracker.unlink()
    assert loaded(["train.py", "--load", str(tmp_path)]) is None
