"""gemm/search.py without a GPU: timing the candidates, choosing, saving the results, and sending them to all ranks."""

import json

import pytest
import torch
from gemm_libraries import BF16, K, M, N, close, exact, scaled
from launch import forked

from megatron_fp8.gemm import (
    Epilogue,
    cublaslt,
    cutlass_check,
    gemm,
    plans,
    search,
)
from megatron_fp8.gemm import (
    found as gemm_found,
)
from megatron_fp8.gemm import (
    race as gemm_race,
)
from megatron_fp8.gemm.cublaslt import CUBLASLT
from megatron_fp8.gemm.cutlass import CUTLASS, _describe
from megatron_fp8.gemm.cutlass_build import Unavailable
from megatron_fp8.gemm.found import Choice

if not cublaslt.bound():
    pytest.skip(f"no cuBLASLt: {cublaslt.why_not()}", allow_module_level=True)

BOTH, NAME = (CUBLASLT, CUTLASS), "32 x 48 x 80 E4M3 x E4M3 -> BF16, fast"
FIRST, SECOND = b"\1" * 64, b"\2" * 64  # the heuristic's algorithms


def found(name, ms=1.0, maker="cublaslt", version=None):
    version = version or {"cublaslt": CUBLASLT.version, "cutlass": "0123456789abcdef"}[maker]
    return Choice(maker, version, name, ms, 2.0, 3.0)


def test_a_result_is_used_if_it_runs_here(lib, timed):
    a, b, out = torch.zeros(M, K).to(BF16), torch.zeros(N, K).to(BF16), torch.empty(M, N)
    search.read()
    for works, expected in ((b"\3" * 64, b"\3" * 64), (b"\4" * 64, FIRST)):
        lib.works_with = works
        search._found["32 x 48 x 80 BF16 x BF16 -> FP32"] = [found("03" * 64)]
        plans.renew()
        plans.product(a, b, out)
        assert lib.calls[-1][2] == expected


def test_the_file_is_replaced_atomically_and_a_broken_one_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    file = gemm_found.path("NVIDIA H200 (x)")
    assert file == tmp_path / "gemm/NVIDIA-H200-x-.json"
    with monkeypatch.context() as nobody:
        nobody.delenv("MEGATRON_FP8_CACHE")
        nobody.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        with pytest.raises(OSError, match="no home"):
            gemm_found.path("H200")
    old, new, other = found("01"), found("02", 0.5), found("128x256 2x1 fast 8/0", 0.7, "cutlass")
    newer = found("03", version="140000")
    assert gemm_found.load(file) == {}
    gemm_found.save(file, {"a": [old]})
    gemm_found.save(file, {"b": [other, old]})
    gemm_found.save(file, {"b": [new], "a": [newer]})
    held = {"a": [newer, old], "b": [new, other]}  # one for each maker and version
    assert gemm_found.load(file) == held and list(file.parent.iterdir()) == [file]
    good = json.loads(file.read_text())["a"][0]
    for broken in ("", "[]", "{", '{"a": 3}', '{"a": [3]}', '{"a": [{"algo": "01", "ms": 1}]}'):
        file.write_text(broken)
        assert gemm_found.load(file) == {}
    for wrong in ({"name": 3}, {"ms": 0}, {"first_ms": "1"}):
        file.write_text(json.dumps({"a": [good | wrong]}))
        assert gemm_found.load(file) == {}
    broken = file.read_text()
    with pytest.raises(TypeError):
        gemm_found.save(file, {"a": [found(b"1")]})  # cannot be written
    assert file.read_text() == broken and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("costs", "among", "fastest"),
    [
        ({FIRST: 1.0, SECOND: 0.5}, BOTH, ("cublaslt", SECOND.hex())),
        ({FIRST: 1.0, SECOND: 0.995}, (CUBLASLT,), ("cublaslt", FIRST.hex())),  # less than 1 % faster
        ({FIRST: 1.0, SECOND: 2.0, ((128, 256), 8, 2): 0.5}, BOTH, ("cutlass", "128x256 2x1 fast 8/2")),
        ({FIRST: 1.0, SECOND: 2.0, ((128, 256), 8, 2): 0.995}, BOTH, ("cublaslt", FIRST.hex())),
        ({FIRST: 0.1, ((128, 256), 4, 0): 0.9}, (CUTLASS,), ("cutlass", "128x256 2x1 fast 4/0")),
        # the GPU gets hot: the candidate timed last would lose, and this one is last
        ({((128, 256), 1, 2): 0.97}, BOTH, ("cutlass", "128x256 2x1 fast 1/2")),
    ],
)
def test_the_fastest_of_both_is_found_and_runs_from_then_on(served, cutlass, timed, costs, among, fastest):
    timed.costs = costs
    a, b = scaled(M, K), scaled(N, K)
    assert search.read(among) == 0
    first = gemm(a, b, fast_accum=True)
    (line,) = search.tune()
    assert line.startswith(f"GEMM {NAME}: {fastest[0]} ") and "the first choice" in line and "BF16" in line
    assert close(gemm(a, b, fast_accum=True), exact(a, b), 2**-8)
    (plan,) = plans.plans()
    assert (plan.maker, plan.name) == fastest
    assert torch.equal(first, gemm(a, b, fast_accum=True)) and search.tune() == []
    best, *rest = gemm_found.load(gemm_found.path("GPU"))[NAME]
    assert {best.maker, *(one.maker for one in rest)} == {maker.name for maker in among}
    search.forget()
    assert gemm(a, b, fast_accum=True) is not None and plans.plans()[0].name == FIRST.hex()
    assert search.read(among) == 1 and search.tune() == []  # the file has the result
    gemm(a, b, fast_accum=True)
    assert (plans.plans()[0].maker, plans.plans()[0].name) == fastest


