"""The weights that a script has frozen (frozen.py): a payload in E4M3 and a scale, or the parameter as it was.

    stored in E4M3 (O3)    1 byte a weight; BF16 memory is freed weight by weight, so one weight at a time has both
    stored in BF16         2 bytes, and 1 for the FP8 copy that its GEMMs read, made once

The scale is the tightest power of two, the same on all ranks that share the weight. A checkpoint has an E4M3 number
times a power of two as a BF16 number, and this scale gives the same E4M3 number again. Unlike trained weights
(numerics/dither.py), frozen ones are not dithered: they have no small updates that must show in the mean, and the
error to nearest is smaller.
"""

import functools

import torch

from .. import ops
from ..numerics.formats import E4M3
from ..numerics.scaled import ScaledTensor
from ..numerics.scaling import power_of_two_scale
from ..ranks import all_reduce_largest
from .owned_weight import OwnedWeight
from .set_parts import SetParts


def freeze(weights: list[OwnedWeight], parts: SetParts) -> None:
    """Take over frozen weights of a set, with BF16 parameters; collective over the ranks that share them."""
    for weight in weights:
        in_fp8 = weight.storage == "fp8"
        weight.attach(parts, load=functools.partial(_store, weight, parts.of.sharing) if in_fp8 else None)
        if in_fp8:
            weight.load(weight.param.detach())


def nearest(values: torch.Tensor, margin: int, sharing: torch.distributed.ProcessGroup) -> ScaledTensor:
    """Round values (N, K) of any float type to E4M3 with the tightest power of two; collective over `sharing`."""
    amax = torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32)
    all_reduce_largest(amax, sharing)
    scale = power_of_two_scale(amax, E4M3, margin)
    return ScaledTensor(ops.quantize(values, E4M3, scale), scale.reciprocal())


@torch.no_grad()
def _store(weight: OwnedWeight, sharing: torch.distributed.ProcessGroup, values: torch.Tensor) -> None:
    """Set the weight to `values` (N, K) of any float type; all ranks of `sharing` come here together."""
    rounded = nearest(values.to(weight.param.device), weight.config.margin, sharing)
    assert rounded.payload is not None
    if weight.stored is None:
        weight.move_to(rounded.payload)
        weight.changed(rounded.scale_inv)
    else:  # in place: a CUDA graph may read it
        weight.stored.payload.copy_(rounded.payload)
        weight.stored.scale_inv.copy_(rounded.scale_inv)
        weight.changed()
