"""benchmarks/gemm.py on small shapes, with stand-ins for the libraries and the clock (gemm_libraries.py)."""

import csv
import sys

import pytest
import torch
from gemm_libraries import Event
from launch import ROOT

from megatron_fp8.gemm import cublaslt, search
from megatron_fp8.gemm.cutlass import CUTLASS

sys.path.insert(0, str(ROOT / "benchmarks"))
import gemm as benchmark

if not cublaslt.bound():
    pytest.skip(f"no cuBLASLt: {cublaslt.why_not()}", allow_module_level=True)


def by_float64(a, b, *, scale_a, scale_b, use_fast_accum, out_dtype, out=None):
    y = (a.double() @ b.double() * scale_a * scale_b).to(out_dtype)
    return y if out is None else out.copy_(y)


@pytest.mark.parametrize("built", [True, False])
def test_every_row_is_measured_and_right(lib, cutlass, timed, monkeypatch, tmp_path, capsys, built):
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "SHAPES", {"small": (64, 48, 80), "head": (32, 96, 64)})
    monkeypatch.setattr(benchmark, "host_time", lambda: None)
    monkeypatch.setattr(torch, "_scaled_mm", by_float64)
    by_torch = benchmark.Case.by_torch
    monkeypatch.setattr(benchmark.Case, "by_torch", lambda case: (Event.clock.ran("torch"), by_torch(case)))
    monkeypatch.setattr(CUTLASS, "prepare", lambda build: None)
    if not built:
        monkeypatch.setattr(CUTLASS, "kernels", ())
    monkeypatch.setattr(sys, "argv", ["gemm.py", "--csv", str(tmp_path / "gemm.csv")])
    lib.favourites = [b"\1" * 64, b"\2" * 64]
    timed.costs = {b"\1" * 64: 2.0, b"\2" * 64: 1.0, ((128, 256), 8, 0): 0.5}
    benchmark.main()
    rows = list(csv.DictReader((tmp_path / "gemm.csv").read_text().splitlines()))
    kinds = {(row["name"], row["gemm"], row["out"]) for row in rows}
    assert len(rows) == len(kinds) == 8 + 6 + 1 and ("small", "forward + bias + residual", "BF16") in kinds
    for row in rows:
        wrong = {system: float(row[f"{system} error"]) for system in benchmark.SYSTEMS if row[f"{system} error"]}
        assert max(wrong.values()) < 4e-3 and set(wrong) >= {"torch", "first", "cublaslt"}
        assert float(row["cublaslt ms"]) < 0.7 * float(row["first ms"])
    has = {row["gemm"] for row in rows if row["cutlass ms"]}
    forward = {"forward", "forward + bias", "forward + bias + residual"}
    assert has == (forward | {"wgrad", "wgrad added"} if built else set())
    printed = capsys.readouterr().out
    assert printed.count("geometric means") == 2 and ("cutlass" in printed.split("geometric means")[1]) == built
    assert bool(cutlass.calls) == built and not search._found


def test_without_a_search_cublaslt_is_beside_cutlass_and_auto_named(lib, cutlass, timed, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "SHAPES", {"small": (64, 48, 80)})
    monkeypatch.setattr(benchmark, "OTHERS", {})
    monkeypatch.setattr(CUTLASS, "prepare", lambda build: None)
    monkeypatch.setattr(CUTLASS, "is_faster", lambda problem: problem.n == 80 and not problem.add)
    ours, others = CUTLASS.candidates, cublaslt.CUBLASLT.candidates  # the stand-in has no kernel for dgrads
    monkeypatch.setattr(CUTLASS, "candidates", lambda *args: ours(*args) or others(*args))
    monkeypatch.setattr(sys, "argv", ["gemm.py", "--usual", "--csv", str(tmp_path / "usual.csv")])
    timed.costs = {((128, 256), 8, 0): 0.5, ((128, 128), 8, 0): 0.5}
    benchmark.main()
    rows = list(csv.DictReader((tmp_path / "usual.csv").read_text().splitlines()))
    assert [row["gemm"] for row in rows] == ["dgrad", "wgrad", "wgrad added BF16", "wgrad added FP32"]
    assert [row["auto runs"] for row in rows] == ["cutlass", "cutlass", "cublaslt", "cublaslt"]
    assert [(int(row["m"]), int(row["n"]), int(row["k"])) for row in rows] == [(64, 80, 48), *[(48, 80, 64)] * 3]
    assert all(float(row["gain"]) > 0 and row["cublaslt burst ms"] for row in rows)
    assert capsys.readouterr().out.count("CUTLASS over cuBLASLt where auto runs") == 2
