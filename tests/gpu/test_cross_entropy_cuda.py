"""The cross-entropy kernels on CUDA against reference_cross_entropy.py on the CPU, and the loss that uses them.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
import torch.distributed as dist
from test_ops_cuda import DEVICE, INTERPRETED, dtypes, on_gpu_only, put, same

from megatron_fp8 import ops
from megatron_fp8.ops import reference_cross_entropy as reference

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton import cross_entropy as kernels
else:
    kernels = ops

INF, NAN = torch.inf, torch.nan
# A statistics program takes 4 * 1024 columns at a time, a gradient program 2048.
COLUMNS = [(columns, torch.bfloat16) for columns in (1, 7, 1024, 2048, 2049, 4095, 4096, 4097, 6288, 9001)]
COLUMNS += [(columns, dtype) for columns in (7, 4097, 6288) for dtype in (torch.float16, torch.float32)]
# Relative error of a type: a last bit may decide a tie between neighbours.
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 0.0}


def close(got: torch.Tensor, expected: torch.Tensor, rounding: float = 0.0, smallest: float = 0.0) -> bool:
    """Whether `got` is within the error that ops/triton/cross_entropy.py states, plus a rounding; NaNs and infinities
    must be the same."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    a, b = got.cpu().double(), expected.cpu().double()
    return torch.allclose(a, b, rtol=1e-5 + rounding, atol=1e-6 + smallest, equal_nan=True)


def check(
    logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, first: int = 0, layout: str = "plain"
) -> torch.Tensor:
    """Compare all three operations, the gradient in new memory and in place; return the loss of this shard alone."""
    columns = logits.shape[1]
    statistics = reference.cross_entropy_statistics(logits, target, first)
    loss, normalizer = reference.cross_entropy_loss(statistics[None], target, first + columns)
    expected = torch.empty_like(logits)
    reference.cross_entropy_gradient(logits, target, first, normalizer, dloss, expected)

    x, t = put(logits, layout), put(target)
    got = kernels.cross_entropy_statistics(x, t, first)
    finite = statistics[1].isfinite()  # for NaN rows the maximum is arbitrary: a GPU's drops NaN, but the sum keeps it
    assert same(got[0].cpu()[finite], statistics[0][finite]) and close(got[1], statistics[1])
    assert same(got[2], statistics[2])
    got_loss, got_normalizer = kernels.cross_entropy_loss(put(statistics)[None], t, first + columns)
    assert close(got_loss, loss) and close(got_normalizer[1], normalizer[1])
    finite = normalizer[1].isfinite()
    assert same(got_normalizer[0].cpu()[finite], normalizer[0][finite])
    assert close(kernels.cross_entropy_loss(got[None], t, first + columns)[0], loss, smallest=1e-5)
    given = got_normalizer, put(dloss)
    out = torch.full_like(x, 77.0)
    kernels.cross_entropy_gradient(x, t, first, *given, out)
    # Relative to the larger of the value and dloss: (probability - 1) * dloss has dloss's rounding error.
    smallest = 2.0**-24 if logits.dtype == torch.float16 else 1e-30
    assert close(out, expected, ROUNDING[logits.dtype], smallest + 1e-6 * dloss.nan_to_num().abs().max().item())
    assert same(x, logits)
    kernels.cross_entropy_gradient(x, t, first, *given, x)
    assert same(x, out.cpu())
    assert not x[put(dloss) == 0].any()
    return loss


def example(rows, columns, dtype, scale=3.0):
    dloss = torch.rand(rows) * (torch.rand(rows) < 0.7)
    return (torch.randn(rows, columns) * scale).to(dtype), torch.randint(columns, (rows,)), dloss


@pytest.mark.parametrize(("columns", "dtype"), COLUMNS, ids=str)
def test_columns(columns, dtype):
    check(*example(7, columns, dtype))


@pytest.mark.parametrize(("rows", "scale"), [(1, 0.1), (257, 30.0)])
def test_rows(rows, scale):
    check(*example(rows, 130, torch.bfloat16, scale))


@dtypes
def test_an_offset_that_rules_out_wide_loads(dtype):
    check(*example(5, 2056, dtype), layout="offset")


@pytest.mark.parametrize("first", [0, pytest.param(3000, marks=pytest.mark.smoke), 1 << 18])
def test_a_shard(first):
    logits, target, dloss = example(12, 3000, torch.bfloat16)
    target += first + 3000 * (torch.arange(12) % 3 - 1)  # below, inside and above the shard
    target[0], target[1], target[2] = -1, -100, first + 2999
    check(logits, target, dloss, first)


