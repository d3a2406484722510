"""One run of the lab: its numbers, under the names that they had before there was a metrics file."""

import math
import sys

import pytest
from lab_runs import LOGS

from megatron_fp8 import processes
from megatron_fp8.tools.lab.sweep.runner import Training


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LAUNCHER", (sys.executable,))

    def run(script: str, *flags: str) -> tuple[Training, list]:
        """A run that has ended, and all that was read from it."""
        (tmp_path / "train.py").write_text(script)
        training = Training([str(tmp_path / "train.py"), *flags], 1, tmp_path / "run", {})
        found = []
        while training.poll() is None:
            training.wait()
            found += training.read()
        found += training.read()
        training.close()
        return training, found

    return run


def test_what_is_logged_is_read_with_every_digit(run):
    third, digits = 1 / 3, 5.016170978546143
    script = (
        f"log(linears_in_bf16=['a'])\nlog(7, loss={digits!r}, grad_norm=float('inf'))\nlog(7, update_norm={third!r})\n"
        "log(8, loss=float('nan'))\nprint(' iteration 9/ 9 | lm loss: 1 |')\nlog(8, validation_loss=2)"
    )
    training, found = run(LOGS + script)
    assert found[0] == (7, {"loss": digits, "grad_norm": math.inf}) and found[1] == (7, {"update_norm": third})
    assert found[2][0] == 8 and math.isnan(found[2][1]["loss"]) and found[3] == (8, {"validation_loss": 2})
    assert len(found) == 4 and training.last == 8 and training.loads_plugin and not training.not_finite


def test_stores_keep_their_names(run):
    """Means had no "mean" in the log's line; other quantiles were not in it."""
    _, found = run(LOGS + "log(3, sharpness_mean=1.0, centred_sharpness_mean=2.0, log_z_mean=3.0, sharpness_q99=4.0)")
    assert found == [(3, {"sharpness": 1.0, "centred": 2.0, "log_z": 3.0, "sharpness_q99": 4.0})]


@pytest.mark.parametrize("words", ["Unexpected result nan", "Unexpected result tensor(-inf)", "found NaN in local"])
def test_megatrons_words_for_what_is_not_finite(run, words):
    training, found = run(LOGS + f"log(1, loss=3.0)\nsys = __import__('sys')\nsys.exit({words!r})")
    assert training.not_finite and training.poll() == 1 and found == [(1, {"loss": 3.0})]


def test_without_the_plugin_there_is_no_file(run):
    training, found = run("print(' iteration 1/ 1 | lm loss: 5.0E+00 | number of skipped iterations: 0 |')")
    assert not training.loads_plugin and not found and training.last == 0


def test_the_folder_is_the_runs_own(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')  # left by an earlier attempt
    _, found = run(LOGS + "import sys\nlog(2, loss=3.0)\nprint(sys.argv[1:])", "--save", "{run}/x")
    assert found == [(2, {"loss": 3.0})]
    assert (tmp_path / "run/log.txt").read_text() == f"['--save', '{tmp_path}/run/x']\n"
