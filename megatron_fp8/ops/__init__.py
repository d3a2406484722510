"""The numeric operations that have a kernel: of each its plain form, with its docstring, and its kernel's file.

by_device.py runs one of the two. Adam's step checks its arguments first: adam.py.
"""

from ..numerics import emulation
from . import (
    reference,
    reference_activation,
    reference_attention,
    reference_combine,
    reference_cross_entropy,
    reference_embedding,
    reference_groups,
    reference_norm,
    reference_qk_norm,
    reference_qkv,
    reference_statistics,
    reference_weighted,
)
from .by_device import operation

amax = operation(reference.amax, "cast")
quantize = operation(reference.quantize, "cast")
quantize_bias_grad = operation(reference.quantize_bias_grad, "cast")
transpose = operation(reference.transpose, "cast")
quantize_groups = operation(reference_groups.quantize_groups, "groups")
quantize_routed = operation(reference_groups.quantize_routed, "groups")
spread_groups = operation(reference_groups.spread_groups, "groups")
weighted_quantize = operation(reference_weighted.weighted_quantize, "weighted")
weighted_backward_quantize = operation(reference_weighted.weighted_backward_quantize, "weighted")
transpose_each = operation(reference_groups.transpose_each, "groups")
combine = operation(reference_combine.combine, "combine")
quantize_blocks = operation(reference.quantize_blocks, "blocks")
add_blocks = operation(reference.add_blocks, "blocks")
sum_blocks = operation(reference.sum_blocks, "blocks")
square_sum_blocks = operation(reference.square_sum_blocks, "blocks")
activate = operation(reference_activation.activate, "activation")
activate_backward = operation(reference_activation.activate_backward, "activation")
activate_quantize = operation(reference_activation.activate_quantize, "activation")
activate_backward_quantize = operation(reference_activation.activate_backward_quantize, "activation")
split_qkv = operation(reference_qkv.split_qkv, "qkv")
join_qkv = operation(reference_qkv.join_qkv, "qkv")
norm_rotate = operation(reference_qk_norm.norm_rotate, "qk_norm")
norm_rotate_backward = operation(reference_qk_norm.norm_rotate_backward, "qk_norm")
merge_attention = operation(reference_attention.merge_attention, "attention")
count_cast = operation(reference_statistics.count_cast, "statistics")
emulate = operation(emulation.emulate, "emulate")
norm = operation(reference_norm.norm, "norm")
norm_quantize = operation(reference_norm.norm_quantize, "norm")
norm_requantize = operation(reference_norm.norm_requantize, "norm")
norm_backward = operation(reference_norm.norm_backward, "norm")
cross_entropy_statistics = operation(reference_cross_entropy.cross_entropy_statistics, "cross_entropy")
cross_entropy_loss = operation(reference_cross_entropy.cross_entropy_loss, "cross_entropy")
cross_entropy_gradient = operation(reference_cross_entropy.cross_entropy_gradient, "cross_entropy")
add_rows = operation(reference_embedding.add_rows, "embedding")

# These have no kernel.
ring_sum = reference.ring_sum
blocks_for = reference_activation.blocks_for
