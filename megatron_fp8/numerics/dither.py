"""Draws the master of a weight that was stored in few bits: evenly among the numbers that round to the stored one.

A small update shows in an E4M3 weight only if it takes the master past the middle between two E4M3 numbers. If the
masters lie evenly between them, an update of u moves u / ulp of the weights by one ulp each: on average all of u. A
weight that comes from a file in few bits has masters that do not lie evenly:

    stored in   lies                                            an update of u, at first, moves the weights by
    BF16        on 16 numbers an ulp of E4M3, one of them a     more than u: the sixteenth in the middle moves at once
                middle
    E4M3        on the E4M3 number itself, half an ulp from     nothing, until the sum of updates is half an ulp
                the middle

Half an ulp of E4M3 is 1e-3 for a weight of 0.02, and preference tuning moves a weight by less than that in all. So a
model that was saved at O3 without its masters, and is trained on, would stand still. `dithered` draws what the file has
lost: a number within half an ulp of the format that the values came in. No E4M3 value moves to another code.

Whether the values came in E4M3 shows in them: all are E4M3 numbers times a power of two. Of BF16 numbers of any other
source, one in sixteen is.
"""

import torch

from .formats import E4M3, decode, encode
from .noise import noise_seed, uniform_noise

_SMALLEST_NORMAL = 8  # as a code
_AT_ONCE = 1 << 24  # elements, which bounds the memory that is needed beside them


def dithered(values: torch.Tensor, identity: tuple[int, ...], scale: torch.Tensor) -> torch.Tensor:
    """FP32 numbers that round to `values` (n,) BF16, drawn evenly; values of another type come back as they are.

    identity: the weight's, for the noise. scale: the E4M3 weight's, 0-d float32, a power of two.

    If more than half of `values` that are not 0 are E4M3 numbers / scale, these are drawn within half an ulp of E4M3,
    and have the same codes as before. All others are drawn within half an ulp of BF16. Nothing waits for the device.
    """
    if values.dtype != torch.bfloat16:
        return values
    pieces = values.split(_AT_ONCE)
    exact = sum(_is_e4m3(piece.float(), scale).sum() for piece in pieces)
    from_e4m3 = 2 * exact > (values != 0).sum()
    drawn, seed = torch.empty(values.shape, device=values.device), noise_seed(*identity)
    for i, piece in enumerate(pieces):
        first = i * _AT_ONCE
        noise = uniform_noise(piece.numel(), seed, values.device, first)
        drawn[first : first + piece.numel()] = _drawn(piece.float(), noise, scale, from_e4m3)
    return drawn


def _is_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (decode(encode(values * scale, E4M3)) / scale == values) & (values != 0)


def _drawn(values: torch.Tensor, noise: torch.Tensor, scale: torch.Tensor, from_e4m3: torch.Tensor) -> torch.Tensor:
    half_ulp = ((values.view(torch.int32) & 0x7F800000) - (8 << 23)).clamp(min=0).view(torch.float32)
    within_bf16 = values + half_ulp * (2 * noise - 1)
    code = encode(values * scale, E4M3)
    within_e4m3 = _within_cell(code, noise) / scale
    stays = encode(within_e4m3 * scale, E4M3).view(torch.uint8) == code.view(torch.uint8)  # no tie that goes elsewhere
    within_e4m3 = torch.where(stays, within_e4m3, values)
    return torch.where(_is_e4m3(values, scale) & from_e4m3, within_e4m3, within_bf16)


def _within_cell(code: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Evenly among the numbers that round to `code` (n,) E4M3, as float32. noise: (n,) in [0, 1)."""
    bits = code.view(torch.uint8).int() & 0x7F
    ulp = (((bits >> 3).clamp(min=1) + (127 - 7 - 3)) << 23).view(torch.float32)  # subnormals have binade 1's
    below_is_finer = (bits & 7 == 0) & (bits > _SMALLEST_NORMAL)  # a power of two: the ulp below it is half as large
    below = ulp * torch.where(below_is_finer, 0.25, 0.5)
    value = decode(code)
    return torch.copysign(value.abs() - below + noise * (below + ulp / 2), value)
