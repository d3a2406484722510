"""The Triton kernels, one family a file. Imported only where they run: see megatron_fp8/ops/by_device.py."""

from megatron_fp8.ops.triton.blocks import add_blocks, quantize_blocks, square_sum_blocks, sum_blocks
from megatron_fp8.ops.triton.cast import amax, quantize, transpose
from megatron_fp8.ops.triton.emulate import emulate
from megatron_fp8.ops.triton.qkv import join_qkv, split_qkv
from megatron_fp8.ops.triton.statistics import count_cast

__all__ = [
    "add_blocks",
    "amax",
    "count_cast",
    "emulate",
    "join_qkv",
    "quantize",
    "quantize_blocks",
    "split_qkv",
    "square_sum_blocks",
    "sum_blocks",
    "transpose",
]
