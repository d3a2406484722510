"""ops.count_cast on CUDA against reference_statistics.py on the CPU; neither it nor the monitor makes the host wait
during a step.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, dtypes, formats, on_gpu_only, put, random_bits, same

from megatron_fp8 import gemm, ops
from megatron_fp8.numerics import BLOCK, E4M3, E5M2
from megatron_fp8.numerics.blocks import block_scales
from megatron_fp8.ops import reference, reference_statistics

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton.statistics import count_cast
else:
    count_cast = ops.count_cast

INF = math.inf
SIZES = [1, 127, 128, 4_097, 64 * 128, 64 * 128 + 1, 50_000]  # a program takes 64 * 128


def totals(device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and extremes of three tensors, with some casts counted already."""
    counts = torch.tensor([[7, 0, 0], [2**40, 2**33, 2**35], [0, 0, 5]], device=device)
    return counts, torch.full((3, 3), -INF, device=device)


def check(x: torch.Tensor, payload: torch.Tensor, scale_inv: torch.Tensor, layout: str = "plain") -> list[int]:
    """Check that both count the cast, and half of it again, into the middle row; returns that row's counts."""
    expected, got = totals("cpu"), totals(DEVICE)
    on_device = put(x, layout), put(payload.view(torch.uint8), layout).view(payload.dtype), put(scale_inv)
    again = x.flatten()[::2], payload.view(torch.uint8).flatten()[::2].view(payload.dtype), torch.tensor(0.37)
    for count, cast, half, (counts, extremes) in (
        (reference_statistics.count_cast, (x, payload, scale_inv), again, expected),
        (count_cast, on_device, map(put, again), got),
    ):
        assert count(*cast, counts[1], extremes[1]) is None
        before = counts[1].clone()
        count(*half, counts[1], extremes[1])
        del counts, extremes
    assert same(got[0], expected[0]) and same(got[1], expected[1])
    return before.tolist()


@formats
@dtypes
@pytest.mark.parametrize("n", SIZES)
def test_one_scale(fmt, dtype, n):
    spread = math.log(fmt.max / fmt.smallest_subnormal) / 2
    x = (torch.randn(n) * torch.randn(n).mul(spread).exp()).to(dtype)
    for scale in (0.37, 2.0**-5, 300.0):
        scale = torch.tensor(scale)
        check(x, reference.quantize(x, fmt, scale), scale.reciprocal())


@pytest.mark.parametrize("layout", ["plain", "offset", "transposed"])
@pytest.mark.parametrize("shape", [(128, 64), (37, 150), (2, 3, 144)], ids=str)
def test_layouts(layout, shape):
    x = torch.randn(shape).mul(9).exp().bfloat16()
    scale = torch.tensor(2.0**-3)
    counts = check(x, reference.quantize(x, E4M3, scale), scale.reciprocal(), layout)
    assert counts[0] == 2**40 + x.numel() and counts[1] > 2**33 and counts[2] > 2**35


