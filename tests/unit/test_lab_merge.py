"""Merging stores: the runs of several machines give the report of one, and nothing is mixed or lost."""

import math
from contextlib import closing
from dataclasses import replace

import pytest
from lab_runs import PLAN, done, reports, write
from lab_runs import small_plan as plan

from megatron_fp8.tools.lab.sweep.rows import DONE, FAILED, NOT_FINITE, STATES, WAITING, key_of
from megatron_fp8.tools.lab.sweep.store import Store


@pytest.fixture
def stores(tmp_path):
    """Two new stores of one plan."""
    made = [Store(tmp_path / f"{name}.sqlite", create=True) for name in "ab"]
    for store in made:
        store.add(plan())
    yield made
    for store in made:
        store.close()


def make(store: Store, count: int, state: str = DONE, loss: float = 1.0) -> list:
    """Give out `count` runs and end them in a state, with a curve. Returns their keys."""
    runs = [store.claim("abc") for _ in range(count)]
    for run in runs:
        store.write(run, [(1, "loss", loss), (2, "loss", math.nan), (2, "grad_norm", -math.inf)])
        store.finish(run, state, 0)
    return [key_of(run) for run in runs]


def curves(store: Store) -> dict:
    """{key: {name: (steps, values)}} as text, of the runs that have ended."""
    return {
        key_of(row): {name: (steps.tolist(), str(values.tolist())) for name, (steps, values) in curve.items()}
        for row in store.runs()
        if (curve := store.series(row.id))
    }


def test_two_machines_halves_give_the_report_of_one_sweep(tmp_path):
    folders = [tmp_path / name for name in ("whole", "first", "second")]
    for folder, seeds in zip(folders, ("3", "[1]", "[2, 3]"), strict=True):
        folder.mkdir()
        write(folder, PLAN.replace("seeds: 3", f"seeds: {seeds}"))
        done(folder, "sweep", "plan.yaml", "--store", "sweep.sqlite", "--jobs", "2")
    _, first, second = (str(folder / "sweep.sqlite") for folder in folders)
    (tmp_path / "merged").mkdir()
    output = done(tmp_path, "merge", "merged/sweep.sqlite", second, first)
    assert output.splitlines() == [
        f"{second}: 4 added, 0 already here",
        f"{first}: 2 added, 0 already here",
        "merged/sweep.sqlite: 6 done",
    ]
    assert done(tmp_path, "merge", "merged/sweep.sqlite", first).startswith(f"{first}: 0 added, 2 already here")
    whole, merged = (reports(tmp_path / name) for name in ("whole", "merged"))
    assert {"report.md", "report.html"} < set(whole) == set(merged)
    assert [name for name in whole if whole[name] != merged[name] and not name.startswith("runs.")] == []
    write(tmp_path / "merged")  # the whole plan: nothing is left to do
    assert done(tmp_path / "merged", "sweep", "plan.yaml", "--store", "sweep.sqlite").endswith("6 done\n")


def test_runs_come_with_all_that_is_known_of_them(stores):
    ours, theirs = stores
    make(theirs, 2)
    make(theirs, 1, NOT_FINITE)
    make(theirs, 1, FAILED)
    assert ours.take([theirs, theirs]) == [(3, 0), (0, 3)]
    assert ours.counts() == {**dict.fromkeys(STATES, 0), DONE: 2, NOT_FINITE: 1, WAITING: 5}
    ended = {key_of(row): row for row in theirs.runs() if row.state in (DONE, NOT_FINITE)}
    assert {key: text for key, text in curves(theirs).items() if key in ended} == curves(ours)
    here = {key_of(row): row for row in ours.runs()}
    assert all(replace(here[key], id=row.id) == row for key, row in ended.items())
    assert not {key_of(row) for row in iter(lambda: ours.claim(""), None)} & ended.keys()


def test_what_has_ended_here_stays(stores):
    ours, theirs = stores
    kept = make(ours, 2, loss=5.0)
    make(theirs, 3, loss=7.0)
    assert ours.take([theirs]) == [(1, 2)]
    losses = {key: text["loss"][1] for key, text in curves(ours).items()}
    assert all((key in kept) == ("5.0" in text) for key, text in losses.items()) and len(losses) == 3


def test_a_failed_run_is_replaced(stores):
    ours, theirs = stores
    make(ours, 1, FAILED, loss=5.0)
    make(theirs, 1, loss=7.0)
    assert ours.take([theirs]) == [(1, 0)] and ours.counts()[FAILED] == 0
    (curve,) = curves(ours).values()
    assert curve["loss"][1] == "[7.0, nan]"


@pytest.mark.parametrize(
    "other, said",
    [
        (plan(flags=("--bf16",)), r"b.sqlite: BF16, seed 1.* was run with --bf16 but .*a.sqlite has"),
        (plan(steps=20), r"b.sqlite: its plan has steps: 20, that of .*a.sqlite 10; merge the stores of one plan"),
        (replace(plan(), processes=2), "its plan has processes: 2, that of .*a.sqlite 1;"),
    ],
)
def test_other_plans_are_refused(tmp_path, other, said):
    a, b = (Store(tmp_path / f"{name}.sqlite", create=True) for name in "ab")
    with closing(a) as ours, closing(b) as theirs:
        ours.add(plan())
        theirs.add(other)
        make(theirs, 2)
        before = ours.runs()
        with pytest.raises(ValueError, match=said):
            ours.take([theirs])
        assert ours.runs() == before and curves(ours) == {}


def test_a_run_in_progress_is_not_taken_away(stores):
    ours, theirs = stores
    make(theirs, 2)
    running = ours.claim("")
    with pytest.raises(ValueError, match=r"a.sqlite: BF16, seed 1.* is running; wait until that sweep has ended"):
        ours.take([theirs])
    assert curves(ours) == {}
    ours.write(running, [(1, "loss", 2.0)])  # it is still its worker's


def test_one_refused_store_leaves_the_others_unmerged(tmp_path):
    """And a cut between two stores leaves what was there."""
    a, b, c = (Store(tmp_path / f"{name}.sqlite", create=True) for name in "abc")
    b.add(plan())
    c.add(plan(steps=20))
    make(b, 2)
    make(c, 1)
    with pytest.raises(ValueError, match=r"c.sqlite: its plan has steps: 20"):
        a.take([b, c])
    assert a.runs() == [] and curves(a) == {}

    def cut():
        yield b
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a.take(cut())
    assert a.runs() == [] and curves(a) == {}
    assert a.take([b]) == [(2, 0)]
    for store in (a, b, c):
        store.close()
    write(tmp_path)
    said = done(tmp_path, "merge", "new.sqlite", "b.sqlite", "c.sqlite", code=2)
    assert said.count("\n") == 1 and "c.sqlite: its plan has steps: 20, that of new.sqlite 10" in said
    assert done(tmp_path, "merge", "new.sqlite", "b.sqlite").splitlines()[0] == "b.sqlite: 2 added, 0 already here"


def test_wrong_command_lines_are_one_line(tmp_path):
    write(tmp_path)
    Store(tmp_path / "a.sqlite", create=True).close()
    assert "a.sqlite: is the store to merge into; leave it out" in done(
        tmp_path, "merge", "a.sqlite", "./a.sqlite", code=2
    )
    assert "none.sqlite: no such store" in done(tmp_path, "merge", "new.sqlite", "none.sqlite", code=2)
    assert "a.sqlite: the plan is None" in done(tmp_path, "merge", "new.sqlite", "a.sqlite", code=2)
    assert not (tmp_path / "new.sqlite").exists()
