"""benchmarks/real_text.py's verdicts: a gap against the spread of seeds, and batch by batch against chance."""

import math

import pytest
from launch import ROOT


@pytest.fixture
def real_text(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import real_text

    return real_text


def rows(heldout: dict[str, list[float]] | None = None, losses: dict[str, list[list[float]]] | None = None) -> list:
    """Rows as in a CSV, with seeds from 1."""
    found = {(arm, seed): (f"{loss}", "") for arm, of in (heldout or {}).items() for seed, loss in enumerate(of, 1)}
    for arm, of_arm in (losses or {}).items():
        for seed, of_seed in enumerate(of_arm, 1):
            found[arm, seed] = (found.get((arm, seed), ("", ""))[0], " ".join(map(str, of_seed)))
    return [
        {"arm": arm, "seed": str(seed), "heldout_loss": end, "losses": steps}
        for (arm, seed), (end, steps) in found.items()
    ]


def test_a_gap_means_something_beyond_the_seeds_spread(real_text):
    heldout = {"O0": [2.0, 2.1, 2.3], "O1": [2.2, 1.9], "O3": [2.31, 2.1], "O2": [float("nan")]}
    lines = real_text.gaps(rows(heldout))
    assert lines[0] == "held-out loss: O0 2.0000 to 2.3000, a spread of 0.3000; less O0's:"
    assert [line.split() for line in lines[1:]] == [
        ["O1", "+0.2000", "-0.2000", "inside", "the", "noise"],
        ["O2", "+nan", "OUTSIDE", "the", "noise"],
        ["O3", "+0.3100", "+0.0000", "OUTSIDE", "the", "noise"],
    ]
    assert [line.split()[:3] for line in real_text.gaps(rows(heldout), "O3")[1:]] == [
        ["O0", "-0.3100", "+0.0000"],
        ["O1", "-0.1100", "-0.2000"],
        ["O2", "+nan", "OUTSIDE"],
    ]


def test_a_line_says_if_the_reference_is_missing(real_text):
    for nothing in ({"O3": [2.0]}, {"O0": [float("nan")], "O3": [2.0]}):
        assert real_text.gaps(rows(nothing)) == ["held-out loss: no run of O0 that ended to compare with"]
    losses = {"O3": [[1.0, 1.0]]}
    assert real_text.paired(rows(losses=losses)) == ["training loss: no run of O0 with an arm's seed to compare with"]


def test_training_losses_are_compared_on_the_batches_that_both_saw(real_text):
    """A batch's own effect cancels. A run that was cut off shortens the window, but only its own arm's."""
    batches = [math.sin(step) + 3 for step in range(400)]
    losses = {
        "O0": [batches, [2 * loss for loss in batches[:300]]],
        "O1": [[loss + 0.1 for loss in batches], [2 * loss + 0.3 for loss in batches]],
        "O3": [[loss + 0.5 for loss in batches[:60]]],
    }
    assert [line.split() for line in real_text.paired(rows(losses=losses))[1:]] == [
        ["O1", "+0.1000", "+0.3000", "mean", "+0.2000", "+-", "0.1000,", "steps", "201", "to", "300"],
        ["O3", "+0.5000", "mean", "+0.5000,", "steps", "31", "to", "60"],
    ]


def test_a_log_that_was_cut_off_keeps_its_losses(real_text):
    line = (
        " [2026-11-23 20:15:46] iteration      {i}/     800 | consumed samples: 32 | elapsed time per iteration (ms): "
        "7.0 | learning rate: 3.9E-04 | global batch size:    32 | lm loss: {loss}E-01 | loss scale: 1.0 | grad norm: "
        "0.213 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    lines = [line.format(i=1, loss=7.5), line.format(i=2, loss=7.25)]
    row = real_text.read("O3", 2, lines)
    assert row == {"arm": "O3", "seed": 2, "heldout_loss": "", "last_10_steps": "0.73750", "losses": "0.7500 0.7250"}
    assert real_text.read("O3", 2, []) is None


def test_stock_is_known_from_other_commits_and_the_arms_are_not(real_text, tmp_path):
    path = str(tmp_path / "rows.csv")
    same = {"gpu": "G", "torch": "2", "commit": "a", "date": "d", "steps": "5", "flags": ""}
    made = [row | {"last_10_steps": "0"} for row in rows({"O0": [2.0, 2.1], "O3": [2.2]})]
    real_text.train_step.append(path, real_text.COLUMNS, [same | row for row in made])
    assert set(real_text.known(path, same | {"commit": "b"}, every_arm=False)) == {("O0", 1), ("O0", 2)}
    assert set(real_text.known(path, {"steps": "5", "flags": ""}, every_arm=True)) == {("O0", 1), ("O0", 2), ("O3", 1)}
    for other in ({"steps": "6"}, {"flags": "--x"}, {"gpu": "H"}, {"torch": "3"}):
        assert real_text.known(path, same | other, every_arm=False) == {}


def test_a_figure_of_runs_that_have_losses(real_text, tmp_path):
    losses = {"O0": [[2.0] * 60, [2.1] * 55], "O3": [[2.1] * 60, [2.0] * 60]}
    real_text.plot(rows(losses=losses), tmp_path / "figure.svg")
    assert "O3, 2 seeds" in (tmp_path / "figure.svg").read_text()
