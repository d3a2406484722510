"""`megatron-fp8 build -- COMMAND` on a GPU: afterwards neither the job nor a second build compiles anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron

pytestmark = pytest.mark.gpu
EVALUATES = "--split 8,1,1 --eval-iters 1 --eval-interval 5".split()


def build(flags: list[str], environment: dict[str, str]) -> tuple[int, int]:
    """(Kernels compiled, kernels found in the cache)."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "megatron_fp8.cli", "build", "--", "python", "pretrain_gpt_fp8.py", *flags]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment},
                          capture_output=True, text=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"stage 0: (\d+) kernels compiled in \d+ s, (\d+) were cached", done.stdout)
    return int(found[1]), int(found[2])


def kernels(cache: Path) -> set[str]:
    """The folders of compiled kernels; their names are the kernels' hashes."""
    return {file.parent.name for file in cache.rglob("*.cubin")}


@pytest.mark.parametrize("flags", ["--fp8-level O1 --fp8-log-interval 4", "--fp8-level O3 --fp8-lm-head"])
def test_a_job_compiles_nothing_after_it(tmp_path, flags):
    job, cache = [*TINY_GPT, *EVALUATES, *flags.split()], tmp_path / "triton"
    environment = {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    compiled, there = build(job, environment)
    assert compiled > 20 and there == 0
    before = kernels(cache)
    assert len(before) >= compiled
    run_megatron(1, job, gpu=True, env=environment)
    assert kernels(cache) == before
    again, found = build(job, environment)
    # Inductor's own cache keeps some kernels from Triton's the second time.
    assert again == 0 and compiled / 2 < found <= compiled
