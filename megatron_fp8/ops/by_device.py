"""Chooses each operation's implementation by the device of its first argument.

    CUDA        the Triton kernel in ops/triton/
    elsewhere   plain PyTorch, the reference that tests compare the kernel with

Each operation has the signature and the docstring of its reference. Triton is imported when an operation first gets a
CUDA tensor, so a machine without a GPU does not need it.
"""

import functools
from collections.abc import Callable
from typing import Any

from ..numerics import emulation
from . import (
    reference,
    reference_activation,
    reference_cross_entropy,
    reference_embedding,
    reference_norm,
    reference_qkv,
    reference_statistics,
)


def _with_kernel[F: Callable[..., Any]](plain: F) -> F:
    """`plain`; but on a CUDA tensor, the function of the same name in ops/triton/."""

    @functools.cache
    def kernel() -> F:
        from . import triton

        return getattr(triton, plain.__name__)

    @functools.wraps(plain)
    def op(x, *args, **kwargs):
        return (kernel() if x.is_cuda else plain)(x, *args, **kwargs)

    return op  # type: ignore[return-value]


amax = _with_kernel(reference.amax)
quantize = _with_kernel(reference.quantize)
quantize_bias_grad = _with_kernel(reference.quantize_bias_grad)
transpose = _with_kernel(reference.transpose)
quantize_blocks = _with_kernel(reference.quantize_blocks)
add_blocks = _with_kernel(reference.add_blocks)
sum_blocks = _with_kernel(reference.sum_blocks)
square_sum_blocks = _with_kernel(reference.square_sum_blocks)
activate = _with_kernel(reference_activation.activate)
activate_backward = _with_kernel(reference_activation.activate_backward)
activate_quantize = _with_kernel(reference_activation.activate_quantize)
activate_backward_quantize = _with_kernel(reference_activation.activate_backward_quantize)
split_qkv = _with_kernel(reference_qkv.split_qkv)
join_qkv = _with_kernel(reference_qkv.join_qkv)
count_cast = _with_kernel(reference_statistics.count_cast)
emulate = _with_kernel(emulation.emulate)
norm = _with_kernel(reference_norm.norm)
norm_quantize = _with_kernel(reference_norm.norm_quantize)
norm_requantize = _with_kernel(reference_norm.norm_requantize)
norm_backward = _with_kernel(reference_norm.norm_backward)
cross_entropy_statistics = _with_kernel(reference_cross_entropy.cross_entropy_statistics)
cross_entropy_loss = _with_kernel(reference_cross_entropy.cross_entropy_loss)
cross_entropy_gradient = _with_kernel(reference_cross_entropy.cross_entropy_gradient)
add_rows = _with_kernel(reference_embedding.add_rows)
