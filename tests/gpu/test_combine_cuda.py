"""Sums of experts' results by their table, against the reference and against a sum in float64; all padding is NaN.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_groups_cuda import in_full
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import ops
from megatron_fp8.ops import reference_combine
from megatron_fp8.ops.groups import groups_of

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.combine import combine
else:
    combine = ops.combine

BF16 = torch.bfloat16
# tokens, top, experts, which of these are chosen from
ROUTED = {
    "top 3 of 5": (150, 3, 5, range(5)),
    "top 1": (130, 1, 4, range(4)),
    "one expert has all": (70, 1, 3, [1]),
    "experts without a token": (45, 2, 8, [0, 2, 6, 7]),
    "only one": (128, 1, 1, [0]),
    "one token": (1, 6, 6, range(6)),
}
LARGE = pytest.param("large", 2048, BF16, marks=on_gpu_only)
WIDTHS = [("top 3 of 5", 72, BF16), ("top 3 of 5", 2056, BF16), ("top 1", 33, torch.float16)]
CASES = [*WIDTHS, ("top 3 of 5", 264, torch.float32), *((name, 40, BF16) for name in [*ROUTED][1:]), LARGE]


def routed(name):
    """(groups, each given row's token (R,), tokens); rows are sorted by expert, and an expert's by token."""
    tokens, top, experts, chosen = ROUTED.get(name, (3000, 8, 64, range(60)))
    draws = torch.rand(tokens, len(chosen)).argsort(1)[:, :top]
    picks = torch.tensor(list(chosen))[draws]
    chosen_by = torch.zeros(experts, tokens, dtype=torch.bool)
    chosen_by[picks.T, torch.arange(tokens)] = True
    token = chosen_by.nonzero()[:, 1].to(DEVICE)
    return groups_of(chosen_by.sum(1), tokens * top, torch.device(DEVICE)), token, tokens


def alike(mine, other):
    torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    ours, theirs = (x.view(torch.int32 if x.dtype == torch.float32 else torch.int16) for x in (mine, other))
    assert torch.equal(ours[~mine.isnan()], theirs[~other.isnan()])  # a zero's sign too


def exact(given, token, tokens):
    """(sums (T, K), sums of magnitudes) in float64."""
    zeros = given.new_zeros(tokens, given.shape[1], dtype=torch.float64)
    return tuple(zeros.index_add(0, token, x.double()) for x in (given, given.abs()))


@pytest.mark.parametrize("name", [*ROUTED, pytest.param("large", marks=on_gpu_only)])
def test_the_table(name):
    """Each token's rows, in the order in which they are given."""
    groups, token, tokens = routed(name)
    read = groups.reading(token, tokens)
    assert groups.table is None and groups.reading(token).table is None
    for of, rows in enumerate(read.table.tolist()[:200]):
        assert rows == groups.place[token == of].tolist()
        assert (read.source[rows] == of).all()


@pytest.mark.parametrize(("name", "width", "dtype"), CASES, ids=str)
def test_sums(name, width, dtype):
    groups, token, tokens = routed(name)
    table = groups.reading(token, tokens).table
    given = (torch.randn(token.numel(), width, device=DEVICE) * 10).to(dtype)
    ours = combine(in_full(given, groups), table)
    alike(ours, reference_combine.combine(in_full(given, groups), table))
    sums, magnitudes = exact(given, token, tokens)
    bound = sums.abs() * torch.finfo(dtype).eps / 2 + 1e-6 * magnitudes  # one rounding, however many rows
    assert ours.dtype == dtype and ((ours - sums).abs() <= bound).all()
    assert torch.equal(ours, combine(in_full(given, groups), table))  # in a fixed order


def test_one_rounding_where_stock_has_several():
    rows = torch.tensor([256.0, 1.0, 1.0, 1.0], device=DEVICE).to(BF16)[:, None].expand(4, 16)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    stocks = rows.new_zeros(1, 16)
    for row in rows:
        stocks += row
    assert (stocks == 256).all() and (combine(rows, table) == 260).all()


def test_tokens_that_lack_rows():
    """As under a capacity: some of a token's places are empty, or all are. Then its sum is zero."""
    groups, token, tokens = routed("top 3 of 5")
    table = groups.reading(token, tokens).table
    table[torch.rand(table.shape, device=DEVICE) < 0.4] = -1
    table[5], table[6, 0], table[7, 1:] = -1, -1, -1
    full = in_full(torch.randn(token.numel(), 72, device=DEVICE).to(BF16), groups)
    full[-1] = full[0] = torch.nan  # what -1, or 0 in its place, would read
    table[(table == 0) | (table == groups.rows - 1)] = -1
    ours = combine(full, table)
    alike(ours, reference_combine.combine(full, table))
    assert ours.isfinite().all() and (ours[5] == 0).all()
    for t in (7, 11):
        rows = [row for row in table[t].tolist() if row >= 0]
        torch.testing.assert_close(ours[t].float(), full[rows].float().sum(0), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, -0.0])
def test_odd_values(odd):
    """They stay where they are: in the sums of their own token."""
    groups, token, tokens = routed("top 3 of 5")
    table = groups.reading(token, tokens).table
    given = torch.randn(token.numel(), 72, device=DEVICE).to(BF16)
    given[token == 3, 9] = odd
    ours = combine(in_full(given, groups), table)
    alike(ours, reference_combine.combine(in_full(given, groups), table))
    assert ours[3, 9].isnan() if odd != odd else ours[3, 9] == odd
    assert ours.isfinite().sum() >= ours.numel() - 1
