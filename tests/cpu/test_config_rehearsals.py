"""Rehearse every shipped combination of a model, its layout and its recipe nightly, with all ranks of a replica."""

import os
import subprocess
import sys

import pytest
from launch import ROOT
from megatron_runs import script_path

LAYOUTS = sorted(path.stem for path in (ROOT / "configs/layout").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shipped_job_passes(layout, tmp_path):
    model, _, gpus = layout.removesuffix("gpus").rpartition("-")
    files = [f"model/{model}", f"layout/{layout}", "recipe/pretrain", f"recipe/{model}", "recipe/mock-data"]
    command = ["torchrun", "--nproc-per-node", gpus, "pretrain_gpt_fp8.py", "--args-file", *files]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp8.cli", "rehearse", "--folder", str(tmp_path), "--", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": script_path(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    page = (tmp_path / "page.md").read_text()
    assert "# Rehearsal: passed" in page and f"- O3 on {gpus} GPUs" in page and "the same to the last digit" in page
