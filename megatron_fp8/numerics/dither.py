"""Draws masters for weights that were stored in few bits: evenly among the numbers that round to the stored one.

`dithered` draws for weights that are stored in E4M3 (O3), `dithered_in_bf16` for those in BF16 (O1, O2).

A small update shows in an E4M3 weight only if it takes the master past the middle between two E4M3 numbers. If the
masters lie evenly between them, an update of u moves u / ulp of the weights by one ulp each: on average all of u.
Weights that come from a file in few bits do not lie evenly:

    stored in   lies                                            an update of u, at first, moves the weights by
    BF16        on 16 numbers an ulp of E4M3, one of them a     more than u: the sixteenth in the middle moves at once
                middle
    E4M3        on the E4M3 number itself, half an ulp from     nothing, until the sum of updates is half an ulp
                the middle

Half an ulp of E4M3 is 1e-3 for a weight of 0.02. Preference tuning moves a weight by less than that in all. So a model
that was saved at O3 without its masters would stand still. `dithered` draws the bits that the file has lost: it gives a
number within half an ulp of the value, in the format that the value came in. No E4M3 value moves to another code.

Whether the values came in E4M3 shows in them: all are E4M3 numbers times a power of two. Of BF16 numbers from training
in BF16, one in sixteen is.

A weight that is stored in BF16 is the same story with a finer ulp: the file's number is half an ulp of BF16 from both
middles, 6e-5 for a weight of 0.02. Preference tuning at 1e-6 needs dozens of steps for that. `dithered_in_bf16` draws
the 16 bits below the weight. Every bit of the weight stays, so the first loss does too.

A model may go through several rounds: it is saved without masters after each, and the next one begins with the same
seed. With the same noise in each round the same weights would move each time, and all others never. So the noise
depends on the values too, unless they came in BF16 and become E4M3. A tensor that is loaded twice still gets the same
bits.
"""

import torch

from .formats import E4M3, decode, encode
from .noise import noise_seed, uniform_noise

_SMALLEST_NORMAL = 8  # as a code
_AT_ONCE = 1 << 22  # elements; each takes 54 bytes beside the result while it is drawn


def dithered(values: torch.Tensor, identity: tuple[int, ...], scale: torch.Tensor) -> torch.Tensor:
    """Masters (n,) FP32 for `values` (n,) BF16; values of another type are masters already, and come back as they are.

    identity: the weight's, for the noise. scale: the E4M3 weight's, 0-d float32, a power of two.

    If more than half of the values that are not 0 are E4M3 numbers / scale, these numbers are drawn within half an ulp
    of E4M3, and keep their codes. All other values are drawn within half an ulp of BF16. A zero, an infinity or a NaN
    stays. Nothing waits for the device.
    """
    if values.dtype != torch.bfloat16:
        return values
    pieces = values.split(_AT_ONCE)
    exact = sum(_is_e4m3(piece.float(), scale).sum() for piece in pieces)
    from_e4m3 = 2 * exact > (values != 0).sum()
    drawn, seed = torch.empty(values.shape, device=values.device), _seed(values, identity, from_e4m3)
    for i, piece in enumerate(pieces):
        first = i * _AT_ONCE
        noise = uniform_noise(piece.numel(), seed, values.device, first)
        drawn[first : first + piece.numel()] = _drawn(piece.float(), noise, scale, from_e4m3)
    return drawn


def dithered_in_bf16(weight: torch.Tensor, identity: tuple[int, ...], first: int, stop: int) -> torch.Tensor:
    """Masters (stop - first,) FP32 for the numbers first .. stop of a whole `weight` (n,) BF16.

    identity: as `dithered` takes it.

    Each is drawn evenly among the FP32 numbers that round to its weight, to nearest, whatever is done with ties. Below
    a power of two these are half as far apart, as BF16's are. So on average an update shows in full there too. A
    zero, an infinity or a NaN stays. Ranks that own parts of the weight draw the same numbers as one that owns all.
    """
    seed = _seed(weight, identity, True)
    drawn = torch.empty(stop - first, dtype=torch.int32, device=weight.device)
    for at, piece in zip(range(first, stop, _AT_ONCE), weight[first:stop].split(_AT_ONCE), strict=True):
        below = (uniform_noise(piece.numel(), seed, weight.device, at) * 2**16).int() - 2**15
        below = below.clamp_(min=1 - 2**15).masked_fill_((piece == 0) | ~piece.isfinite(), 0)  # -2^15 is a tie
        drawn[at - first : at - first + piece.numel()] = (piece.view(torch.int16).int() << 16) + below
    return drawn.view(torch.float32)


def _seed(values: torch.Tensor, identity: tuple[int, ...], by_values: torch.Tensor | bool) -> torch.Tensor:
    """The noise's seed, (2,) int32. With `by_values` it depends on all values and their places."""
    shift = torch.zeros((), dtype=torch.int64, device=values.device)
    for i, piece in enumerate(values.split(_AT_ONCE)):
        places = torch.arange(1, piece.numel() + 1, device=values.device) + i * _AT_ONCE
        shift += (places * piece.view(torch.int16)).sum()
    first, second = noise_seed(*identity)
    return torch.stack([first + shift * by_values, torch.full_like(shift, second)]).to(torch.int32)


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
