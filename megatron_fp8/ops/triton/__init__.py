"""The Triton kernels, one family a file. Imported only where they run: see megatron_fp8/ops/by_device.py."""

from megatron_fp8.ops.triton.activation import (
    activate,
    activate_backward,
    activate_backward_quantize,
    activate_quantize,
)
from megatron_fp8.ops.triton.blocks import add_blocks, quantize_blocks, square_sum_blocks, sum_blocks
from megatron_fp8.ops.triton.cast import amax, quantize, quantize_bias_grad, transpose
from megatron_fp8.ops.triton.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_loss,
    cross_entropy_statistics,
)
from megatron_fp8.ops.triton.embedding import add_rows
from megatron_fp8.ops.triton.emulate import emulate
from megatron_fp8.ops.triton.norm import norm, norm_backward, norm_quantize, norm_requantize
from megatron_fp8.ops.triton.qkv import join_qkv, split_qkv
from megatron_fp8.ops.triton.statistics import count_cast

__all__ = [
    "activate",
    "activate_backward",
    "activate_backward_quantize",
    "activate_quantize",
    "add_blocks",
    "add_rows",
    "amax",
    "count_cast",
    "cross_entropy_gradient",
    "cross_entropy_loss",
    "cross_entropy_statistics",
    "emulate",
    "join_qkv",
    "norm",
    "norm_backward",
    "norm_quantize",
    "norm_requantize",
    "quantize",
    "quantize_bias_grad",
    "quantize_blocks",
    "split_qkv",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]