def test_a_search_that_cannot_be_saved_is_used_all_the_same(served, cutlass, timed, monkeypatch):
    timed.costs = {FIRST: 1.0, SECOND: 0.5}
    monkeypatch.delenv("MEGATRON_FP8_CACHE")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert search.read(BOTH) == 0
    gemm(scaled(M, K), scaled(N, K), fast_accum=True)
    _, line = search.tune()
    assert line == "the GEMM search is not saved for the next run: no home; set MEGATRON_FP8_CACHE"
    gemm(scaled(M, K), scaled(N, K), fast_accum=True)
    assert plans.plans()[0].name == SECOND.hex()


def test_plans_that_fail_or_give_another_result_are_left_out(served, cutlass, timed, monkeypatch):
    timed.costs = {FIRST: 1.0, SECOND: 0.9, ((128, 256), 8, 1): 0.1, ((128, 128), 8, 1): 0.2}
    gemm(scaled(M, K), scaled(N, K), fast_accum=True)
    real = gemm_race._Operands.result_of

    def result_of(self, plan):
        if plan.name == "128x256 2x1 fast 8/1":
            return real(self, plan) + 1
        if plan.name == "128x128 2x1 fast 8/1":
            raise RuntimeError("no launch")
        return real(self, plan)

    monkeypatch.setattr(gemm_race._Operands, "result_of", result_of)
    search.read(BOTH)
    gemm(scaled(M, K), scaled(N, K), fast_accum=True)
    search.tune()
    (choices,) = gemm_found.load(gemm_found.path("GPU")).values()
    assert choices[0].name == SECOND.hex() and not choices[1].name.endswith("8/1")


def test_a_new_library_is_searched_again_and_the_old_results_stay(served, cutlass, timed, monkeypatch):
    timed.costs = {FIRST: 1.0, ((128, 256), 8, 0): 0.5}
    a, b = scaled(M, K), scaled(N, K)
    for version, expected in (("1" * 16, (0, 1)), ("2" * 16, (1, 1)), ("1" * 16, (1, 0))):
        monkeypatch.setattr(CUTLASS, "version", version)
        known = search.read(BOTH)  # cuBLASLt's result is valid in any case
        gemm(a, b, fast_accum=True)
        assert (known, len(search.tune())) == expected
    versions = [one.version for one in gemm_found.load(gemm_found.path("GPU"))[NAME] if one.maker == "cutlass"]
    assert sorted(versions) == ["1" * 16, "2" * 16]


