"""A hundred steps at each level print the losses of tests/golden/losses.json, to the last bit.

A change that is meant to change no number changes none here. One that is meant to is measured first, and then the file
is written anew, in the same commit:

    OMP_NUM_THREADS=1 python tests/cpu/test_golden.py

Bits depend on torch and on the instructions that its libraries choose for this processor. On others the tests are
skipped, and say so.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron

FILE = ROOT / "tests/golden/losses.json"
LEVELS = {  # name: flags
    "O0": "--fp8-level O0",
    "O1": "--fp8-level O1",
    "O2": "--fp8-level O2",
    "O3": "--fp8-level O3",
    "O3, FP8 sums": "--fp8-level O3 --fp8-grad-accum fp8 --fp8-activations --fp8-lm-head",
}
STEPS, FIRST = 100, 5


def machine() -> dict[str, str]:
    """What decides the bits beside this repository."""
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    maker = re.search(r"^vendor_id\s*: (\S+)", known, re.M)
    units = [unit for unit in ("avx512_bf16", "amx_bf16") if unit in known.split()]
    capability = " ".join([torch.backends.cpu.get_cpu_capability(), *units])
    return {"torch": torch.__version__, "processor": maker[1] if maker else "unknown", "instructions": capability}


def losses(flags: str, steps: int = STEPS) -> list[str]:
    """The loss of each step as a hexadecimal float, of a run of STEPS that ends after `steps`."""
    words = f"--train-iters {STEPS} --exit-interval {steps} --fp8-log-exact {flags}".split()
    run = run_megatron(1, [*TINY_GPT, *words])
    exact = [re.search(r"exact lm loss ([^;]+);", line) for line in run.lines]
    found = [float(line[1]).hex() for line in exact if line]
    assert len(found) == steps, "\n".join(run.lines[-25:])
    return found


@pytest.fixture(scope="module")
def golden() -> dict[str, list[str]]:
    known = json.loads(FILE.read_text())
    if known["machine"] != machine():
        pytest.skip(f"golden losses are of {known['machine']}, and this is {machine()}")
    return known["losses"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_steps(golden, level):
    assert losses(LEVELS[level], FIRST) == golden[level][:FIRST]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_hundred_steps(golden, level):
    assert losses(LEVELS[level]) == golden[level]


def test_levels_differ_and_learn(golden):
    """A file in which levels are equal, or losses do not fall, would guard nothing."""
    assert set(golden) == set(LEVELS) and {len(row) for row in golden.values()} == {STEPS}
    assert len({tuple(row[:FIRST]) for row in golden.values()}) == len(LEVELS)
    assert all(float.fromhex(row[-1]) < 0.9 * float.fromhex(row[0]) for row in golden.values())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    made = {level: losses(flags) for level, flags in LEVELS.items()}
    FILE.write_text(json.dumps({"machine": machine(), "losses": made}, indent=1) + "\n")
