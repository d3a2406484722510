"""The CUTLASS library: its file name, its single build, error lines, and the choice of a kernel without a search."""

import ctypes
import ctypes.util
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lab_runs import gone, wait_for
from launch import ROOT, forked

from megatron_fp8.cli import main
from megatron_fp8.gemm import cutlass_build as build
from megatron_fp8.gemm import plans
from megatron_fp8.gemm.cublaslt import CUBLASLT
from megatron_fp8.gemm.cutlass import CUTLASS, ORDERS, Choice, Cutlass, Kernel
from megatron_fp8.gemm.interface import prepared, serving, use
from megatron_fp8.gemm.plans import Problem

NVCC = """#!/bin/sh
# Stands in for nvcc: logs its arguments, and "compiles" by writing them to the output.
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.48"; exit; fi
echo "$@" >> "$CALLS"
for last; do :; done
case "$*" in *"$BROKEN"*) [ -n "$BROKEN" ] && { echo "gemm.cuh(3): error: no such thing"; exit 2; };; esac
echo "$@" > "$last"
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a stand-in for nvcc, CUTLASS' headers and an empty cache: (folder, the file of nvcc's calls)."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    version = tmp_path / "site/cutlass_library/source/include/cutlass/version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n")
    (tmp_path / "site/cutlass_library/__init__.py").touch()
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    places = {"CUDA_HOME": tmp_path / "cuda", "MEGATRON_FP8_CACHE": tmp_path / "cache", "CALLS": calls}
    for name, value in {**places, "BROKEN": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MEGATRON_FP8_CUTLASS", raising=False)
    return tmp_path, lambda: calls.read_text().splitlines()


def test_it_is_built_once_and_logged(machine):
    folder, calls = machine
    said = []
    built = build.library(jobs=2, say=said.append)
    assert built.parent == folder / "cache" and built.is_file()
    first = calls()
    sources = sorted(path.name for path in build.SOURCES.glob("*.cu"))
    before, after = said
    assert f"{len(sources)} files, 2 compilers" in before
    assert str(built) in after and "nvcc 13.0.48, CUTLASS 4.2.0" in after
    compiled = sorted(Path(re.search(r"-c (\S+)", call)[1]).name for call in first if " -c " in call)
    assert compiled == sources and len(sources) > 3 and len(first) == len(sources) + 1
    assert all(build.TARGET in call for call in first)
    assert build.library(say=said.append) == built and calls() == first and len(said) == 2
    assert sorted(path.suffix for path in built.parent.iterdir()) == [".lock", ".so"]  # no temporary files


def test_an_interrupted_build_leaves_no_compiler_and_no_files(machine):
    folder, calls = machine
    (folder / "cuda/bin/nvcc").write_text(NVCC.replace('echo "$@" >> "$CALLS"', 'echo $$ >> "$CALLS"; sleep 600'))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}/site"}
    command = [sys.executable, "-m", "megatron_fp8.cli", "build", "--jobs", "2"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as building:
        wait_for(lambda: len(calls()) == 2)
        building.terminate()
        assert building.communicate(timeout=60)[1].splitlines()[-1] == "interrupted" and building.returncode == 130
    assert len(calls()) == 2 and all(gone(int(compiler)) for compiler in calls())
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".lock"]


def test_its_name_changes_with_sources_flags_and_versions(tmp_path, monkeypatch):
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    keys = [build.key()]
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-lineinfo"])
    keys.append(build.key())
    with open(tmp_path / "csrc/promoted.cuh", "a") as file:
        file.write("\n")
    keys.append(build.key())
    (tmp_path / "csrc/promoted.cuh").rename(tmp_path / "csrc/other.cuh")
    keys.append(build.key())
    assert len(set(keys)) == 4 and keys[-1] == build.key()


def test_a_node_that_only_trains_needs_no_compiler(machine, monkeypatch):
    folder, calls = machine
    built = build.library(jobs=2)
    assert build.version(built) == f"{build.key()}-nvcc13.0.48-cutlass4.2.0"
    first = calls()
    (folder / "cuda/bin/nvcc").unlink()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.library() == build.library(build=False) == built and calls() == first
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-lineinfo"])  # the library in the cache has other flags
    with pytest.raises(build.Unavailable, match=r"not built \(none in .*\); run once: megatron-fp8 build"):
        build.library(build=False)
    monkeypatch.delenv("MEGATRON_FP8_CACHE")
    monkeypatch.setattr(build.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    with pytest.raises(build.Unavailable, match="Could not determine home; set MEGATRON_FP8_CACHE"):
        build.library(build=False)


def reason(match: str) -> str:
    with pytest.raises(build.Unavailable, match=match) as caught:
        build.library(jobs=2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_machine_that_cannot_build_says_why_in_one_line(machine, monkeypatch):
    folder, _ = machine
    monkeypatch.setenv("BROKEN", "e5m2_fast.cu")
    reason(r"nvcc failed \(e5m2_fast.cu\): gemm.cuh\(3\): error: no such thing")
    assert not list((folder / "cache").glob("*.so"))
    monkeypatch.setenv("BROKEN", "")
    (folder / "taken").touch()
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(folder / "taken"))
    reason("taken: .*; set MEGATRON_FP8_CACHE")
    nvcc = folder / "cuda/bin/nvcc"
    nvcc.write_text(NVCC.replace("V13.0.48", "V12.1.9"))
    reason("nvcc: version 12.1.9; the CUTLASS GEMMs need 12.3 or newer")
    nvcc.write_text(NVCC.replace("V13.0.48", "nothing"))
    reason("--version names no version")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    nvcc.write_text(NVCC)
    reason("no CUTLASS headers .*; pip install 'nvidia-cutlass==4.2.\\*'")
    nvcc.unlink()
    reason("no nvcc .*; install the CUDA toolkit or set CUDA_HOME")
    monkeypatch.setenv("MEGATRON_FP8_CUTLASS", str(folder / "elsewhere.so"))
    reason("MEGATRON_FP8_CUTLASS=.*elsewhere.so: no such file")


def test_a_named_library_is_used_and_a_foreign_one_refused(tmp_path, monkeypatch):
    stranger = tmp_path / "stranger.so"
    stranger.write_text("no library")
    monkeypatch.setenv("MEGATRON_FP8_CUTLASS", str(stranger))
    assert build.library() == stranger
    with pytest.raises(build.Unavailable, match="not a library of these GEMMs"):
        build.load(stranger)
    with pytest.raises(build.Unavailable, match="not a library of these GEMMs"):
        build.load(Path(ctypes.util.find_library("c") or "libc.so.6"))
    with pytest.raises(build.Unavailable, match="not a library of these GEMMs"):  # a backend that was chosen by name
        monkeypatch.setattr(CUTLASS, "_library", None)
        use("cutlass")
    assert serving("cuda").name != "cutlass"


def test_it_serves_only_if_chosen(monkeypatch):
    """The backend "cutlass" plans all problems that CUTLASS takes; "auto" only those that it runs faster."""
    assert serving("cuda").name == "cublaslt"
    monkeypatch.setattr(plans, "maker_of", plans.maker_of)  # monkeypatch restores it
    monkeypatch.setattr(CUTLASS, "prepare", lambda: None)
    monkeypatch.setattr(CUTLASS, "kernels", (kernel(128, 256, (2, 1), 256),))
    monkeypatch.setattr(CUTLASS, "multiprocessors", 132)
    problems = problem_of(8192, 4096, 8192), problem_of(2304, 768, 8192), problem_of(64, 40, 32)
    for name, ours in (("cutlass", 2), ("auto", 1), ("cublaslt", 0)):
        makers = [CUTLASS] * ours + [CUBLASLT] * (3 - ours)
        assert [prepared(name).maker_of(problem) for problem in problems] == makers, name
        assert [plans.maker_of(problem) for problem in problems] == makers, name


def test_the_verb_prints_the_path_or_the_error(machine, monkeypatch, capsys):
    folder, _ = machine
    assert main(["build", "--jobs", "2"]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).parent == folder / "cache" and printed.err.count("built the CUTLASS GEMMs") == 1
    assert main(["build"]) == 0 and capsys.readouterr() == (printed.out, "")
    with pytest.raises(SystemExit):
        main(["build", "--jobs", "0"])
    assert capsys.readouterr().err.startswith("megatron_fp8: --jobs 0: use 1 or more\n")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(folder / "empty"))
    assert main(["build"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("megatron-fp8 build: no nvcc") and printed.err.count("\n") == 1


def test_processes_that_start_together_build_it_once(machine):
    folder, calls = machine
    code = "from megatron_fp8.gemm import cutlass_build as b; print('made', b.library(jobs=1))"
    (folder / "both.py").write_text(code)
    lines = forked(2, [str(folder / "both.py")], folder / "log", timeout=250, env={"PYTHONPATH": str(folder / "site")})
    made = [line for line in lines if line.startswith("made ")]
    assert len(made) == 2 and len(set(made)) == 1 and "\n".join(lines).count("built the CUTLASS GEMMs") == 1
    assert len(calls()) == len(list(build.SOURCES.glob("*.cu"))) + 1


def test_structures_are_the_headers():
    text = (build.SOURCES / "abi.h").read_text()
    assert int(re.search(r"#define MFP8_ABI (\d+)", text)[1]) == build.ABI
    all_three = ((build.Args, "mfp8_args"), (build.GroupedArgs, "mfp8_grouped_args"), (build.Info, "mfp8_info"))
    for structure, name in all_three:
        body = re.sub(r"//.*", "", re.search(r"\{([^{}]*)\} " + name, text)[1])
        fields = [
            (field.strip(" *"), "*" in field or "*" in declaration.split(",")[0])
            for declaration in body.split(";")
            if declaration.strip()
            for field in re.sub(r"^\s*(const\s+)?(void|int\d\d_t)", "", declaration).split(",")
        ]
        expected = [(field, kind is ctypes.c_void_p) for field, kind in structure._fields_]
        assert fields == expected


E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


def kernel(m, n, cluster=(1, 1), promote=128):
    return Kernel(0, E4M3, E4M3, BF16, promote, (m, n), cluster, False)


def problem_of(m, n, k, fast=False):
    return Problem(m, n, k, E4M3, E4M3, BF16, True, True, k, k, n, 16, fast, None, False)


def _estimate(choice, problem):
    return CUTLASS.estimate(choice, problem)


@pytest.mark.parametrize(
    ("m", "n", "best"),
    [(8192, 16384, (128, 256)), (128 * 132, 128, (128, 128)), (4096, 192 * 33, (128, 192))],
)
def test_the_cheapest_tile_wastes_no_wave(m, n, best):
    problem = problem_of(m, n, 4096)
    kernels = [kernel(128, 256), kernel(128, 192), kernel(128, 128)]
    assert min(kernels, key=lambda k: _estimate(Choice(k), problem)).tile == best


def test_an_estimate_counts_whole_clusters_and_whole_waves():
    problem = problem_of(128 * 132, 256, 4096)
    one = _estimate(Choice(kernel(128, 256)), problem)
    assert one == 128 * 256
    outside = Choice(kernel(128, 256, (1, 2)), swizzle=1)
    assert _estimate(outside, problem) == 2 * one  # every second tile of a cluster
    longer = problem_of(128 * 133, 256, 4096)
    assert _estimate(Choice(kernel(128, 256)), longer) == 2 * one


@pytest.mark.parametrize(
    ("n", "swizzle", "across"), [(768, 8, 16), (768, 2, 8), (768, 1, 6), (1024, 8, 16), (1024, 4, 8), (128, 8, 4)]
)
def test_an_estimate_counts_whole_bundles(n, swizzle, across):
    """With bundles of 8, 32,768 x 768 took 2.3 times as long as cuBLASLt, whose tiles are all inside the matrix."""
    rows_of_tiles = 128
    choice = Choice(kernel(256, 128, (1, 2)), swizzle)
    waves = -(-rows_of_tiles * across // 132)
    assert _estimate(choice, problem_of(256 * rows_of_tiles, n, 4096)) == waves * 256 * 128


def test_another_order_is_chosen_if_the_usual_one_wastes_tiles():
    maker = Cutlass()
    maker.kernels, maker._library = (kernel(256, 128, (1, 2)),), ctypes.CDLL(None)
    maker._library.mfp8_gemm = lambda index, args: 0
    for n, swizzle in ((4096, 8), (1024, 4), (768, 1)):
        (first,) = maker.candidates(problem_of(32768, n, 8192), 0, (1, 2, 3), 1)
        assert first.choice.swizzle == swizzle, n


@pytest.mark.parametrize(
    ("m", "n", "taken"),
    [
        (8192, 4096, True),  # 7.76 waves of 256 x 128
        (2048, 4096, True),  # 1.94
        (4608, 12288, False),  # 13.09
        (12288, 1536, False),  # 4.36
        (2304, 768, False),  # 0.41
        (32768, 768, False),  # 5.8, but of two tiles side by side one would be outside
    ],
)
def test_is_faster_for_promoted_products_with_full_waves(m, n, taken):
    all_of_them = Cutlass()
    shapes = (128, 256), (128, 128)  # those of e5m2_promoted.cu
    all_of_them.kernels = tuple(kernel(*shape, (2, 1), 256) for shape in shapes)
    problem = problem_of(m, n, 8192)
    assert all_of_them.is_faster(problem) == taken and all_of_them.takes(problem)


def test_is_faster_for_nothing_else():
    """CUTLASS is not known to be faster for others."""
    ours = Cutlass()
    long, fast, fp32 = kernel(128, 256, (2, 1), 256), kernel(128, 256, (2, 1), 0), kernel(128, 256, (2, 1), 256)
    ours.kernels = (long, fast, dataclasses.replace(fp32, out=FP32))
    problem = problem_of(8192, 4096, 8192)
    assert ours.is_faster(problem)
    for other in ({"fast_accum": True}, {"d": FP32}, {"add": True}, {"k": 4096, "a_ld": 4096, "b_ld": 4096}):
        assert not ours.is_faster(problem._replace(**other)), other
    ours.multiprocessors = 120  # 1,024 tiles are then 8.53 waves
    assert not ours.is_faster(problem)
    ours.kernels = (kernel(128, 256, (2, 1), 128),)
    assert not ours.is_faster(problem)


def test_the_kernels_for_a_problem():
    maker = Cutlass()
    problem = problem_of(64, 48, 32)
    assert not maker.takes(problem)  # no library
    maker.kernels, maker._library = (kernel(128, 256), kernel(128, 128)), ctypes.CDLL(None)
    maker._library.mfp8_gemm = lambda index, args: 0
    pointers = (1 << 20, 2 << 20, 3 << 20)
    everything = maker.candidates(problem, 0, pointers)
    assert everything[0].choice == Choice(kernel(128, 128)) == maker.candidates(problem, 0, pointers, 1)[0].choice
    assert len({plan.name for plan in everything}) == 2 * len(ORDERS) == len(everything)
    assert all(maker.named(problem, 0, pointers, plan.name).choice == plan.choice for plan in everything)
    assert maker.named(problem, 0, pointers, "64x64 1x1 fast 8/0") is None
    for other in (
        {"n": 40, "d_ld": 40}, {"k": 24, "a_ld": 24, "b_ld": 24}, {"m": 0}, {"d": FP32}, {"b": E5M2},
        {"align": 8}, {"a_ld": 48}, {"d_ld": 64}, {"bias": FP32}, {"a_rows": False, "a_ld": 64},
    ):  # fmt: skip
        assert not maker.takes(problem._replace(**other)), other
    assert maker.takes(problem._replace(bias=BF16, add=True, m=37))
    assert maker.takes(problem._replace(fast_accum=True))  # fast_accum allows fast kernels; it does not require them


def test_no_two_kernels_of_one_type_have_one_name():
    """A search's file identifies a kernel by its name."""
    entries = "".join(path.read_text() for path in build.SOURCES.glob("*.cu"))
    kernels = re.findall(r"Tiled<([^>]*)>::(\w+)(?:<(\d+)[^>]*>)?\(\)", entries)
    assert len(kernels) == len(set(kernels)) >= 18


