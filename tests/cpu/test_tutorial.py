"""Runs docs/tutorial.md's commands unchanged in an empty folder: all of its `sh` blocks in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.S)


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    assert len(BLOCKS) >= 6
    script = "set -e\n" + "\n".join(f"echo '== {number}'\n{block}" for number, block in enumerate(BLOCKS))
    bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": bins, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    _, bought, planned, rehearsed, compared, launched = re.split(r"== \d\n", done.stdout)[1:]
    # the text's claims about them
    assert re.search(r"peak memory, GB +33\.3 +\S+ +19\.8\n", bought)
    assert re.search(r"largest micro-batch that fits +8 +8 +16\n", bought)
    assert re.search(r"bound by +the host +the host +the host\n", bought)
    stock, _, level = re.search(r"step, ms +([\d,]+) +([\d,]+) +([\d,]+)\n", bought).groups()
    assert float(level.replace(",", "")) > float(stock.replace(",", ""))
    rates = re.search(r"tokens/s/GPU with it +([\d,]+) +([\d,]+) +([\d,]+)\n", bought).groups()
    assert max(rates, key=lambda rate: float(rate.replace(",", ""))) == rates[2]
    assert "TP 2, PP 1 (as given)" in planned and "the fastest" in planned
    assert re.search(r"Slower layouts that fit and are not shown: \d+ [(]--all", planned)
    assert "Rehearsal: " in rehearsed and "FAILED" not in rehearsed and "Nothing that could be seen here" in rehearsed
    assert "loss: largest, mean difference" in compared
    assert re.search(r"fits, GB left .* yes, [\d.]+\n", launched)
    assert "--global-batch-size 512" in launched and "gpt-7b.sbatch" in launched
    assert (tmp_path / "runs/gpt-7b/gpt-7b.sbatch").is_file()
