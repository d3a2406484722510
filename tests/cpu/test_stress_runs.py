"""The stress suite's models at toy size: what a plant must show whatever the seed."""

import os
import subprocess
import sys

import pytest
from launch import ROOT

from megatron_fp8.tools.stress.store import read
from megatron_fp8.tools.stress.suite import JUDGED

pytestmark = pytest.mark.slow


@pytest.fixture
def measured(tmp_path):
    """measured(name): {(arm, case, at, quantity): value} of a stress, from a process of its own."""

    def measured(name: str) -> dict[tuple, float]:
        store = tmp_path / "stress.csv"
        command = [sys.executable, "-W", "ignore", "-m", "megatron_fp8.cli", "lab", "stress", "--only", name]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run([*command, "--store", str(store)], env=env, capture_output=True, text=True, timeout=1100)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        points = read(store)
        assert {(point.stress, point.seed, point.device) for point in points} == {(name, 1, "CPU, toy size")}
        return {point.found[:4]: point.found.value for point in points}

    return measured


def test_outliers_leave_the_function_and_break_a_margin(measured):
    """S2: BF16's loss is the same at every k. A margin takes of the range that outliers need, so it breaks first."""
    found = measured("S2")
    for plant in ("SwiGLU", "norm"):
        losses = {value for key, value in found.items() if (key[0], key[1], key[3]) == ("BF16", plant, "loss")}
        assert len(losses) == 1
        largest = {arm: value for (arm, case, at, _), value in found.items() if (case, at) == (plant, 65536.0)}
        assert largest["O3, margin 2"] > 3 * abs(largest["O3"]) and largest["O3, margin 2"] > 0.5
        assert all(value < 1 for (_, case, _, what), value in found.items() if (case, what) == (plant, JUDGED))


def test_jumps_are_clipped_without_a_margin(measured):
    """S3: four elements at four times the last maximum; a margin of 2 is just enough."""
    errors = {arm: value for (arm, case, at, what), value in measured("S3").items() if what == "error" and at == 4}
    assert errors["O3"] > 2 * errors["O3, tensorwise"] > 0
    assert errors["O3, margin 2"] < 1.5 * errors["O3, tensorwise"]


def test_formats_of_gradients(measured):
    """S4: rounding has no bias, and E5M2 has about twice the error of E4M3 in one product; all of them train."""
    found = {key[:2]: value for key, value in measured("S4").items()}
    for arm in ("O1, hybrid, tensorwise", "O1, e4m3, tensorwise"):
        assert found[arm, "gain, fresh"] < 3 and abs(found[arm, "loss"]) < 1
    assert found["O1, hybrid, tensorwise", "error, fresh"] > found["O1, e4m3, tensorwise", "error, fresh"] > 1


def test_an_fp8_second_moment_stands_still(measured):
    """S5: gradients 30 times smaller leave it where it was, and updates 10 times too small; FP16 in blocks follows."""
    last = {key[:2]: value for key, value in measured("S5").items() if key[3] == JUDGED}
    assert last["O2 with v in FP8", "easier, beta2 0.95"] > 80 > 1 > last["O2 and O3", "easier, beta2 0.95"]
    assert all(value < 0.3 for (arm, _), value in last.items() if arm == "O2 and O3")  # 14 to nearest, at beta2 0.999


def test_schedules(measured):
    """S8: all arms train under all schedules."""
    found = {key[:2]: value for key, value in measured("S8").items() if key[3] == JUDGED}
    assert len(found) == 6 * 4 and all(abs(value) < 5 for value in found.values())
