"""The numeric operations: casts, blocks and counts (by_device.py), the GEMM (gemm.py), Adam (adam.py)."""

from megatron_fp8.ops import cutlass as _cutlass  # noqa: F401 (makes its backend known)
from megatron_fp8.ops.by_device import (
    add_blocks,
    amax,
    count_cast,
    emulate,
    quantize,
    quantize_blocks,
    square_sum_blocks,
    sum_blocks,
    transpose,
)
from megatron_fp8.ops.gemm import Epilogue, Operand, Product, gemm
from megatron_fp8.ops.reference import ring_sum

__all__ = [
    "Epilogue",
    "Operand",
    "Product",
    "add_blocks",
    "amax",
    "count_cast",
    "emulate",
    "gemm",
    "quantize",
    "quantize_blocks",
    "ring_sum",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]
