"""The count of kernels that Triton compiles. Triton's compiler needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
COMPILE = """
import sys
sys.path.insert(0, {folder!r})
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compiled import copy, fill
from megatron_fp8.tools.rehearsal.kernels import Kernels

def build(kernel):
    source = ASTSource(kernel, {{"to": "*fp32", "n": "i32"}})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

kernels = Kernels()
kernels.listen()
build(fill), build(copy), build(fill)
print(json.dumps(kernels.counts()))
"""
SOURCE = """
import triton
import triton.language as tl

@triton.jit
def fill(to, n):
    tl.store(to + tl.program_id(0), n)

@triton.jit
def copy(to, n):
    tl.store(to + tl.program_id(0), tl.load(to + n))
"""


def test_kernels_compiled_and_kernels_found(tmp_path):
    """A kernel that is compiled and used again counts once. In a second process all kernels are found in the cache."""
    (tmp_path / "compiled.py").write_text(SOURCE)
    cache = str(tmp_path / "cache")
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE.format(folder=str(tmp_path))], capture_output=True, text=True, check=True,
            env={**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        found.append(json.loads(done.stdout))
    assert found[0]["compiled"] == 2 and found[0]["in_cache"] == 0 and found[0]["compile_seconds"] > 0
    assert found[1] == {"compiled": 0, "in_cache": 2, "compile_seconds": 0.0, "cache": cache}