def test_the_summary_names_gemms_no_faster_than_bf16(served, cutlass, timed):
    assert search.summary() == "FP8 GEMMs: none was searched"
    timed.costs = {FIRST: 1.0, SECOND: 1.0, "BF16": 0.5, ((128, 256), 8, 0): 0.25, ((128, 128), 8, 0): 0.25}
    search.read(BOTH)
    a, b = scaled(M, K), scaled(N, K)
    gemm(a, b, fast_accum=True)
    gemm(a, b, Epilogue(dtype=torch.float16))  # CUTLASS has no kernel for it
    plans.product(torch.zeros(M, K).to(BF16), torch.zeros(N, K).to(BF16), torch.zeros(M, N))
    assert len(search.tune()) == 3
    line = search.summary()
    assert line.startswith("FP8 GEMMs: 2 shapes (1 by cublaslt, 1 by cutlass), geometric means: ")
    assert " x the first choice, 1.00 x BF16; no faster than BF16: 32 x 48 x 80 E4M3 x E4M3 -> FP16 (0.5" in line
    assert line.endswith("operands 0.0 MB smaller)") and line.count("E4M3 x") == 1


def test_the_makers_to_choose_from(lib, timed, cutlass, monkeypatch):
    asked = []
    monkeypatch.setattr(search, "read", lambda among: asked.append([one.name for one in among]) or 5)
    monkeypatch.setattr(CUTLASS, "prepare", lambda build: None if not build else pytest.fail("built"))
    monkeypatch.setattr(search, "_among", BOTH)
    for backend in ("auto", "cublaslt", "cutlass"):
        assert search.read_for(backend) == (5, [])
    assert asked == [["cublaslt", "cutlass"], ["cublaslt"], ["cutlass"]]

    def prepare(build):
        raise Unavailable("they are not built; run once: megatron-fp8 build")

    monkeypatch.setattr(CUTLASS, "prepare", prepare)
    monkeypatch.setattr(search, "_among", (CUBLASLT,))
    _, (line,) = search.read_for("auto")
    assert asked[-1] == ["cublaslt"] and line.startswith("--fp8-gemm-search: cuBLASLt alone: they are not built; run")


def test_the_first_choice_runs_without_a_search(served, cutlass, timed):
    """With backend auto the first choice may be a CUTLASS kernel; the search compares with it."""
    ours = ((128, 256), 8, 0)
    timed.costs = {FIRST: 2.0, SECOND: 2.0, ours: 1.0}
    a, b = scaled(M, K), scaled(N, K)
    plans.serve(lambda problem: CUTLASS)
    search.read(BOTH)
    gemm(a, b, fast_accum=True)
    (usual,) = plans.plans()
    search.tune()
    (choices,) = gemm_found.load(gemm_found.path("GPU")).values()
    assert {choice.first_ms for choice in choices} == {choices[0].ms} and choices[0].name == usual.name
    assert [choice.maker for choice in choices] == ["cutlass", "cublaslt"]


def test_a_wrong_library_does_not_serve(lib, cutlass, timed, monkeypatch):
    cutlass.KERNELS = ((1, 0, 2, 256, (128, 256)),)
    monkeypatch.setattr(CUTLASS, "kernels", (_describe(cutlass, 0),))
    state = torch.get_rng_state()
    assert cutlass_check.fault(M, N, K) == "" and torch.equal(state, torch.get_rng_state())
    right = cutlass.mfp8_gemm

    def half_of_it(index, args):
        args._obj.m //= 2
        return right(index, args)

    cutlass.mfp8_gemm = half_of_it  # does not write the rest
    assert cutlass_check.fault(M, N, K).startswith("its product differs from cuBLASLt's by nan")
    with monkeypatch.context() as without:
        without.setattr(CUTLASS, "kernels", ())
        assert cutlass_check.fault(M, N, K).startswith(f"its library has no kernel for {M} x {N} x {K} E5M2 x E4M3")
    cutlass.mfp8_gemm, cutlass.status = right, 3
    with pytest.raises(RuntimeError, match="the launch failed"):  # why_not reports it to all ranks
        cutlass_check.fault(M, N, K)


@pytest.mark.parametrize(
    ("fails", "said"),
    [(None, ""), (Unavailable("not built"), "not built"), (PermissionError(13, "No entry"), "[Errno 13] No entry")],
)
def test_why_cutlass_does_not_serve(lib, monkeypatch, fails, said):
    def prepare(build):
        if fails:
            raise fails

    monkeypatch.setattr(CUTLASS, "prepare", prepare)
    assert cutlass_check.why_not() == said
    monkeypatch.setattr(cublaslt, "bound", lambda: False)
    monkeypatch.setattr(cublaslt, "why_not", lambda: "no library")
    assert fails or cutlass_check.why_not().endswith("is not bound: no library")


