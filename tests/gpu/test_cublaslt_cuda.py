"""The binding of cuBLASLt on a GPU: against float64 and torch's GEMM; the search; CUDA graphs; streams."""

import math

import pytest
import torch

from megatron_fp8 import gemm, ops
from megatron_fp8.engine.grad_store import DenseStore, GradSink
from megatron_fp8.gemm import Epilogue, Product, cublaslt, cublaslt_library, fused_wgrad, plans, search
from megatron_fp8.gemm.interface import Planned, serving, use
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
ROWS = 64  # rows of a large product to compare
SHAPES = {  # tokens, out, in
    "7B qkv": (8192, 12288, 4096),
    "7B proj": (8192, 4096, 4096),
    "7B fc1": (8192, 16384, 4096),
    "7B fc2": (8192, 4096, 16384),
    "175B qkv": (4096, 4608, 12288),
    "175B proj": (4096, 12288, 1536),
    "175B fc1": (4096, 6144, 12288),
    "175B fc2": (4096, 12288, 6144),
    "head": (8192, 50304, 4096),
    "odd": (4080, 1040, 2064),
}
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")


@pytest.fixture(autouse=True)
def fresh(request):
    assert cublaslt.bound(), cublaslt.why_not()
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")  # shown when the test fails
    torch.manual_seed(seed)
    yield
    search.forget()


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def scaled(m, k, fmt=E4M3):
    scale = torch.tensor(fmt.max / 6, device=DEVICE)
    payload, columns = ops.quantize(randn(m, k), fmt, scale, transpose=True)
    return ScaledTensor(payload, scale.reciprocal(), columns)


def product(a, b, out, **how):
    return plans.product(a.payload, b.payload, out, a_scale=a.scale_inv, b_scale=b.scale_inv, **how)


def exact(a, b, rows=slice(None)):
    return a.dequantize()[rows].double() @ b.dequantize().double().t()


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


def by_torch(a, b, dtype, fast=False):
    how = {"scale_a": a.scale_inv, "scale_b": b.scale_inv, "use_fast_accum": fast, "out_dtype": dtype}
    return torch._scaled_mm(a.payload, b.payload.t(), **how)


def rounded_each_time(y, rest, dtype):
    """y plus each part, rounded to `dtype` each time: some of cuBLASLt's kernels round the product before adding C."""
    y = y.to(dtype)
    for part in rest:
        y = (y.double() + part).to(dtype)
    return y


# FP8


@pairs
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_fp8(pair, dtype, fast, bias, add):
    for m, n, k in ((16, 16, 16), (128, 256, 512), (272, 1040, 4112)):
        a, b = scaled(m, k, pair[0]), scaled(n, k, pair[1])
        vector = randn(n, dtype=BF16 if dtype is FP32 else dtype) if bias else None
        before = randn(m, n, dtype=dtype)
        out = before.clone()
        rest = [part.double() for part in (vector, before if add else None) if part is not None]
        expected = exact(a, b) + sum(rest)
        assert product(a, b, out, bias=vector, add=add, fast_accum=fast) is out
        theirs = by_torch(a, b, FP32, fast).double()  # with the same accumulation
        once, often = (theirs + sum(rest)).to(dtype), rounded_each_time(theirs, rest, dtype)
        assert error(out, expected) <= 1.2 * max(error(once, expected), error(often, expected)) + 1e-6 < 1e-2


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_of_real_models(name):
    """Forward, dgrad, and wgrad into FP32 and BF16, written and added."""
    tokens, out, inside = SHAPES[name]
    x, w, dy = scaled(tokens, inside), scaled(out, inside), scaled(tokens, out, E5M2)
    rows = torch.randint(min(tokens, out), (ROWS,), device=DEVICE)
    for a, b, fast in ((x, w, True), (dy, w.T, False)):
        got = gemm.gemm(a, b, fast_accum=fast)
        assert error(got[rows], exact(a, b, rows)) <= 1.2 * error(by_torch(a, b, BF16, fast)[rows], exact(a, b, rows))
    a, b = dy.T, x.T
    expected = exact(a, b, rows)
    for dtype in (FP32, BF16):
        into = torch.full((out, inside), math.nan, dtype=dtype, device=DEVICE)
        theirs = error(by_torch(a, b, dtype)[rows], expected)
        gemm.gemm(a, b, Epilogue(into=into))
        assert error(into[rows], expected) <= 1.2 * theirs
        before = into.clone()
        gemm.gemm(a, b, Epilogue(into=into, accumulate=True))
        assert error(into[rows], before[rows].double() + expected) <= 1.5 * theirs


