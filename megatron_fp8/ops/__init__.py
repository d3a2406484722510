"""The numeric operations, one function each, and where each is computed.

    on a CUDA tensor   the Triton kernels of ops/triton/, and torch._scaled_mm for the GEMM
    elsewhere          ops/reference.py, plain PyTorch, which is also the kernels' oracle

Signatures and docstrings are reference.py's; of count_cast, reference_statistics.py's. Triton is imported at the
first use on a CUDA tensor, so that a machine without a GPU needs none.
"""

import functools
import importlib

from megatron_fp8.numerics import emulation
from megatron_fp8.ops import reference, reference_statistics
from megatron_fp8.ops.gemm import gemm

__all__ = [
    "add_blocks",
    "amax",
    "count_cast",
    "emulate",
    "gemm",
    "quantize",
    "quantize_blocks",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]


def _on_gpu_from(family: str):
    """Decorate a function of reference.py: CUDA tensors go to its namesake in ops/triton/`family`.py."""

    @functools.cache
    def kernel(name):
        return getattr(importlib.import_module(f"{__name__}.triton.{family}"), name)

    def decorate(oracle):
        @functools.wraps(oracle)
        def op(x, *args, **kwargs):
            return (kernel(oracle.__name__) if x.is_cuda else oracle)(x, *args, **kwargs)

        return op

    return decorate


amax = _on_gpu_from("cast")(reference.amax)
quantize = _on_gpu_from("cast")(reference.quantize)
transpose = _on_gpu_from("cast")(reference.transpose)
quantize_blocks = _on_gpu_from("blocks")(reference.quantize_blocks)
add_blocks = _on_gpu_from("blocks")(reference.add_blocks)
sum_blocks = _on_gpu_from("blocks")(reference.sum_blocks)
square_sum_blocks = _on_gpu_from("blocks")(reference.square_sum_blocks)
count_cast = _on_gpu_from("statistics")(reference_statistics.count_cast)
emulate = _on_gpu_from("emulate")(emulation.emulate)
