"""The comparison of tests/unit/test_architecture.py with Transformer Engine itself, for a few models."""

import json
import os
import subprocess
import sys

import pytest
from architecture_cases import MLA, MOE, MTP
from launch import ROOT

from megatron_fp8.flags.stock import TE, installed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not installed(TE), reason="needs Transformer Engine")]
CASES = [
    "--norm-epsilon 1e-5",
    "--swiglu --disable-bias-linear --normalization RMSNorm",
    "--group-query-attention --num-query-groups 2",
    "--qk-layernorm",
    "--qk-l2-norm",
    "--window-size 4,0",
    "--softmax-type learnable",
    MTP,
    MOE,
    MLA,
    f"--q-lora-rank 48 --qk-layernorm {MLA}",
]


@pytest.fixture(scope="module")
def compared():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    script = [sys.executable, "tests/scripts/compare_architectures.py", "--real-te", *CASES]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["case"]: result for result in results}


@pytest.mark.parametrize("case", CASES)
def test_a_level_builds_what_transformer_engine_builds(case, compared):
    assert compared[case]["verdict"] == "same", compared[case]["details"]
