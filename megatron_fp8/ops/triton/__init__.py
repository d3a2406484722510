"""The Triton kernels, one family a file. by_device.py imports them when an operation first gets a CUDA tensor."""

from .activation import activate, activate_backward, activate_backward_quantize, activate_quantize
from .blocks import add_blocks, quantize_blocks, square_sum_blocks, sum_blocks
from .cast import amax, quantize, quantize_bias_grad, transpose
from .cross_entropy import cross_entropy_gradient, cross_entropy_loss, cross_entropy_statistics
from .embedding import add_rows
from .emulate import emulate
from .norm import norm, norm_backward, norm_quantize, norm_requantize
from .qkv import join_qkv, split_qkv
from .statistics import count_cast

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
