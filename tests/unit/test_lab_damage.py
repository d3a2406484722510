"""A damaged store: a report of it, or a sweep on it, ends in one line that names the file, or works as it can."""

import random
import shutil
import sqlite3
from argparse import Namespace
from contextlib import closing

import numpy as np
import pytest
from lab_runs import small_plan

from megatron_fp8.errors import UserError
from megatron_fp8.tools.lab.report import main, plots
from megatron_fp8.tools.lab.report.document import Picture
from megatron_fp8.tools.lab.sweep.rows import DONE, NOT_FINITE
from megatron_fp8.tools.lab.sweep.store import Store

STEPS = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store in which all runs but two have ended."""
    path = tmp_path_factory.mktemp("whole") / "sweep.sqlite"
    store, generator = Store(path, create=True, shared=True), np.random.default_rng(0)
    store.add(small_plan(steps=STEPS))
    for i in range(6):
        run = store.claim("abc")
        for name in ("loss", "grad_norm", "sharpness", "elapsed_time_per_iteration_ms"):
            values = 3 + generator.normal(0, 0.1, STEPS)
            store.write(run, [(step + 1, name, float(value)) for step, value in enumerate(values)])
        store.write(run, [(STEPS, "validation_loss", 3.0)])
        store.finish(run, NOT_FINITE if i == 5 else DONE, 0, "the end\n")
    store.close()
    return path


@pytest.fixture
def path(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "picture", lambda name, caption, *drawing: Picture(name, caption, "<svg/>"))
    return shutil.copy(whole, tmp_path / "sweep.sqlite")


def report(path) -> None:
    assert main.run(Namespace(store=path, out=path.parent / "out", baseline=None, within=None)) == 0


def sweep(path) -> None:
    with closing(Store(path, create=True)) as store:
        store.recover()
        store.add(small_plan(steps=STEPS))
        store.counts()
        if run := store.claim(""):
            store.write(run, [(1, "loss", 1.0)])
            store.finish(run, DONE, 0)


def said(use, path) -> str | None:
    """The error line of a use of a store; None if it succeeded."""
    try:
        use(path)
    except UserError as error:
        line = str(error)
        assert line.startswith(f"{path}: ") and "\n" not in line and "; " in line
        return line
    return None


def test_the_whole_store_is_read(path):
    assert said(report, path) is None and said(sweep, path) is None


SQL = {  # {damage: whether report and sweep must fail}
    "UPDATE about SET value = 'null' WHERE name = 'plan'": "r",
    "UPDATE about SET value = '[]' WHERE name = 'plan'": "r",
    "UPDATE about SET value = '{' WHERE name = 'plan'": "r",
    "UPDATE about SET value = NULL WHERE name = 'plan'": "r",
    "UPDATE about SET value = x'ff00' WHERE name = 'plan'": "r",
    "DELETE FROM about WHERE name = 'plan'": "r",
    "UPDATE about SET value = json_set(value, '$.arms', 5) WHERE name = 'plan'": "r",
    "UPDATE about SET value = json_set(value, '$.steps', 'many') WHERE name = 'plan'": "r",
    "UPDATE about SET value = json_set(value, '$.steps', -4) WHERE name = 'plan'": "r",
    "UPDATE about SET value = '2' WHERE name = 'version'": "rs",
    "UPDATE about SET value = 'x' WHERE name = 'version'": "rs",
    "DELETE FROM about": "rs",
    "DROP TABLE about": "rs",
    "DROP TABLE runs": "rs",
    "DROP TABLE points": "rs",
    "ALTER TABLE runs DROP COLUMN worker": "rs",
    "ALTER TABLE points RENAME COLUMN step TO stop": "r",
    "UPDATE runs SET command = 'train.py' WHERE id = 2": "rs",
    "UPDATE runs SET command = NULL WHERE id = 2": "rs",
    "UPDATE runs SET command = '[1, 2]' WHERE id = 2": "rs",
    "UPDATE runs SET command = '[]' WHERE id = 8": "rs",
    f"UPDATE runs SET command = '{'[' * 100_000}' WHERE id = 2": "rs",
    "UPDATE runs SET arm = NULL WHERE id = 2": "rs",
    "UPDATE runs SET arm = x'ff' WHERE id = 2": "rs",
    "UPDATE runs SET arm = char(27) || '[2J' WHERE id = 2": "rs",
    "UPDATE runs SET data = CAST(x'ff' AS TEXT) WHERE id = 2": "rs",
    "UPDATE runs SET seed = 'one' WHERE id = 2": "rs",
    "UPDATE runs SET seed = 1.5 WHERE id = 2": "rs",
    "UPDATE runs SET seed = -9223372036854775807 WHERE id = 2": "rs",
    "UPDATE runs SET learning_rate = 'fast' WHERE id = 2": "rs",
    "UPDATE runs SET learning_rate = 9e999 WHERE id = 2": "rs",
    "UPDATE runs SET state = 'sleeping' WHERE id = 2": "rs",
    "UPDATE runs SET attempt = NULL WHERE id = 7": "rs",
    "UPDATE runs SET machine = x'00', worker = x'00', beat = 'x', state = 'running' WHERE id = 8": "rs",
    "UPDATE runs SET ended = 'now' WHERE id = 2": "rs",
    "UPDATE runs SET ended = 9e999 WHERE id = 2": "rs",
    "UPDATE runs SET exit_code = 'zero' WHERE id = 2": "rs",
    "UPDATE runs SET error = 7.5e0 || x'00ff' WHERE id = 2": "rs",
    "UPDATE points SET value = 'low' WHERE run = 1 AND step = 3": "r",
    "UPDATE points SET value = x'00' WHERE run = 1 AND step = 3": "r",
    "UPDATE points SET step = 'first' WHERE run = 1 AND step = 3": "r",
    "UPDATE points SET step = -1 WHERE run = 1 AND step = 1": "r",
    "UPDATE points SET step = 9223372036854775807 WHERE run = 1 AND step = 3": "r",
    "UPDATE points SET name = x'6c6f7373' WHERE run = 1 AND step = 3 AND name = 'loss'": "r",
    "UPDATE points SET value = 9e999 WHERE run = 1": "",
    "UPDATE points SET value = 1e308 WHERE run = 1": "",
    "UPDATE points SET value = -1e308 WHERE step > 5": "",
    "UPDATE points SET value = NULL": "",
    "UPDATE points SET step = step + 1000000": "",
    "DELETE FROM points": "",
    "DELETE FROM points WHERE name = 'loss'": "",
    "DELETE FROM runs": "r",
}


@pytest.mark.parametrize("sql", SQL)
def test_a_damage_by_sql_is_one_line(path, sql):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(sql)
    for use, letter in ((report, "r"), (sweep, "s")):
        line = said(use, path)
        assert letter not in SQL[sql] or line
        damaged = "the store is damaged; put a copy of it there, or sweep into a new one"
        nothing = "no run has ended well yet; wait for the first, or see its .runs folder"
        remedies = (damaged, "take a new --store", "take another --store", nothing)
        assert line is None or line.endswith(remedies), line


@pytest.mark.parametrize("page", range(1, 7))
def test_a_page_of_zeros_is_one_line(path, page):
    with path.open("r+b") as file:
        file.seek(4096 * page)
        file.write(bytes(4096))
    assert said(report, path) or said(sweep, path) or page not in (1, 2, 3)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 4096, 4097, 12288])
def test_a_store_that_was_cut_is_one_line(path, size):
    with path.open("r+b") as file:
        file.truncate(size)
    assert said(report, path)


@pytest.mark.parametrize("stores", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_random_bytes_are_one_line_or_other_numbers(whole, path, stores):
    """Stores, each with 1 to 200 bytes changed, in one place or scattered."""
    content, told = whole.read_bytes(), 0
    for seed in range(stores):
        generator = random.Random(seed)
        damaged, count = bytearray(content), generator.choice((1, 3, 20, 200))
        start = generator.randrange(len(content))
        for i in range(count):
            at = (start + i) % len(content) if seed % 2 else generator.randrange(len(content))
            damaged[at] = generator.randrange(256)
        for use in (report, sweep):
            path.write_bytes(damaged)
            told += said(use, path) is not None
    assert told > 0.35 * stores
