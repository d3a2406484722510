"""Experts' SwiGLU with its cast, against stock's formula in float32 followed by the cast.

The sigmoid's last bit is the kernel's own, so a value may round to the neighbour. If the sigmoid is 0, 1/2 or 1, all
values are equal.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_groups_cuda import COUNTS, PICKED, in_full, picked
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import ops
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.ops import reference_weighted
from megatron_fp8.ops.groups import TILE, groups_of, groups_of_chosen
from megatron_fp8.ops.reference_groups import quantize_groups

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.weighted import weighted_backward_quantize, weighted_quantize
else:
    weighted_quantize, weighted_backward_quantize = ops.weighted_quantize, ops.weighted_backward_quantize

LARGE = [pytest.param([700, 0, 1300, 90], width, marks=on_gpu_only) for width in (768, 1408)]
CASES = [*((counts, 72) for counts in COUNTS.values()), ([64] * 3, 264), *LARGE]
LAYOUTS = [(1, 1, 1), (1, 0, 0), (0, 1, 1)]
BF16 = torch.bfloat16


def data(counts, width, plain, dtype=BF16):
    """(groups, dy (R', F), h (R', 2F), probabilities (R,), scales (E,)), with NaN in all padding.

    plain: the sigmoid of h's first half is 0, 1/2 or 1.
    """
    rows = sum(counts)
    groups = groups_of(torch.tensor(counts), rows, torch.device(DEVICE))
    dy, one, two = (torch.randn(rows, width, device=DEVICE) for _ in range(3))
    if plain:
        one = torch.tensor([-1e30, 0.0, 20.0, 50.0, 3e4], device=DEVICE)[torch.randint(5, one.shape, device=DEVICE)]
        odd = torch.tensor([torch.inf, torch.nan, -1e30, 0.0, 448.0, 3e-6], device=DEVICE)
        for x in (dy, two):
            x.view(-1)[torch.randperm(x.numel(), device=DEVICE)[: len(odd)]] = odd
    h = in_full(torch.cat([one, two], 1).to(dtype), groups)
    scale = 0.1 + 100 * torch.rand(len(counts), device=DEVICE)
    return groups, in_full(dy.to(dtype), groups), h, torch.rand(rows, device=DEVICE), scale


def stock(h, probs):
    """Stock's weighted_swiglu, as a compiler fuses it."""
    one, two = h.float().chunk(2, -1)
    return (torch.nn.functional.silu(one) * two * probs[:, None]).to(h.dtype)


def stocks_gradients(dy, h, probs):
    """Stock's weighted_swiglu_back, alike."""
    one, two = h.float().chunk(2, -1)
    given, share = dy.float() * probs[:, None], torch.sigmoid(one)
    dh = torch.cat([given * (share * (1 + one * (1 - share))) * two, given * (one * share)], -1)
    return dh.to(h.dtype), torch.nn.functional.silu(one) * two * dy.float()


def is_sum(mine, terms):
    """Whether mine (R,) is the sum of each row, within float32's rounding of the terms."""
    exact = terms.double().sum(1)
    known = exact.isfinite()
    torch.testing.assert_close(mine[~known].double(), exact[~known], rtol=0, atol=0, equal_nan=True)
    assert ((mine - exact).abs() <= 1e-5 * terms.double().abs().sum(1))[known].all()


def alike(ours, theirs, groups, wanted, plain):
    end = int(groups.first[-1]) * TILE
    for mine, other, asked, turned in zip(ours, theirs, wanted, (False, True), strict=True):
        assert (mine is not None) == bool(asked)
        if not asked:
            continue
        mine, other = ((t.mT if turned else t)[:end] for t in (mine, other))
        bits = mine.contiguous().view(torch.uint8).int(), other.contiguous().view(torch.uint8).int()
        same = (mine.float() == other.float()) | (mine.float().isnan() & other.float().isnan())  # a zero has any sign
        off = (bits[0] - bits[1]).abs() * ~same
        assert off.max() <= (0 if plain else 1) and (off > 0).float().mean() < 1e-3
        assert (bits[0][groups.source[:end] < 0] == 0).all()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("counts", "width"), CASES, ids=str)
@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_forward(counts, width, plain, wanted):
    groups, _, h, probs, scale = data(counts, width, plain)
    rows, columns, with_amax = wanted
    largest = [torch.full((len(counts),), 0.5, device=DEVICE) if with_amax else None for _ in range(3)]
    how = {"rows": bool(rows), "columns": bool(columns)}
    ours = weighted_quantize(h, probs, groups, E4M3, scale, amax_out=largest[0], **how)
    theirs = reference_weighted.weighted_quantize(h, probs, groups, E4M3, scale, amax_out=largest[1], **how)
    stocks = quantize_groups(stock(h[groups.place], probs), groups, E4M3, scale, amax_out=largest[2], **how)
    alike(ours, theirs, groups, (rows, columns), plain)
    alike(theirs, stocks, groups, (rows, columns), plain)
    if with_amax:
        for other in largest[1:]:
            torch.testing.assert_close(largest[0], other, rtol=0 if plain else 2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("counts", "width"), CASES, ids=str)