def test_rank_0_searches_problems_without_a_result(lib, timed, monkeypatch):
    asked = []

    def race(problem, makers, device):
        asked.append(str(problem))
        if problem.add:
            raise cublaslt.CublasLtError("cuBLASLt: nothing ran")
        return [found("02" * 64)]

    monkeypatch.setattr(gemm_race, "race", race)
    a, b, out = torch.zeros(M, K).to(BF16), torch.zeros(N, K).to(BF16), torch.zeros(M, N)
    assert search.read() == 0
    for add in (False, True):
        plans.product(a, b, out, add=add)
    lines = search.tune()
    name = "32 x 48 x 80 BF16 x BF16 -> FP32"
    assert asked == [name, f"{name}, added"] and "first choice stays" in lines[1]
    plans.product(a, b, out)
    assert lib.calls[-1][2] == SECOND
    assert search.read() == 1
    search.tune()
    assert asked == [name, f"{name}, added"]  # one is in the file, the other did not occur again
    search.forget()
    plans.product(a, b, out)
    assert lib.calls[-1][2] == FIRST


RANKS = """
import torch, torch.distributed as dist
from megatron_fp8.gemm import cutlass_check, plans, race as gemm_race, search as gemm_search
from megatron_fp8.gemm.cublaslt import CUBLASLT
from megatron_fp8.gemm.cutlass import CUTLASS
from megatron_fp8.gemm.found import Choice
from megatron_fp8.gemm.plans import Problem
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.get_device_name = lambda: f"GPU {rank}"
torch.cuda.current_device, torch.cuda.empty_cache = lambda: 0, lambda: None
bf16, how = torch.bfloat16, (True, True, 32, 32, 16, 16, False, None, False)
problems = [Problem(m, 16, 32, bf16, bf16, bf16, *how) for m in (16, 32, 48)]
met = [problems[:2], problems[1:]][rank]
plans.plans = lambda: [type("Plan", (), {"problem": problem}) for problem in met]
searched = []
def race(problem, makers, device):
    searched.append(problem)
    return [Choice("cublaslt", CUBLASLT.version, f"{problem.m:02d}" * 64, 1.0, 2.0)]
gemm_race.race = race
assert gemm_search.read() == 0
lines = gemm_search.tune()
assert len(searched) == len(lines) == (3 if rank == 0 else 0), (rank, searched)
assert [gemm_search.chosen(problem).name[:2] for problem in problems] == ["16", "32", "48"]
gemm_search.forget()
assert plans.searched is None and gemm_search.chosen(problems[0]) is None
CUTLASS.version = "a library"
assert gemm_search.read((CUBLASLT, CUTLASS)) == 3  # rank 0's file: the other's has another name
assert [gemm_search.chosen(problem).name[:2] for problem in problems] == ["16", "32", "48"]
assert gemm_search._among == (CUBLASLT, CUTLASS)
CUTLASS.version = f"rank {rank}'s"
gemm_search.read((CUBLASLT, CUTLASS))
assert gemm_search._among == (CUBLASLT,)
CUTLASS.prepare, cutlass_check.cublaslt.bound, cutlass_check.fault = lambda build: None, lambda: True, lambda: ""
assert cutlass_check.why_not() == "rank 1: its CUTLASS library is rank 1's, but rank 0's is rank 0's"
CUTLASS.version = "a library"
assert cutlass_check.why_not() == ""
def prepare(build):
    if rank == 1:
        raise PermissionError(13, "Permission denied")
CUTLASS.prepare = prepare  # the other rank does not wait for ever
assert cutlass_check.why_not() == "rank 1: [Errno 13] Permission denied"
dist.destroy_process_group()
"""


def test_all_ranks_use_rank_0s_search(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    env = {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_FP8_CACHE": str(tmp_path)}
    forked(2, [str(tmp_path / "ranks.py")], tmp_path / "log", timeout=250, env=env)
    assert [file.name for file in (tmp_path / "gemm").iterdir()] == ["GPU-0.json"]
