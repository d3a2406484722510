"""The Triton kernels without a GPU: the tests of tests/gpu/test_ops_cuda.py, or of a file named as an argument, through
Triton's interpreter.

Run in a process of its own, since triton decides at its import whether to interpret. The interpreter's float
conversions round halves up, lose carries and break FP8 subnormals, so they are replaced by torch's, made to
saturate as PTX's cvt.satfinite does. Its maximum keeps a NaN, which a GPU's drops: replaced too. What only a GPU can
show: that instruction itself, what ptxas makes of the kernels, and the GEMM.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu" / "test_ops_cuda.py"


def test_kernels_agree_with_the_reference():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(GPU_TESTS.parents[2])}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def main() -> int:
    global tl, converted  # the interpreter looks for them among a kernel's globals
    import numpy as np
    import torch
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    from megatron_fp8.ops.triton import cast

    types = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }

    def convert(data, source, target, rounding):
        values = torch.from_numpy(data.copy()).view(types[source]).float()
        if types[target].itemsize == 1:
            largest = torch.finfo(types[target]).max
            values = values.clamp(-largest, largest)
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[types[target].itemsize]
        return values.to(types[target]).view(bits).numpy()

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    @triton.jit
    def converted(y, zero, E4M3: tl.constexpr):
        fp8: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
        return y.to(fp8).to(tl.uint8, bitcast=True).to(tl.int32)

    @triton.jit
    def converted_pair(low, high, zero, E4M3: tl.constexpr):
        return converted(low, zero, E4M3) | converted(high, zero, E4M3) << 8

    @triton.jit
    def converted_quad(y, zero):
        return converted(y, zero, True).to(tl.uint8)

    # The interpreter has no inline assembly.
    cast.convert, cast.convert_pair, cast.convert_quad = converted, converted_pair, converted_quad
    return pytest.main([*(sys.argv[1:] or [str(GPU_TESTS)]), "-q", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())