@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_backward(counts, width, plain, wanted):
    groups, dy, h, probs, scale = data(counts, width, plain)
    rows, columns, with_amax = wanted
    largest = [torch.full((len(counts),), 0.5, device=DEVICE) if with_amax else None for _ in range(3)]
    dprobs = [torch.full_like(probs, torch.nan) for _ in range(2)]
    how = {"rows": bool(rows), "columns": bool(columns)}
    given = dy, h, probs, groups, E5M2, scale
    ours = weighted_backward_quantize(*given, dprobs=dprobs[0], amax_out=largest[0], **how)
    theirs = reference_weighted.weighted_backward_quantize(*given, dprobs=dprobs[1], amax_out=largest[1], **how)
    dh, terms = stocks_gradients(dy[groups.place], h[groups.place], probs)
    stocks = quantize_groups(dh, groups, E5M2, scale, amax_out=largest[2], **how)
    alike(ours, theirs, groups, (rows, columns), plain)
    alike(theirs, stocks, groups, (rows, columns), False)  # the slope's terms come in another order
    for mine in dprobs:
        is_sum(mine, terms)
    if with_amax:
        for other in largest[1:]:
            torch.testing.assert_close(largest[0], other, rtol=0 if plain else 2**-7, atol=0, equal_nan=True)
    again = torch.full_like(probs, torch.nan)
    # With the amax too: without it the kernel is another, whose sums may have another order.
    weighted_backward_quantize(*given, dprobs=again, amax_out=largest[0], **how)
    torch.testing.assert_close(again, dprobs[0], rtol=0, atol=0, equal_nan=True)  # in a fixed order


@pytest.mark.parametrize("name", PICKED)
@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_rows_that_the_device_picks(name, wanted, monkeypatch):
    """As rows whose number the host knows. A probability without a row has the gradient zero."""
    rows, columns, with_amax = wanted
    chosen, width = picked(*PICKED[name]), 72
    tokens, experts = chosen.shape
    groups, _ = groups_of_chosen(chosen, PICKED[name][1])
    own, count = (groups.source >= 0)[:, None], int(chosen.sum())
    scale = 0.1 + 100 * torch.rand(experts, device=DEVICE)
    sizes = 2 * width, width
    h, dy = (torch.randn(groups.rows, n, device=DEVICE).to(BF16).masked_fill(~own, torch.nan) for n in sizes)
    probs = torch.rand(tokens * experts, device=DEVICE)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
    dprobs = torch.full_like(probs, torch.nan)
    largest = torch.zeros(4, experts, device=DEVICE) if with_amax else [None] * 4
    how = {"rows": bool(rows), "columns": bool(columns)}
    ours = weighted_quantize(h, probs, groups, E4M3, scale, amax_out=largest[0], **how)
    given = dy, h, probs, groups, E5M2, scale
    ours_back = weighted_backward_quantize(*given, dprobs=dprobs, amax_out=largest[1], **how)
    there = chosen.t().nonzero()
    at = there[:, 1] * experts + there[:, 0]
    assert not dprobs[~chosen.reshape(-1)].any() and dprobs.isfinite().all()
    if not count:
        return
    known = groups_of(chosen.sum(0), count, torch.device(DEVICE))
    h, dy = (in_full(x[own[:, 0]], known) for x in (h, dy))
    theirs = weighted_quantize(h, probs[at], known, E4M3, scale, amax_out=largest[2], **how)
    of_known, given = torch.empty(count, device=DEVICE), (dy, h, probs[at], known, E5M2, scale)
    theirs_back = weighted_backward_quantize(*given, dprobs=of_known, amax_out=largest[3], **how)
    alike(ours, theirs, known, (rows, columns), True)
    alike(ours_back, theirs_back, known, (rows, columns), True)
    assert torch.equal(dprobs[at], of_known)
    if with_amax:
        assert torch.equal(largest[0], largest[2]) and torch.equal(largest[1], largest[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types(dtype):
    groups, dy, h, probs, scale = data([3, 0, 130], 40, False, dtype)
    how = {"rows": True, "columns": True}
    alike(
        weighted_quantize(h, probs, groups, E4M3, scale, **how),
        reference_weighted.weighted_quantize(h, probs, groups, E4M3, scale, **how), groups, (1, 1), False,
    )  # fmt: skip
    dprobs = [torch.empty_like(probs) for _ in range(2)]
    given = dy, h, probs, groups, E5M2, scale
    alike(
        weighted_backward_quantize(*given, dprobs=dprobs[0], **how),
        reference_weighted.weighted_backward_quantize(*given, dprobs=dprobs[1], **how), groups, (1, 1), False,
    )  # fmt: skip
    torch.testing.assert_close(*dprobs, rtol=1e-4, atol=1e-4)