def test_it_is_the_backend_and_shapes_that_are_no_multiple_of_16_are_refused():
    assert isinstance(serving("cuda"), Planned) and serving("cuda").fuses == {"bias", "residual", "accumulate"}
    assert serving("cuda").name == "cublaslt" and plans.maker_of == serving("cuda").maker_of
    a, b = scaled(32, 48), scaled(32, 48)
    with pytest.raises(cublaslt.CublasLtError, match="32 x 32 x 40 E4M3 x E4M3"):
        gemm.gemm(ScaledTensor(a.payload[:, :40], a.scale_inv), ScaledTensor(b.payload[:, :40].clone(), b.scale_inv))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_float_bias_is_added_after_and_rows_may_be_apart(dtype):
    a, b, bias = scaled(64, 128), scaled(96, 128), randn(96, dtype=FP32)
    got = gemm.gemm(a, b, Epilogue(dtype=dtype, bias=bias))
    assert error(got, exact(a, b) + bias.double()) < (2e-3 if dtype is FP32 else 4e-3)
    wide = torch.full((64, 160), 7.0, device=DEVICE, dtype=dtype)
    product(a, b, wide[:, 32:128])
    assert error(wide[:, 32:128], exact(a, b)) < (2e-3 if dtype is FP32 else 4e-3)
    assert (wide[:, :32] == 7).all() and (wide[:, 128:] == 7).all()


@pairs
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_residual_lies_apart_from_the_result(pair, dtype):
    for m, n, k in ((16, 16, 16), (272, 1040, 4112)):
        a, b, bias, residual = scaled(m, k, pair[0]), scaled(n, k, pair[1]), randn(n), randn(m, n, dtype=dtype)
        before = residual.clone()
        expected = exact(a, b) + bias.double() + residual.double()
        got = gemm.gemm(a, b, Epilogue(dtype=dtype, bias=bias, residual=residual))
        assert error(got, expected) < (5e-3 if dtype is BF16 else 2e-3) and torch.equal(residual, before)
        assert plans.plans()[-1].problem.add


