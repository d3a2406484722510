"""Every benchmark finds the package of its own checkout: without PYTHONPATH, without an install, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def test_they_find_their_own_package(tmp_path):
    """In a process of its own, that forks one for each benchmark: torch is imported once."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, str(ROOT / "benchmarks"), *BENCHMARKS]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = dict(line.split() for line in run.stdout.splitlines())
    assert found.keys() == set(BENCHMARKS)
    for name in ("fused_activation", "fused_norm", "fused_qkv", "gemm", "grad_storage", "lab", "ops", "optimizer_step"):
        assert found[name] == str(ROOT / "megatron_fp8/__init__.py")
    assert set(found.values()) <= {str(ROOT / "megatron_fp8/__init__.py"), "none"}


def main(folder: str, *names: str) -> None:
    """Import each as `python FOLDER/NAME.py` would on a machine that has no megatron_fp8 installed."""
    sys.path[:] = [folder, *(p for p in sys.path[1:] if not (Path(p) / "megatron_fp8").is_dir())]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from triton.testing import do_bench

    assert "megatron_fp8" not in sys.modules and torch and rope_utils and do_bench
    for name in names:
        if (child := os.fork()) == 0:
            __import__(name)
            print(name, getattr(sys.modules.get("megatron_fp8"), "__file__", "none"), flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            sys.exit(f"{name}: import fails")


if __name__ == "__main__":
    main(*sys.argv[1:])
