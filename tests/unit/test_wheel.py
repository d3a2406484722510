"""What is built of the package carries the shipped configurations and scripts, and finds them there."""

import os
import shutil
import subprocess
import sys

import pytest
from launch import ROOT

SCRIPTS = "pretrain_gpt_fp8.py", "dpo_gpt_fp8.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_package_launches_a_shipped_job(tmp_path):
    source, built = tmp_path / "source", tmp_path / "built"
    for name in ("megatron_fp8", "configs", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", *SCRIPTS):
        shutil.copy(ROOT / name, source)
    (source / "benchmarks/results").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/results/table5.csv", source / "benchmarks/results")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=500)
    assert (built / "megatron_fp8/py.typed").is_file()
    about = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(built)]
    subprocess.run(about, cwd=source, check=True, capture_output=True, timeout=500)
    page = (built / "megatron_fp8.egg-info/PKG-INFO").read_text()
    assert "--fp8-level O3" in page and "](docs/" not in page  # links to files are words
    assert "megatron_fp8.enable()" in page and "docs/trainers.md" not in page
    where = {**os.environ, "PYTHONPATH": str(built)}
    code = "import megatron_fp8.flags.args_file as a, sys; print(a.find('model/gpt-7b'))"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True, text=True)
    assert found.stdout.strip() == str(built / "megatron_fp8/configs/model/gpt-7b.yaml"), found.stderr
    files = ["model/gpt-125m", "layout/gpt-125m-8gpus", "recipe/pretrain", "recipe/gpt-125m", "recipe/mock-data"]
    launch = [sys.executable, "-m", "megatron_fp8.cli", "launch", *files, "--nodes", "1", "--cluster", "infiniband"]
    done = subprocess.run(launch, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    job = (tmp_path / "runs/gpt-125m/gpt-125m.sbatch").read_text()
    table = [sys.executable, "-m", "megatron_fp8.cli", "table", "5", "--format", "csv"]
    printed = subprocess.run(table, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=500).stdout
    assert f"--results {built}/megatron_fp8/benchmarks/results/table5.csv" in printed and "nothing yet" not in printed
    assert "export NCCL_DEBUG=" in job
    assert all((built / "megatron_fp8/scripts" / name).is_file() for name in SCRIPTS)
    assert f"SCRIPT={built}/megatron_fp8/scripts/pretrain_gpt_fp8.py\n" in job