def test_a_search_builds_nothing(machine):
    folder, calls = machine
    for why in (lambda: build.library(build=False), lambda: Cutlass().prepare(build=False)):
        with pytest.raises(build.Unavailable, match=r"not built .*; run once: megatron-fp8 build"):
            why()
    assert not calls() and not (folder / "cache").exists()
    built = build.library(jobs=2)
    assert build.library(build=False) == built
    elsewhere = folder / "elsewhere.so"
    elsewhere.write_bytes(b"1")
    one = build.version(elsewhere)
    elsewhere.write_bytes(b"2")
    assert len(one) == 16 and one != build.version(elsewhere)


ONE_KERNEL = """#include "gemm.cuh"
using namespace mfp8;
extern const Entry entry = {}();
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        "Tiled<E5M2, E4M3, BF16, 128, 256, 2, 1>::promoted<256, 128>",  # used without a search
        "Tiled<E4M3, E4M3, BF16, 128, 192, 2, 1>::fast_pingpong",  # has the most accumulators a thread
    ],
)
def test_a_kernel_compiles(tmp_path, kernel):
    """No registers are spilled, and no MMA waits for another one."""
    try:
        (nvcc, _), (include, _) = build._nvcc(), build._headers()
    except build.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    source = tmp_path / "one.cu"
    source.write_text(ONE_KERNEL.format(kernel))
    command = [nvcc, *build.FLAGS, "-Xptxas", "-v", "-I", str(include), "-I", str(build.SOURCES), "-c", str(source)]
    printed = subprocess.run([*command, "-o", str(tmp_path / "one.o")], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert set(re.findall(r"(\d+) bytes spill", printed.stderr)) == {"0"}
    assert not re.search("C7510|C7514|C7517", printed.stderr)  # warnings: MMAs are serialised; a wait was inserted
