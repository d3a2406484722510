"""No flag of the model is lost: a level builds what stock's Transformer Engine spec builds, over all Megatron's flags.

The comparison is made in a process of its own, where a stand-in for Transformer Engine is imported before Megatron.
Every change compares the first line of each flag, and what is refused. The nightly tests compare a flag's other lines.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from architecture_cases import EXCLUDED, NO_EFFECT, REFUSED, architecture_flags, case_lines

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = case_lines()
REFUSED = set(case_lines(REFUSED))


def flag_of(case: str) -> str:
    return case.split()[0].partition("=")[0]


def for_every_change(case: str) -> bool:
    first = next(other for other in CASES if flag_of(other) == flag_of(case))
    return case == first or case in REFUSED


@pytest.fixture(scope="module")
def compared(request) -> dict[str, dict]:
    """{case: result}; of the nightly cases too if one is asked for."""
    here = [item for item in request.session.items if item.path == request.path]
    nightly = any(item.get_closest_marker("slow") for item in here)
    cases = [case for case in CASES if nightly or for_every_change(case)]
    script = [sys.executable, "tests/scripts/compare_architectures.py", *cases]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, env=env, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["case"]: result for result in results}


def test_every_flag_of_the_model_is_tried_or_excluded(parser):
    tried = {flag_of(case) for case in CASES}
    excluded = [flag for flags in EXCLUDED.values() for flag in flags.split()]
    assert len(excluded) == len(set(excluded))
    assert not tried & set(excluded)
    assert tried | set(excluded) == architecture_flags(parser)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if for_every_change(case) else pytest.mark.slow) for case in CASES]
)
def test_a_level_builds_and_computes_what_stock_does_or_refuses(case, compared):
    result = compared[case]
    if case in REFUSED:
        assert result["verdict"] == "refused"
        (message,) = result["details"]
        assert "\n" not in message and message.startswith("--")
    else:
        assert result["verdict"] == "same", result["details"]


def test_every_flag_shows_in_stocks_model(compared):
    seen = {flag_of(case) for case, result in compared.items() if result.get("effect", True)}
    assert {flag_of(case) for case in CASES} - seen == set(NO_EFFECT)
