"""The numeric operations: casts, blocks, counts and the loss (by_device.py), the GEMM (gemm.py), Adam (adam.py)."""

from megatron_fp8.ops.by_device import (
    add_blocks,
    amax,
    count_cast,
    cross_entropy_gradient,
    cross_entropy_loss,
    cross_entropy_statistics,
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
    "cross_entropy_gradient",
    "cross_entropy_loss",
    "cross_entropy_statistics",
    "emulate",
    "gemm",
    "quantize",
    "quantize_blocks",
    "ring_sum",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]