@formats
@dtypes
def test_any_bits(fmt, dtype):
    """Random bits in x and payload: the counts follow their definition even if no cast made the payload."""
    n = 1 << 16
    x, payload = random_bits(n, dtype), torch.randint(0, 256, (n,)).to(torch.uint8).view(fmt.dtype)
    for scale_inv in (2.0**-126, 0.1, 2.0**100, 2.0**126):  # the last gives an infinite limit
        check(x, payload, torch.tensor(scale_inv))
    check(torch.where(x.isfinite(), x, 0.0), payload, torch.tensor(0.1))
    check(x, payload, block_scales(torch.randint(0, 255, (n // BLOCK,)).to(torch.uint8)))


@formats
@pytest.mark.parametrize("blocks", [1, 63, 64, 130])
def test_limits(fmt, blocks):
    """At the limit, and one float32 to either side of it."""
    scale_inv = torch.rand(blocks) * 2.0 ** torch.randint(-126, 110, (blocks,))
    limit = (scale_inv * (fmt.max * (1 + 2.0**-20)))[:, None]
    up, down = torch.tensor(INF), torch.tensor(-INF)
    x = torch.cat([limit, limit.nextafter(up), limit.nextafter(down), torch.zeros(blocks, BLOCK - 3)], 1)
    payload = torch.ones(blocks, BLOCK).to(fmt.dtype)
    assert check(x.flatten(), payload.flatten(), scale_inv)[1] == 2**33 + blocks
    assert check(x[0], payload[0], scale_inv[0])[1] == 2**33 + 1


@dtypes
@pytest.mark.parametrize("blocks", [1, 63, pytest.param(64, marks=pytest.mark.smoke), 301])
def test_blocks(dtype, blocks):
    spread = 10 ** (5 * torch.randn(blocks, 1) if dtype != torch.float16 else torch.zeros(1, 1))
    x = (torch.randn(blocks, BLOCK) * spread * torch.randn(blocks, BLOCK).mul(4).exp()).to(dtype).flatten()
    for zeros in (0, blocks // 2, blocks):  # number of blocks of zeros, whose scale does not count
        x[: zeros * BLOCK] = 0
        quantized = reference.quantize_blocks(x)
        for factor in (1.0, 0.5):  # half the scale_inv makes blocks clip
            check(x, quantized.payload, block_scales(quantized.exponents) * factor)


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_the_non_finite_stays_in_the_maximum(bad):
    x, scale = torch.randn(40_000), torch.tensor(1.0)
    x[torch.randint(40_000, ())] = bad
    counts, extremes = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.full((3,), -INF, device=DEVICE)
    count_cast(put(x), put(reference.quantize(x, E4M3, scale)), put(scale), counts, extremes)
    assert same(extremes[0], torch.tensor(abs(bad))) and counts[1] == 0
    count_cast(put(torch.ones(5)), put(torch.ones(5).to(E4M3.dtype)), put(scale), counts, extremes)
    assert same(extremes[0], torch.tensor(abs(bad)))


@pytest.mark.parametrize(("payload", "scale_inv"), [((100,), ()), ((2, BLOCK), (1,)), ((2, BLOCK), (3,))], ids=str)
def test_shapes_that_do_not_fit_are_refused(payload, scale_inv):
    x, untouched = put(torch.ones(2, BLOCK)), put(torch.zeros(3))
    with pytest.raises(ValueError, match="payload of the same shape"):
        count_cast(x, put(torch.ones(payload).to(E4M3.dtype)), put(torch.ones(scale_inv)), untouched, untouched)
    assert not untouched.any()


@on_gpu_only
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 5 * BLOCK
    x = torch.full((n,), 1e-9, dtype=torch.bfloat16, device=DEVICE)
    x[-300:] = torch.tensor([450.0, -3.0, 0.0] * 100)
    payload = ops.quantize(x, E4M3, put(torch.tensor(1.0)))
    for scale_inv in (torch.tensor(1.0), torch.ones(n // BLOCK)):
        counts, extremes = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.full((3,), -INF, device=DEVICE)
        count_cast(x, payload, put(scale_inv), counts, extremes)
        assert counts.tolist() == [n, 100, n - 300] and extremes.tolist() == [450.0, 1.0, -1.0]


@on_gpu_only
def test_the_host_does_not_wait(monkeypatch):
    """Casts of every kind through Monitor, from `begin_step` until `end_step` would read."""
    from megatron_fp8.engine.events import Events
    from megatron_fp8.engine.grad_store import GradSink, grad_store
    from megatron_fp8.engine.owned_weight import GRAD, INPUT, OwnedWeight
    from megatron_fp8.engine.reductions import Reduction
    from megatron_fp8.monitor import collect

    config = SimpleNamespace(
        gemm="fp8", weight="bf16", forward_format=E4M3, grad_format=E5M2, margin=0,
        log_interval=2, log_grad_snr=False, grad_reduce="block", emulate=None,
    )  # fmt: skip
    weight = OwnedWeight(torch.nn.Parameter(torch.randn(64, 32, device=DEVICE).bfloat16()), config)
    weight.events = events = Events()
    two_ranks = SimpleNamespace(size=lambda: 2)
    buckets = []
    for storage in ("bf16", "fp8"):
        store = grad_store(1, 2048, storage, DEVICE)
        buckets.append(SimpleNamespace(weights=[weight], grads=store, spans=[(weight, 0, 2048)], group=two_ranks))
    sets = [SimpleNamespace(buckets=buckets[:1], linears=[weight], reduction=Reduction())]
    monitor = collect.Monitor(config, sets, events)
    monkeypatch.setattr(collect, "current_iteration", lambda: 2)
    x, dy = (torch.randn(40, k, device=DEVICE).bfloat16() for k in (32, 64))

    def step():
        monitor.begin_step()
        weight.cast(x, INPUT, columns=True, training=True)
        weight.cast(dy, GRAD, columns=True, training=True)
        weight.sink = GradSink(buckets[1].grads, 0, weight.param.shape, (1, 2, 3))
        for _ in range(3):
            weight.take_gradient(gemm.Product(dy.t(), x.t()))
        (look,) = weight.events.reducing
        for _ in look(buckets[0], buckets[0].grads.local()):
            pass

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The weight, x and dy once; the gradient when three micro-batches store it, and when it is sent.
    assert monitor.counts._casts[0, :, 0].tolist() == [40 * 32, 40 * 64, 2048, 4 * 2048]