def moved(x):
    """A copy of x at an address one element past a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("unaligned", ["a", "b", "out", "bias", "residual"])
def test_unaligned_memory_gives_the_same_bits(unaligned):
    a, b = scaled(176, 240), scaled(272, 240)
    given = {"a": a.payload, "b": b.payload, "out": randn(176, 272), "bias": randn(272), "residual": randn(176, 272)}
    results = []
    for tensors in (given, given | {unaligned: moved(given[unaligned])}):
        rest = {name: tensors[name] for name in ("bias", "residual")} | {"a_scale": a.scale_inv, "b_scale": b.scale_inv}
        assert plans.product(tensors["a"], tensors["b"], tensors["out"], **rest) is tensors["out"]
        results.append(tensors["out"].clone())
    assert torch.equal(*results)
    assert error(results[0], exact(a, b) + given["bias"].double() + given["residual"].double()) < 5e-3


def test_the_non_finite_stays_visible():
    a, b = scaled(64, 64), scaled(64, 64)
    a.payload.view(torch.uint8)[3, 5] = 0x7F
    for add in (False, True):
        out = torch.zeros(64, 64, device=DEVICE)
        product(a, b, out, add=add)
        assert out[3].isnan().all() and out[:3].isfinite().all() and out[4:].isfinite().all()
    out = torch.full((64, 64), math.nan, device=DEVICE)
    product(b, b, out)
    assert out.isfinite().all()  # with beta = 0, C is not read


# BF16: stock's linears


@pytest.mark.parametrize("operands", [BF16, FP16], ids=str)
@pytest.mark.parametrize("main", ["float32", "same"])
@pytest.mark.parametrize("shape", [(8192, 50304, 4096), (257, 1001, 333), (16, 64, 128), (1, 7, 5)], ids=str)
def test_a_stock_linears_weight_gradient(shape, operands, main):
    tokens, n, k = shape
    x, dy = randn(tokens, k, dtype=operands), randn(tokens, n, dtype=operands)
    main_grad = randn(n, k, dtype=FP32 if main == "float32" else operands)
    rows = torch.randint(n, (ROWS,), device=DEVICE)
    expected = main_grad[rows].double() + dy[:, rows].double().t() @ x.double()
    fused_wgrad.add_weight_gradient(x, dy, main_grad)
    assert error(main_grad[rows], expected) < (1e-4 if main == "float32" else 4e-3)


@pytest.mark.parametrize("a_rows", [True, False])
@pytest.mark.parametrize("b_rows", [True, False])
@pytest.mark.parametrize("offset", [0, 1])
def test_any_layout_of_bf16(a_rows, b_rows, offset):
    def matrix(rows, columns, by_rows):
        memory = randn(rows * columns + offset)[offset:]
        return memory.view(rows, columns) if by_rows else memory.view(columns, rows).t()

    a, b, before = matrix(130, 250, a_rows), matrix(70, 250, b_rows), randn(130, 70, dtype=FP32)
    out = before.clone()
    plans.product(a, b, out, add=True)
    assert error(out, before.double() + a.double() @ b.double().t()) < 1e-5


# Storage, runs


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_micro_batches_are_added_in_the_gemm(storage, monkeypatch):
    added = []
    real = plans.product
    monkeypatch.setattr(plans, "product", lambda *a, **how: added.append(how["add"]) or real(*a, **how))
    n, k = 512, 1024
    store = DenseStore(1, n * k, storage, DEVICE)
    store.dense().fill_(math.nan)
    sink = GradSink(store, 0, torch.Size((n, k)), (0, 0, 0))
    sink.begin_step(1)
    expected = torch.zeros(n, k, dtype=torch.float64, device=DEVICE)
    for _ in range(4):
        x, dy = scaled(2048, k), scaled(2048, n, E5M2)
        sink.take(Product(dy.T, x.T))
        expected += exact(dy.T, x.T)
    assert error(store.dense().view(n, k), expected) < (2e-3 if storage == "fp32" else 1e-2)
    assert added == [False, True, True, True]


def test_100_repetitions_are_the_same_to_the_bit():
    x, dy = scaled(8192, 4096), scaled(8192, 1024, E5M2)
    first = gemm.gemm(dy.T, x.T, Epilogue(dtype=FP32))
    for _ in range(100):
        assert torch.equal(gemm.gemm(dy.T, x.T, Epilogue(dtype=FP32)), first)


def test_in_a_cuda_graph():
    a, b, bias = scaled(256, 512), scaled(512, 512), randn(512)
    into = torch.zeros(256, 512, device=DEVICE)

    def step():
        y = gemm.gemm(a, b, Epilogue(bias=bias), fast_accum=True)
        gemm.gemm(a, b, Epilogue(into=into, accumulate=True))
        return y

    step()
    torch.cuda.synchronize()
    into.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        a.payload.copy_(scaled(256, 512).payload)
        into.zero_()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        expected = exact(a, b)
        assert error(y, expected + bias.double()) < 4e-3 and error(into, 2 * expected) < 2e-3


def test_two_streams_at_once_have_memory_of_their_own():
    streams = [torch.cuda.Stream() for _ in range(2)]
    operands = [(scaled(512, 8192), scaled(512, 8192)) for _ in streams]
    expected = [by_torch(*pair, FP32) for pair in operands]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream, pair in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                results.append(gemm.gemm(*pair, Epilogue(dtype=FP32)))
        torch.cuda.synchronize()
        for got, one in zip(results, expected, strict=True):
            assert error(got, one.double()) < 2e-3


def test_a_search_finds_equal_plans_and_its_file_serves_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8_CACHE", str(tmp_path))
    x, dy = scaled(4096, 1024), scaled(4096, 2048, E5M2)
    into = torch.zeros(2048, 1024, device=DEVICE)
    plans.renew()
    assert search.read() == 0
    before = torch.cuda.memory_allocated()
    for accumulate in (False, True):
        gemm.gemm(dy.T, x.T, Epilogue(into=into, accumulate=accumulate))
    lines = search.tune()
    assert len(lines) == 2 and all("TFLOP/s" in line for line in lines), lines
    print("\n".join(lines))
    for accumulate in (False, True):
        gemm.gemm(dy.T, x.T, Epilogue(into=into, accumulate=accumulate))
    assert error(into, 2 * exact(dy.T, x.T)) < 2e-3
    names = [plan.name for plan in plans.plans()]
    assert names == [search.chosen(plan.problem).name for plan in plans.plans()]
    print(search.summary())
    result = into.clone()
    search.forget()
    assert search.read() == 2
    for accumulate in (False, True):
        gemm.gemm(dy.T, x.T, Epilogue(into=into, accumulate=accumulate))
    assert torch.equal(into, result) and [plan.name for plan in plans.plans()] == names
    assert torch.cuda.memory_allocated() <= before + result.nbytes + cublaslt_library.WORKSPACE


def test_torchs_backend_says_the_same():
    x, w = scaled(256, 512), scaled(128, 512)
    ours = gemm.gemm(x, w, fast_accum=True)
    use("torch")
    try:
        theirs = gemm.gemm(x, w, fast_accum=True)
    finally:
        use("cublaslt")
    assert error(ours, theirs.double()) < 4e-3
