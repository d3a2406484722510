"""The cast of several experts' rows, against the reference; its tables, against plain counting.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import ops
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.ops import reference_groups
from megatron_fp8.ops.groups import TILE, groups_of, groups_of_chosen

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.groups import quantize_groups, quantize_routed, spread_groups, transpose_each
else:
    quantize_groups, transpose_each = ops.quantize_groups, ops.transpose_each
    quantize_routed, spread_groups = ops.quantize_routed, ops.spread_groups

COUNTS = {
    "edges": [0, 1, 127, 128, 257, 0] if INTERPRETED else [0, 1, 127, 128, 129, 0, 255, 256, 0],
    "one": [0, 0, 300, 0],
    "alone": [130],
    "whole": [128],
    "first": [5, 0, 0],
}
CASES = [(counts, 72, fmt) for counts in COUNTS.values() for fmt in (E4M3, E5M2)]
CASES += [([64] * 3, 264, E4M3), pytest.param([700, 0, 1300, 90], 2048, E5M2, marks=on_gpu_only)]


def in_full(x, groups):
    """x (R, K) as padded, with NaN in all padding."""
    full = torch.full((groups.rows, x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    full[groups.place] = x
    return full


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tables(counts):
    groups = groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    first, expert, source = (t.tolist() for t in (groups.first, groups.expert, groups.source))
    given = iter(range(sum(counts)))
    at, place = 0, []
    for e, count in enumerate(counts):
        assert first[e] == at // TILE
        for row in range(-(-count // TILE) * TILE):
            assert expert[(at + row) // TILE] == e
            number = next(given) if row < count else -1
            assert source[at + row] == number
            place += [at + row] if row < count else []
        at += -(-count // TILE) * TILE
    assert first[-1] == at // TILE and groups.place.tolist() == place
    assert groups.rows >= at and set(source[at:]) <= {-1}


@pytest.mark.parametrize(("counts", "width", "fmt"), CASES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "columns", "with_amax"), [(1, 1, 1), (1, 0, 0), (0, 1, 1)])
def test_the_cast_against_the_reference(counts, width, fmt, padded, rows, columns, with_amax):
    groups = groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    x = (torch.randn(sum(counts), width, device=DEVICE) * torch.rand(sum(counts), 1, device=DEVICE)).bfloat16()
    odd = torch.tensor([torch.inf, -1e30, 0.0, 448.0, 3e-6], device=DEVICE).to(x)
    x.view(-1)[torch.randperm(x.numel(), device=DEVICE)[: len(odd)]] = odd
    if padded:
        x = in_full(x, groups)
    scale = 0.1 + 100 * torch.rand(len(counts), device=DEVICE)
    largest = [torch.full((len(counts),), 0.5, device=DEVICE) if with_amax else None for _ in range(2)]
    how = {"rows": bool(rows), "columns": bool(columns)}
    theirs = reference_groups.quantize_groups(x, groups, fmt, scale, amax_out=largest[0], **how)
    ours = quantize_groups(x, groups, fmt, scale, amax_out=largest[1], **how)
    end = int(groups.first[-1]) * TILE
    for mine, other, wanted, transposed in zip(ours, theirs, (rows, columns), (False, True), strict=True):
        assert (mine is not None) == bool(wanted)
        if wanted:
            mine, other = ((t.mT if transposed else t)[:end].float() for t in (mine, other))
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)  # E4M3's NaN has two signs
            assert (mine[groups.source[:end] < 0] == 0).all()
    if with_amax:
        assert torch.equal(*largest)


@pytest.mark.parametrize(("counts", "width", "fmt"), [*CASES, ([3, 5], 2056, E4M3)], ids=str)
def test_rows_cast_before_they_are_sent(counts, width, fmt):
    """Against the reference; and they are then those of a cast on arrival, with the same amaxes."""
    groups, rows = groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE)), sum(counts)
    x = (torch.randn(rows, width, device=DEVICE) * torch.rand(rows, 1, device=DEVICE)).bfloat16()
    odd = torch.tensor([torch.inf, -1e30, 0.0, 448.0, 3e-6], device=DEVICE).to(x)
    x.view(-1)[torch.randperm(x.numel(), device=DEVICE)[: len(odd)]] = odd
    source = torch.randint(rows, (rows,), device=DEVICE)
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(DEVICE)
    scale = 0.1 + 100 * torch.rand(len(counts), device=DEVICE)
    largest = [torch.full((len(counts),), 0.5, device=DEVICE) for _ in range(3)]
    theirs = reference_groups.quantize_routed(x, source, expert, fmt, scale, amax_out=largest[0])
    sent = quantize_routed(x, source, expert, fmt, scale, amax_out=largest[1])
    torch.testing.assert_close(sent.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(quantize_routed(x, source, expert, fmt, scale).view(torch.uint8), sent.view(torch.uint8))
    arrived = quantize_groups(x[source], groups, fmt, scale, rows=True, columns=True, amax_out=largest[2])
    spread = spread_groups(sent, groups, rows=True, columns=True)
    end = int(groups.first[-1]) * TILE
    for mine, other, transposed in zip(spread, arrived, (False, True), strict=True):
        mine, other = ((t.mT if transposed else t)[:end].float() for t in (mine, other))
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(largest[0], largest[1]) and torch.equal(largest[0], largest[2])


# tokens, most experts of one, experts, share of tokens that have any
PICKED = {"some": (150, 2, 5, 0.6), "none": (40, 2, 3, 0.0), "alone": (128, 1, 1, 0.5), "all": (70, 3, 3, 1.0)}


def picked(tokens, most, experts, share):
    """(T, E) bool: which experts a token has"""
    drawn = torch.rand(tokens, experts).argsort(1).argsort(1) < torch.randint(1, most + 1, (tokens, 1))
    return (drawn & (torch.rand(tokens, 1) < share)).to(DEVICE)


@pytest.mark.parametrize("name", PICKED)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 0), (0, 1)])
def test_rows_that_the_device_picks(name, rows, columns):
    """As rows that were gathered before; without any row there is a tile of zeros."""
    chosen = picked(*PICKED[name])
    tokens, experts = chosen.shape
    _, read = groups_of_chosen(chosen, PICKED[name][1])
    x, scale = torch.randn(tokens, 72, device=DEVICE).bfloat16(), 0.1 + 100 * torch.rand(experts, device=DEVICE)
    largest = torch.zeros(2, experts, device=DEVICE)
    how = {"rows": bool(rows), "columns": bool(columns)}
    ours = quantize_groups(x, read, E4M3, scale, amax_out=largest[0], **how)
    end, count = int(read.first[-1]) * TILE, int(chosen.sum())
    assert end and bool(count) == (name != "none")
    if count:
        groups = groups_of(chosen.sum(0), count, torch.device(DEVICE))
        gathered = x[chosen.t().nonzero()[:, 1]]
        theirs = reference_groups.quantize_groups(gathered, groups, E4M3, scale, amax_out=largest[1], **how)
    else:
        theirs = [torch.zeros_like(t) if t is not None else None for t in ours]
    for mine, other, transposed in zip(ours, theirs, (False, True), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            mine, other = ((t.mT if transposed else t)[:end].float() for t in (mine, other))
            assert torch.equal(mine, other)
    assert torch.equal(*largest)


@pytest.mark.parametrize("tokens", [1, 50, 3000])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_gathered_by_the_cast(counts, tokens):
    """As rows that were gathered before."""
    groups, rows = groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE)), sum(counts)
    x = torch.randn(tokens, 72, device=DEVICE).bfloat16()
    source, scale = torch.randint(tokens, (rows,), device=DEVICE), 0.1 + 100 * torch.rand(len(counts), device=DEVICE)
    largest = [torch.zeros(len(counts), device=DEVICE) for _ in range(3)]
    how = {"rows": True, "columns": True}
    gathered = quantize_groups(x, groups.reading(source), E4M3, scale, amax_out=largest[0], **how)
    theirs = reference_groups.quantize_groups(x, groups.reading(source), E4M3, scale, amax_out=largest[1], **how)
    before = quantize_groups(x[source], groups, E4M3, scale, amax_out=largest[2], **how)
    end = int(groups.first[-1]) * TILE
    for made in zip(gathered, theirs, before, strict=True):
        one, *others = ((t if t.shape[0] == groups.rows else t.mT)[:end].float() for t in made)
        assert all(torch.equal(one, other) for other in others)
    assert torch.equal(largest[0], largest[1]) and torch.equal(largest[0], largest[2])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 0), (0, 1)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_that_came_in_fp8_are_spread(counts, rows, columns):
    """Every code, those of NaN and infinities included, to the bit."""
    groups = groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    codes = torch.randint(256, (sum(counts), 72), dtype=torch.uint8, device=DEVICE).view(E5M2.dtype)
    payload, columns_of = spread_groups(codes, groups, rows=bool(rows), columns=bool(columns))
    assert (payload is not None, columns_of is not None) == (bool(rows), bool(columns))
    end = int(groups.first[-1]) * TILE
    wanted = torch.zeros(groups.rows, 72, dtype=torch.uint8, device=DEVICE)
    wanted[groups.place] = codes.view(torch.uint8)
    for made in (payload, None if columns_of is None else columns_of.mT):
        assert made is None or torch.equal(made[:end].view(torch.uint8), wanted[:end])


LARGE = pytest.param(5, 1408, 2048, marks=on_gpu_only)


@pytest.mark.parametrize(("count", "n", "k"), [(3, 80, 136), (1, 16, 16), LARGE])
def test_each_is_transposed(count, n, k):
    """Of matrices with gaps between them; what lies before and behind the results stays."""
    codes = torch.randint(0, 256, (count, n + 16, k), dtype=torch.uint8, device=DEVICE)
    room = torch.full((count * n * k + 32,), 77, dtype=torch.uint8, device=DEVICE)
    payloads = codes.view(E4M3.dtype)[:, :n]
    transpose_each(payloads, room[16:-16].view(E4M3.dtype).view(count, k, n))
    assert torch.equal(room[16:-16].view(count, k, n), codes[:, :n].mT)
    assert (room[:16] == 77).all() and (room[-16:] == 77).all()
