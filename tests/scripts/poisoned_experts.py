"""Has the undefined memory of experts that run together poisoned: `poison()`."""

import torch

from megatron_fp8 import ops
from megatron_fp8.gemm import grouped
from megatron_fp8.ops.groups import TILE

loops = 0  # products that would on a GPU have been a loop over their gradients
rows, sums, cast = grouped.rows, grouped.sums, ops.quantize_groups


def poisoned_rows(a, weights, out, **how):
    return rows(a, weights, out.fill_(torch.nan), **how)


def poisoned_sums(dy, x, into, accumulate=False):
    global loops
    loops += grouped.spaced(into) is None
    for place in into if not accumulate else ():
        place.fill_(torch.nan)
    sums(dy, x, into, accumulate=accumulate)


def poisoned_cast(x, groups, *args, **kwargs):
    payload, columns = cast(x, groups, *args, **kwargs)
    end = int(groups.first[-1]) * TILE
    for codes in (None if payload is None else payload[end:], None if columns is None else columns[:, end:]):
        if codes is not None:
            codes.view(torch.uint8).fill_(0x7F)
    return payload, columns


def poison() -> None:
    grouped.rows, grouped.sums, ops.quantize_groups = poisoned_rows, poisoned_sums, poisoned_cast
