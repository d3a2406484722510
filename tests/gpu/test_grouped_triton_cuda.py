"""Triton's products of several experts, against sums in float64; results are poisoned first.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8.gemm import grouped_triton
from megatron_fp8.gemm.grouped_triton import ELSEWHERE, FAST, FLOAT32, PROMOTED
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.ops.groups import TILE, groups_of

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
COUNTS = {
    "edges": [0, 1, 127, 129, 0, 256, 0],
    "one": [0, 0, 300, 0],
    "alone": [130],
    "many": pytest.param([*range(0, 640, 10)], marks=on_gpu_only),
}
SIZES = [(272, 144), (48, 32), pytest.param((1408, 2048), marks=on_gpu_only)]  # N, K
SHAPES = {"fast": FAST, "promoted": PROMOTED, "float32": FLOAT32, "elsewhere": ELSEWHERE}
each_way = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def codes(fmt, *shape):
    return torch.randn(*shape, device=DEVICE).to(fmt.dtype)


def scales(groups):
    return 0.1 + torch.rand(groups.counts.numel(), device=DEVICE)


def own_rows(groups):
    own = torch.zeros(groups.rows, 1, dtype=torch.bool, device=DEVICE)
    own[groups.place] = True
    return own


def padded(fmt, groups, columns):
    """Rows of all experts (R', K) with zeros as padding, and NaN beyond the last tile."""
    values = torch.randn(groups.rows, columns, device=DEVICE) * own_rows(groups)
    values[int(groups.first[-1]) * TILE :] = torch.nan
    return values.to(fmt.dtype)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@each_way
def test_rows(counts, sizes, fmt, shape):
    (n, k), groups = sizes, groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    a, b = padded(fmt, groups, k), codes(E4M3, len(counts), n + 16, k)[:, :n]  # with gaps
    scale_a, scale_b = scales(groups), scales(groups)
    y = torch.full((groups.rows, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    grouped_triton.rows(a, b, y, scale_a, scale_b, groups, promote=128 if fmt == E5M2 else 0, shape=shape)
    for e, part in enumerate(groups.parts):
        expected = a[part].double() @ b[e].double().t() * (scale_a[e] * scale_b[e]).double()
        torch.testing.assert_close(y[part].double(), expected, rtol=2**-7, atol=1e-2 * k**0.5)
    end = int(groups.first[-1]) * TILE
    assert (y[:end][~own_rows(groups)[:end, 0]] == 0).all() and y[end:].isnan().all()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_way
def test_sums(counts, sizes, dtype, shape):
    """Written, and then added; between the results is something else."""
    if dtype == torch.float32 and shape in (FAST, PROMOTED):
        pytest.skip("such a tile does not fit in shared memory")
    (m, n), groups = sizes, groups_of(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    a, b = (padded(fmt, groups, width).t().contiguous() for fmt, width in ((E5M2, m), (E4M3, n)))
    scale_a, scale_b = scales(groups), scales(groups)
    memory = torch.full((len(counts), m + 16, n), torch.nan, dtype=dtype, device=DEVICE)
    d = memory[:, :m]
    how = {"promote": 0 if shape is FAST else 128, "shape": shape}
    grouped_triton.sums(a, b, d, scale_a, scale_b, groups, **how)
    once = d.clone()
    for e, part in enumerate(groups.parts):
        expected = a[:, part].double() @ b[:, part].double().t() * (scale_a[e] * scale_b[e]).double()
        atol = 1e-2 * (1 + part.stop - part.start) ** 0.5
        torch.testing.assert_close(d[e].double(), expected, rtol=2**-7, atol=atol)
        assert part.start < part.stop or (d[e] == 0).all()
    grouped_triton.sums(a, b, d, scale_a, scale_b, groups, add=True, **how)
    torch.testing.assert_close(d, 2 * once, rtol=2**-7, atol=0)
    assert memory[:, m:].isnan().all()


@on_gpu_only
def test_a_graph_replays_other_counts():
    """Tables are read when it runs: a recorded product follows counts that have changed."""
    before, after = torch.tensor([[128, 256, 0, 100], [100, 0, 300, 84]])
    groups, other = (groups_of(counts, 484, torch.device(DEVICE)) for counts in (before, after))
    a, b = codes(E4M3, groups.rows, 128), codes(E4M3, 4, 64, 128)
    y, expected = torch.full((2, groups.rows, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    operands = scales(groups), scales(groups)
    grouped_triton.rows(a, b, y, *operands, groups)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_triton.rows(a, b, y, *operands, groups)
    groups.first.copy_(other.first)
    groups.expert.copy_(other.expert)
    y.fill_(torch.nan)
    graph.replay()
    grouped_triton.rows(a, b, expected, *operands, other)
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7)) and not y[: int(other.first[-1]) * TILE].isnan().any()
