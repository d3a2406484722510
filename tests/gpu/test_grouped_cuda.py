"""Grouped kernels against the loop of our dense ones, bit for bit; results are poisoned first."""

import pytest
import torch

from megatron_fp8 import ops
from megatron_fp8.gemm import grouped
from megatron_fp8.gemm.cutlass import CUTLASS
from megatron_fp8.gemm.cutlass_build import Unavailable
from megatron_fp8.gemm.interface import serving, use
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops.groups import TILE, groups_of, groups_of_chosen

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
COUNTS = {
    "edges": [0, 1, 127, 128, 129, 0, 255, 256, 257, 0],
    "one": [0, 0, 900, 0],
    "alone": [300],
    "many": [*range(0, 640, 10)],
}
SIZES = [(256, 128), (272, 144), (1408, 2048), (64, 48)]  # N, K


@pytest.fixture(scope="module", autouse=True)
def built():
    before = serving("cuda").name
    try:
        CUTLASS.prepare(build=False)
    except Unavailable as reason:
        pytest.skip(str(reason))
    use("cutlass")
    kernels, CUTLASS.kernels = CUTLASS.kernels, tuple(k for k in CUTLASS.kernels if k.promote in (0, 256))
    yield
    CUTLASS.kernels = kernels
    use(before)


def cast(width, groups, fmt):
    scale = 1 + torch.rand(groups.counts.numel(), device=CUDA) * 50
    values = torch.randn(groups.place.numel(), width, device=CUDA).bfloat16()
    payload, columns = ops.quantize_groups(values, groups, fmt, scale, rows=True, columns=True)
    return grouped.GroupedTensor(groups, scale.reciprocal(), payload, columns)


def groups(counts):
    return groups_of(torch.tensor(counts, device=CUDA), sum(counts), CUDA)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("fmt", "fast"), [(E4M3, True), (E5M2, False)], ids=["forward", "dgrad"])
@pytest.mark.parametrize("gap", [0, 16])
def test_rows(counts, n, k, fmt, fast, gap):
    of = groups(counts)
    x = cast(k, of, fmt)
    memory = torch.randn(len(counts), n + gap, k, device=CUDA).to(E4M3.dtype)[:, :n]
    each = tuple(ScaledTensor(payload, torch.rand((), device=CUDA)) for payload in memory)
    weights = grouped.GroupedWeights.of(each)
    ours, theirs = torch.full((2, of.rows, n), torch.nan, dtype=torch.bfloat16, device=CUDA)
    assert grouped._cutlass_rows(x, weights, ours, fast)
    grouped.loop_rows(x, weights, theirs, fast)
    own = torch.zeros(of.rows, dtype=torch.bool, device=CUDA)
    own[of.place] = True
    end = int(of.first[-1]) * TILE
    assert torch.equal(ours[own], theirs[own]) and not ours[own].isnan().any()
    assert (ours[:end][~own[:end]] == 0).all() and ours[end:].isnan().all()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gap", [0, 16])
def test_sums(counts, n, k, dtype, gap):
    """Written, and then added."""
    of = groups(counts)
    dy, x = cast(n, of, E5M2), cast(k, of, E4M3)
    memory = torch.full((2, len(counts), n + gap, k), torch.nan, dtype=dtype, device=CUDA)
    ours, theirs = (each[:, :n] for each in memory)
    for accumulate in (False, True):
        assert grouped._cutlass_sums(dy, x, ours, accumulate)
        grouped.loop_sums(dy, x, theirs.unbind(), accumulate)
        assert torch.equal(ours, theirs) and not ours.isnan().any()
    assert memory[:, :, n:].isnan().all()
    assert all((place == 0).all() for place, count in zip(ours, counts, strict=True) if not count)


@pytest.mark.parametrize("which", ["cutlass", "triton"])
def test_a_rank_without_a_row(which):
    """Its products have a tile of zeros, and what they leave is zero or not read; sums are zeros, and add none."""
    groups, read = groups_of_chosen(torch.zeros(300, 4, dtype=torch.bool, device=CUDA), 2)
    scale, x = torch.ones(4, device=CUDA), torch.randn(300, 128, device=CUDA).bfloat16()
    a = grouped.GroupedTensor(read, scale, *ops.quantize_groups(x, read, E4M3, scale, rows=True, columns=True))
    each = tuple(ScaledTensor(torch.randn(64, 128, device=CUDA).to(E4M3.dtype), scale[0]) for _ in range(4))
    y = torch.full((groups.rows, 64), torch.nan, dtype=torch.bfloat16, device=CUDA)
    assert getattr(grouped, f"_{which}_rows")(a, grouped.GroupedWeights.of(each), y, True)
    assert not y[:TILE].any() and y[TILE:].isnan().all() and not ops.combine(y, read.table).any()
    b = grouped.GroupedTensor(read, scale, *ops.quantize_groups(x, read, E5M2, scale, rows=True, columns=True))
    dw = torch.full((4, 128, 128), torch.nan, dtype=torch.bfloat16, device=CUDA)
    for accumulate in (False, True):
        assert getattr(grouped, f"_{which}_sums")(b, a, dw, accumulate) and not dw.any()


def test_a_graph_replays_other_counts():
    """Tables are read when it runs: a recorded product follows counts that have changed."""
    of = groups([128, 256, 0, 100])
    x = cast(128, of, E4M3)
    one, codes = torch.ones((), device=CUDA), torch.randn(4, 64, 128, device=CUDA).to(E4M3.dtype)
    each = tuple(ScaledTensor(payload, one) for payload in codes)
    weights, y = grouped.GroupedWeights.of(each), torch.empty(of.rows, 64, dtype=torch.bfloat16, device=CUDA)
    grouped._cutlass_rows(x, weights, y, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped._cutlass_rows(x, weights, y, True)
    other = groups([128, 0, 256, 100])  # as many tiles: what x has behind its last one is undefined
    assert other.rows == of.rows and other.first[-1] == of.first[-1]
    for mine, new in ((of.first, other.first), (of.expert, other.expert)):
        mine.copy_(new)
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        expected = torch.full_like(y, torch.nan)
        grouped._cutlass_rows(x, weights, expected, True)
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7)) and not y[: int(of.first[-1]) * TILE].isnan().any()
