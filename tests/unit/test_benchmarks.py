"""Every benchmark imports the package of its own checkout, without PYTHONPATH or an install, from any folder. It prints
its help on request, without running or overwriting anything."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = "kinds", "stamp", "timed_rows", "token_files", "function_pairs", "carried_model"  # shared by benchmarks
MEGATRONS = "profile_gpt", "tuned_gpt"  # their flags are Megatron's
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def results() -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in (ROOT / "benchmarks/results").rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.slow  # an import of torch and Megatron of its own, for files that no run imports
def test_they_find_their_own_package_and_help(tmp_path):
    """In one process that forks for each benchmark, so that torch is imported once."""
    before = results()
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, str(ROOT / "benchmarks"), *BENCHMARKS]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert results() == before
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("found ")]
    found = {name: path for _, name, path in lines}
    assert {line.split()[1] for line in run.stdout.splitlines() if line.startswith("usage: ")} == {
        f"{name}.py" for name in BENCHMARKS if name not in (*MODULES, *MEGATRONS)
    }
    assert found.keys() == set(BENCHMARKS)
    for name in ("fused_activation", "fused_norm", "fused_qkv", "gemm", "grad_storage", "lab", "ops", "optimizer_step"):
        assert found[name] == str(ROOT / "megatron_fp8/__init__.py")
    assert set(found.values()) <= {str(ROOT / "megatron_fp8/__init__.py"), "none"}


def main(folder: str, *names: str) -> None:
    """`python FOLDER/NAME.py --help` of each, as on a machine without megatron_fp8."""
    sys.path[:] = [folder, *(p for p in sys.path[1:] if not (Path(p) / "megatron_fp8").is_dir())]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from triton.testing import do_bench

    assert "megatron_fp8" not in sys.modules and torch and rope_utils and do_bench
    for name in names:
        if (child := os.fork()) == 0:
            sys.argv = [f"{name}.py", "--help"]
            code = 0
            try:
                runpy.run_path(f"{folder}/{name}.py", run_name=name if name in MEGATRONS else "__main__")
            except SystemExit as end:
                code = end.code
            print("found", name, getattr(sys.modules.get("megatron_fp8"), "__file__", "none"), flush=True)
            os._exit(code or 0)
        status = os.waitpid(child, 0)[1]
        if status:
            sys.exit(f"{name} --help fails")


if __name__ == "__main__":
    main(*sys.argv[1:])
