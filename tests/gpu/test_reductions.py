"""Gradient reductions through NCCL, in one level and in two, bit for bit against sums of blocks."""

import json

import pytest
import torch
from launch import ROOT, torchrun
from megatron_runs import script_path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_reductions(tmp_path):
    gpus = min(8, torch.cuda.device_count() // 2 * 2)
    script = str(ROOT / "tests/scripts/reductions.py")
    env = {"PYTHONPATH": script_path()}
    lines = torchrun(gpus, [script], tmp_path / "log", timeout=120, env=env)
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) >= 3 and set(found.values()) == {gpus}, found
