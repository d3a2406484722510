"""Every kernel of the CUTLASS library against float64, and the backend "cutlass" behind gemm/interface.py.

The data is random. The error of an element comes from the rounding of the result and from the tensor core's sums, which
keep about 13 bits of the largest of the 32 products that an MMA adds. The bound for the sums is ACCUMULATOR times the
sum of the products' magnitudes: well above the measured errors, and far below the error of a missing tile, slice or
group of K.
"""

import math

import pytest
import torch

from megatron_fp8 import ops
from megatron_fp8.gemm import found as gemm_found
from megatron_fp8.gemm import plans, search
from megatron_fp8.gemm.cublaslt import CUBLASLT
from megatron_fp8.gemm.cutlass import CUTLASS, Choice
from megatron_fp8.gemm.cutlass_build import Unavailable
from megatron_fp8.gemm.interface import Epilogue, gemm, serving, use
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), pytest.mark.gpu]
BF16, FP32 = torch.bfloat16, torch.float32
INF, NAN = math.inf, math.nan
ACCUMULATOR = 2.0**-9
UNIT = {BF16: 2.0**-8, FP32: 2.0**-23}
# (M, N, K): the smallest, odd multiples of 16, M of any kind, one tile, tails of every tile, few and many K tiles. The
# last has more of the largest tiles than a GPU has multiprocessors, so that a block takes several tiles.
SHAPES = [
    (16, 16, 16),
    (1, 16, 16),
    (48, 80, 112),
    (37, 48, 144),
    (128, 256, 128),
    (256, 128, 256),
    (144, 272, 1040),
    (300, 528, 4112),
    (129, 400, 640),
    (2064, 1552, 1536),
    (4133, 1552, 400),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        CUTLASS.prepare()
    except Unavailable as unavailable:
        pytest.skip(str(unavailable))


def scaled(m, k, dtype, scale=None):
    """A random ScaledTensor without columns, with a scale that is no power of two."""
    values = torch.randn(m, k, device="cuda") * 4
    scale_inv = torch.rand((), device="cuda") + 0.01 if scale is None else torch.tensor(scale, device="cuda")
    return ScaledTensor(values.to(dtype), scale_inv)


def put(tensor, where, value):
    """Set elements of an FP8 tensor."""
    tensor.view(torch.uint8)[where] = torch.tensor(value).to(tensor.dtype).view(torch.uint8).item()


def exact(a, b):
    """(the product in float64, the sums of its terms' magnitudes)."""
    x, w = a.payload.double() * a.scale_inv.double(), b.payload.double() * b.scale_inv.double()
    return x @ w.t(), x.abs() @ w.abs().t()


def check(got, expected, magnitude):
    bound = UNIT[got.dtype] * expected.abs() + ACCUMULATOR * magnitude + 1e-30
    excess = ((got.double() - expected).abs() - bound).nan_to_num(INF)
    assert excess.max() <= 0, f"{(excess > 0).sum()} of {got.numel()} elements, worst by {excess.max()}"


def guarded(m, n, dtype):
    """(an (M, N) of NaN inside a buffer of ones, a function that checks the ones around it)."""
    around = torch.ones(m * n + 256, dtype=dtype, device="cuda")
    inside = around[128 : 128 + m * n].view(m, n).fill_(NAN)
    return inside, lambda: bool((around[:128] == 1).all() and (around[128 + m * n :] == 1).all())


def run(choice, a, b, out, added=None, bias=None):
    how = (16, not choice.kernel.promote, None if bias is None else bias.dtype, added is not None)
    problem = plans.problem_of(a.payload, b.payload, out, *how)
    pointers = plans.pointers_of(a.scale_inv, b.scale_inv, bias)
    at = [tensor.data_ptr() for tensor in (a.payload, b.payload, out if added is None else added, out)]
    stream = torch.cuda.current_stream().cuda_stream
    CUTLASS.launch(choice, problem, out.get_device(), pointers).run(*at, stream)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_kernel_at_every_tail(shape):
    m, n, k = shape
    operands = {}
    for dtypes in {(kernel.a, kernel.b) for kernel in CUTLASS.kernels}:
        a, b = scaled(m, k, dtypes[0]), scaled(n, k, dtypes[1])
        operands[dtypes] = (a, b, *exact(a, b))
    bias = torch.randn(n, device="cuda").to(BF16)
    assert len(CUTLASS.kernels) >= 18
    for kernel in CUTLASS.kernels:
        a, b, product, magnitude = operands[kernel.a, kernel.b]
        added = torch.randn(m, n, device="cuda").to(kernel.out)
        for swizzle, order in ((1, 0), (8, 1), (8, 2)):
            choice = Choice(kernel, swizzle, order)
            print(choice, kernel.a, kernel.b, kernel.out)
            out, untouched = guarded(m, n, kernel.out)
            check(run(choice, a, b, out), product, magnitude)  # NaN if D is not written, or if C is read
            assert untouched()
        out, untouched = guarded(m, n, kernel.out)
        with_bias = product + bias.double()
        check(run(choice, a, b, out, bias=bias), with_bias, magnitude + bias.double().abs())
        full = magnitude + bias.double().abs() + added.double().abs()
        before = added.clone()
        check(run(choice, a, b, out, added, bias), with_bias + added.double(), full)  # a residual
        assert torch.equal(added, before) and untouched()
        check(run(choice, a, b, out.copy_(added), out), product + added.double(), full)  # in place
        assert untouched()


def test_promotion_keeps_small_products():
    """Ones summed over a long K are exact with any accumulator. If one large product comes before small ones, the
    tensor core's 14 bits lose the small ones; promotion keeps those of later groups."""
    k, m, n = 4096, 128, 256
    for kernel in CUTLASS.kernels:
        one = torch.ones((), device="cuda")
        a = ScaledTensor(torch.ones(m, k, device="cuda").to(kernel.a), one)
        b = ScaledTensor(torch.ones(n, k, device="cuda").to(kernel.b), one)
        out = torch.empty(m, n, dtype=kernel.out, device="cuda")
        assert (run(Choice(kernel), a, b, out) == k).all()
        if kernel.promote and kernel.out == FP32:
            put(a.payload, (slice(None), 0), 256.0)
            put(b.payload, (slice(None), 0), 256.0)
            lost = 65536 + k - 1 - run(Choice(kernel), a, b, out)
            assert (lost >= 0).all() and (lost <= kernel.promote).all()  # at most those of the first group


def test_the_non_finite_stays_in_its_row_or_column():
    m, n, k = 144, 272, 400
    for kernel in CUTLASS.kernels:
        a, b = scaled(m, k, kernel.a), scaled(n, k, kernel.b)
        clean = run(Choice(kernel), a, b, torch.empty(m, n, dtype=kernel.out, device="cuda")).clone()
        assert clean.isfinite().all()
        put(a.payload, (5, 333), NAN)
        put(b.payload, (7, 1), NAN)
        got = run(Choice(kernel), a, b, torch.empty_like(clean))
        bad = torch.zeros(m, n, dtype=torch.bool, device="cuda")
        bad[5], bad[:, 7] = True, True
        assert torch.equal(got.isnan(), bad) and torch.equal(got[~bad], clean[~bad])
        if kernel.a == torch.float8_e5m2:
            a, b = scaled(m, k, kernel.a), ScaledTensor(torch.ones(n, k, device="cuda").to(kernel.b), a.scale_inv)
            put(a.payload, (3, 17), INF)
            put(a.payload, (4, 18), -INF)
            got = run(Choice(kernel), a, b, torch.empty_like(clean))
            assert (got[3] == INF).all() and (got[4] == -INF).all() and got[5:].isfinite().all()
        zero = ScaledTensor(torch.zeros(m, k, device="cuda").to(kernel.a), a.scale_inv)
        b = scaled(n, k, kernel.b)
        assert (run(Choice(kernel), zero, b, torch.empty_like(clean)) == 0).all()
        huge = ScaledTensor(zero.payload.clone(), torch.tensor(3e38, device="cuda"))
        put(huge.payload, 0, 1.0)
        put(b.payload, 0, 16.0)
        got = run(Choice(kernel), huge, ScaledTensor(b.payload, torch.ones((), device="cuda")), torch.empty_like(clean))
        assert got[0, 0] == INF and (got[1:] == 0).all()


def test_repetitions_agree_bit_for_bit():
    """Twenty runs, with other work on another stream at the same time."""
    m, n, k = 1040, 1552, 2064
    noise = torch.randn(2048, 2048, device="cuda")
    beside = torch.cuda.Stream()
    for kernel in CUTLASS.kernels:
        a, b = scaled(m, k, kernel.a), scaled(n, k, kernel.b)
        added, bias = torch.randn(m, n, device="cuda").to(kernel.out), torch.randn(n, device="cuda").to(BF16)
        first = run(Choice(kernel), a, b, torch.empty_like(added), added, bias)
        for repetition in range(20):
            with torch.cuda.stream(beside):
                noise.mul_(0.5).add_(1.0)
            choice = Choice(kernel, 1 << repetition % 4, repetition % 3)  # the order of tiles does not change the sums
            again = run(choice, a, b, torch.full_like(added, NAN), added, bias)
            assert torch.equal(again.view(torch.uint8), first.view(torch.uint8)), (kernel, repetition)


def test_it_runs_on_the_stream_it_is_called_on_and_reads_scales_on_the_device():
    """In a CUDA graph, whose capture fails if anything waits. A replay reads a new scale and new operands."""
    m, n, k = 256, 512, 384
    a, b = scaled(m, k, E4M3.dtype), scaled(n, k, E4M3.dtype)
    types = (E4M3.dtype, E4M3.dtype, BF16)
    kernel = next(one for one in CUTLASS.kernels if (one.a, one.b, one.out) == types and not one.promote)
    out = torch.zeros(m, n, dtype=BF16, device="cuda")
    run(Choice(kernel), a, b, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(Choice(kernel), a, b, out)
    a.scale_inv.fill_(3.0)
    a.payload.copy_(scaled(m, k, E4M3.dtype).payload)
    graph.replay()
    check(out, *exact(a, b))


def test_launches_at_once_do_not_take_each_others_tiles():
    """On four streams, with more launches than counters (csrc/library.cu)."""
    a, b = scaled(2064, 512, E5M2.dtype), scaled(1552, 512, E4M3.dtype)
    kernel = next(one for one in CUTLASS.kernels if one.a == E5M2.dtype and one.promote and not one.pingpong)
    alone = run(Choice(kernel), a, b, torch.empty(2064, 1552, dtype=kernel.out, device="cuda"))
    streams, outs = [torch.cuda.Stream() for _ in range(4)], [torch.full_like(alone, NAN) for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(5000):
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                run(Choice(kernel), a, b, out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone) for out in outs)


# ---- The seam ------------------------------------------------------------------------------------------


@pytest.fixture
def serving_cutlass():
    before = serving("cuda").name
    use("cutlass")
    yield
    use(before)


def both_layouts(m, k, fmt):
    scale = torch.tensor(20.0, device="cuda")
    payload, columns = ops.quantize(torch.randn(m, k, device="cuda"), fmt, scale, transpose=True)
    return ScaledTensor(payload, scale.reciprocal(), columns)


@pytest.mark.smoke
def test_a_linears_three_products(serving_cutlass, monkeypatch):
    launched = []
    launch = CUTLASS.launch
    monkeypatch.setattr(CUTLASS, "launch", lambda *args: (launched.append(args[0].kernel), launch(*args))[1])
    x, w, dy = both_layouts(176, 240, E4M3), both_layouts(272, 240, E4M3), both_layouts(176, 272, E5M2)
    check(gemm(x, w, fast_accum=True), *exact(x, w))
    check(gemm(dy, w.T), *exact(dy, w.T))
    for dtype in (BF16, FP32):
        into = torch.randn(272, 240, device="cuda").to(dtype)
        before = into.double()
        assert gemm(dy.T, x.T, Epilogue(into=into, accumulate=True)) is into
        product, magnitude = exact(dy.T, x.T)
        check(into, before + product, magnitude + before.abs())
    check(gemm(w.T, dy), *exact(w.T, dy))  # E4M3 x E5M2
    assert [(kernel.a, kernel.out, bool(kernel.promote)) for kernel in launched] == [
        (E4M3.dtype, BF16, False),
        (E5M2.dtype, BF16, True),
        (E5M2.dtype, BF16, True),
        (E5M2.dtype, FP32, True),
        (E4M3.dtype, BF16, True),
    ]


def test_without_a_search_ours_run_long_dgrads_alone(monkeypatch):
    """A linear from 4,096 to 12,288 features, 2,048 tokens, with the default backend."""
    launched = []
    launch = CUTLASS.launch
    monkeypatch.setattr(CUTLASS, "launch", lambda *args: (launched.append(args[1].k), launch(*args))[1])
    x, w, dy = both_layouts(2048, 4096, E4M3), both_layouts(12288, 4096, E4M3), both_layouts(2048, 12288, E5M2)
    by_cublaslt = gemm(dy, w.T)
    before = serving("cuda").name
    use("auto")
    try:
        for _ in range(2):
            dx = gemm(dy, w.T)
        gemm(x, w, fast_accum=True)
        gemm(dy.T, x.T, Epilogue(into=torch.zeros(12288, 4096, dtype=BF16, device="cuda"), accumulate=True))
    finally:
        use(before)
    assert launched == [12288]  # one plan
    check(dx, *exact(dy, w.T))
    assert not torch.equal(dx, by_cublaslt)  # their partial sums differ


def test_parts_that_follow_the_kernel(serving_cutlass):
    x, w = both_layouts(176, 240, E4M3), both_layouts(272, 240, E4M3)
    product, magnitude = exact(x, w)
    bias, residual = torch.randn(272, device="cuda").to(BF16), torch.randn(176, 272, device="cuda").to(BF16)
    expected = product + bias.double() + residual.double()
    check(gemm(x, w, Epilogue(bias=bias, residual=residual)), expected, magnitude + 8)


def test_parts_that_it_does_not_take_are_done_outside_it(serving_cutlass):
    x, w = both_layouts(176, 240, E4M3), both_layouts(272, 240, E4M3)
    product, magnitude = exact(x, w)
    bias, residual = torch.randn(272, device="cuda"), torch.randn(176, 272, device="cuda")
    check(gemm(x, w, Epilogue(FP32, bias=bias)), product + bias.double(), magnitude + 4)  # FP32 bias
    check(gemm(x, w, Epilogue(residual=residual)).to(BF16), product + residual.double(), magnitude + 4)
    both = torch.ones(176, 272, device="cuda")
    gemm(x, w, Epilogue(residual=residual, into=both, accumulate=True))
    check(both, product + residual.double() + 1, magnitude + 5)
    memory = torch.empty(176 * 272 + 1, dtype=BF16, device="cuda")
    unaligned = memory[1:].view(176, 272)
    check(gemm(x, w, Epilogue(bias=bias.to(BF16), into=unaligned)), product + bias.to(BF16).double(), magnitude + 4)
    assert {plan.maker for plan in plans.plans()} == {"cutlass"}
    half = gemm(x, w, Epilogue(torch.float16))
    assert plans.plans()[-1].maker == "cublaslt" and (half.double() - product).norm() < 1e-3 * product.norm()


def test_a_search_chooses_between_both_and_its_file_serves_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    x, w, dy = both_layouts(2048, 4096, E4M3), both_layouts(1024, 4096, E4M3), both_layouts(2048, 1024, E5M2)
    both = (CUBLASLT, CUTLASS)
    grad = torch.zeros(1024, 4096, device="cuda")

    def step():
        y, dx = gemm(x, w, fast_accum=True), gemm(dy, w.T)
        gemm(dy.T, x.T, Epilogue(into=grad.zero_(), accumulate=True))
        return y, dx, grad.clone()

    try:
        assert search.read(both) == 0
        step()
        lines = search.tune()
        print("\n".join([*lines, search.summary()]))
        assert len(lines) == 3 and all("TFLOP/s" in line and "BF16" in line for line in lines)
        found = [step(), [plan.name for plan in plans.plans()]]
        (file,) = (tmp_path / "gemm").iterdir()
        assert all({one.maker for one in held} == {"cublaslt", "cutlass"} for held in gemm_found.load(file).values())
        for got, operands in zip(found[0], ((x, w), (dy, w.T), (dy.T, x.T)), strict=True):
            check(got, *exact(*operands))
        search.forget()
        assert search.read(both) == 3
        again = step()
        assert [plan.name for plan in plans.plans()] == found[1] and search.tune() == []
        assert all(torch.equal(*pair) for pair in zip(again, found[0], strict=True))
        search.read((CUTLASS,))  # without cuBLASLt's results
        for got, one in zip(step(), found[0], strict=True):
            assert (got.double() - one.double()).norm() < 5e-3 * one.double().norm()
        assert {plan.maker for plan in plans.plans()} == {"cutlass"}
    finally:
        search.forget()


def test_no_two_kernels_of_one_type_have_one_name():
    assert len({(one.a, one.b, one.out, str(one)) for one in CUTLASS.kernels}) == len(CUTLASS.kernels)