@dtypes
@pytest.mark.parametrize("columns", [20, 5003])
def test_extremes(dtype, columns):
    logits, target, dloss = torch.zeros(14, columns).to(dtype), torch.full((14,), 3), torch.rand(14) + 0.1
    big = torch.finfo(dtype).max
    logits[0, 3], logits[1, 4] = 200.0, 200.0  # certain and right; certain and wrong
    logits[2], logits[3] = big, -big
    logits[4, 5:], logits[5, 3], logits[6, 5], logits[7], logits[8, 9] = -INF, -INF, INF, -INF, NAN
    logits[9], logits[10, columns - 1], target[10] = NAN, 50.0, columns - 1
    logits[11, :-1] = -INF  # only the last column is finite
    target[11] = columns - 1
    logits[12, 3] = NAN
    dloss[12] = 0
    logits[13], dloss[13] = torch.randn(columns) * 5 + 60000 * (dtype != torch.float16), NAN
    loss = check(logits, target, dloss)
    assert loss[6:10].isnan().all() and loss[12].isnan() and loss[5] == INF and loss[11] == 0
    assert loss[[0, 1, 2, 3, 4, 10, 13]].isfinite().all()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks(ranks):
    target = torch.randint(-1, 100 * ranks, (300,))
    shards = (torch.randn(300, 100 * ranks) * 5).split(100, 1)
    shards[-1][7] = -INF
    statistics = torch.stack(
        [reference.cross_entropy_statistics(part, target, 100 * rank) for rank, part in enumerate(shards)]
    )
    statistics[:, 0, 9], statistics[0, 1, 11] = -INF, NAN
    expected = reference.cross_entropy_loss(statistics, target, 100 * ranks)
    got = kernels.cross_entropy_loss(put(statistics), put(target), 100 * ranks)
    assert close(got[0], expected[0]) and close(got[1], expected[1])
    assert expected[0].isnan().nonzero().flatten().tolist() == ([7, 9, 11] if ranks == 1 else [9, 11])


@on_gpu_only
@pytest.mark.parametrize("columns", [50_304, 50_257, 131_072, 262_144])
def test_real_vocabularies(columns):
    check(*example(100, columns, torch.bfloat16))


@on_gpu_only
def test_more_than_2_to_the_31_logits():
    rows, columns = 16_500, 131_072
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    logits[-3:] = torch.randn(3, columns, device=DEVICE) * 3
    target, dloss = torch.randint(columns, (rows,), device=DEVICE), torch.ones(rows, device=DEVICE)
    dloss[-1] = 0
    end = slice(-3, None)
    expected = reference.cross_entropy_statistics(logits[end].cpu(), target[end].cpu(), 0)
    statistics = ops.cross_entropy_statistics(logits, target, 0)
    assert close(statistics[:, end], expected) and close(statistics[1, :9], torch.full((9,), float(columns)))
    _, normalizer = ops.cross_entropy_loss(statistics[None], target, columns)
    out = torch.empty(3, columns, dtype=torch.bfloat16)
    reference.cross_entropy_gradient(
        logits[end].cpu(), target[end].cpu(), 0, normalizer[:, end].cpu(), dloss[end].cpu(), out
    )
    ops.cross_entropy_gradient(logits, target, 0, normalizer, dloss, logits)
    assert close(logits[end], out, 2**-7) and not logits[-1].any()
    assert logits[0].count_nonzero() == columns and logits[0, target[0]] < -0.99


@on_gpu_only
def test_a_hundred_times_the_same_bits():
    logits, target, dloss = map(put, example(300, 50_304, torch.bfloat16))

    def once():
        statistics = ops.cross_entropy_statistics(logits, target, 0)
        loss, normalizer = ops.cross_entropy_loss(statistics[None], target, 50_304)
        out = torch.empty_like(logits)
        ops.cross_entropy_gradient(logits, target, 0, normalizer, dloss, out)
        return loss, out

    first = once()
    for _ in range(100):
        assert all(map(torch.equal, once(), first))


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@on_gpu_only
def test_a_layers_loss_writes_its_logits_over_and_waits_for_nothing(group):
    """The host does not wait, and the loss takes less than a hundredth of the logits' memory."""
    from megatron_fp8.layers.cross_entropy import cross_entropy

    x, w = (torch.randn(*shape, 64, device=DEVICE).bfloat16() for shape in ((512, 4), (50_304,)))
    target, mask = torch.randint(50_304, (512, 4), device=DEVICE), torch.rand(512, 4, device=DEVICE) < 0.9

    def step(loss_of, x):
        logits = x @ w.t()
        size, address, found = logits.nbytes, logits.data_ptr(), []
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = loss_of(logits, target)
        del logits
        (loss * mask).sum().backward()
        return loss.detach(), found == [address], (torch.cuda.max_memory_allocated() - before) / size

    ours, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
    step(lambda *given: cross_entropy(*given, group), x.clone().requires_grad_())  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, in_place, memory = step(lambda *given: cross_entropy(*given, group), ours)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert in_place and memory < 0.01

    def torchs(logits, target):
        rows = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(rows, target.flatten(), reduction="none").view_as(target)

    expected, _, _ = step(torchs, exact)
    assert close(loss, expected)
    assert (ours.grad.float() - exact.grad.float()).norm() < 5e-3 * exact.grad.float().norm()
