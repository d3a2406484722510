"""The numeric operations: casts, norms, activations, blocks (by_device.py), the GEMM (gemm.py), Adam (adam.py)."""

from megatron_fp8.ops.by_device import (
    activate,
    activate_backward,
    activate_backward_quantize,
    activate_quantize,
    add_blocks,
    amax,
    count_cast,
    emulate,
    norm,
    norm_backward,
    norm_quantize,
    quantize,
    quantize_bias_grad,
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
    "activate",
    "activate_backward",
    "activate_backward_quantize",
    "activate_quantize",
    "add_blocks",
    "amax",
    "count_cast",
    "emulate",
    "gemm",
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize",
    "quantize_bias_grad",
    "quantize_blocks",
    "ring_sum",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]
