"""The GEMM seam: an epilogue is done by the backend or after it; backends can be added and removed."""

import itertools

import pytest
import torch

from megatron_fp8.gemm import Epilogue, Product, gemm
from megatron_fp8.gemm.interface import PARTS, register, serving, use
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import reference

FP32, BF16 = torch.float32, torch.bfloat16
M, N, K = 32, 48, 80


def scaled(m, k, fmt=E4M3, scale=20.0):
    """A random ScaledTensor, in both layouts."""
    payload, columns = reference.quantize(torch.randn(m, k), fmt, torch.tensor(scale), transpose=True)
    return ScaledTensor(payload, torch.tensor(1 / scale), columns)


class Counting:
    """A backend that only counts calls and passes them on."""

    name, devices = "counting", ("cpu",)

    def __init__(self, inner, fuses=frozenset()):
        self.inner, self.fuses, self.asked = inner, fuses, []

    def product(self, a, b, epilogue, fast_accum):
        self.asked.append((epilogue.parts(), fast_accum))
        return self.inner.product(a, b, epilogue, fast_accum)


@pytest.fixture
def counting():
    backend = Counting(serving("cpu"))
    register(backend)
    yield backend
    use("reference")


def test_a_backend_counts_a_linears_products(counting):
    x, w, dy = scaled(M, K), scaled(N, K), scaled(M, N, E5M2)
    into = torch.zeros(N, K)
    gemm(x, w, fast_accum=True)
    gemm(dy, w.T)
    Product(dy.T, x.T).compute(into=into, accumulate=True)
    assert counting.asked == [([], True), ([], False), ([], False)]  # it fuses nothing: all parts are done after it
    exact = dy.dequantize().double().t() @ x.dequantize().double()
    assert (into - exact).norm() < 1e-6 * exact.norm()


def test_a_backend_gets_the_parts_up_to_the_first_that_it_lacks():
    class Fusing(Counting):
        def product(self, a, b, epilogue, fast_accum):
            self.asked.append(epilogue.parts())
            y = self.inner.product(a, b, Epilogue(dtype=FP32), fast_accum)
            y = y if epilogue.bias is None else y + epilogue.bias
            return (y if epilogue.residual is None else y + epilogue.residual).to(epilogue.dtype)

    a, b, bias, residual = scaled(M, K), scaled(N, K), torch.randn(N), torch.randn(M, N)
    rest = {"bias": bias, "residual": residual}
    for fuses, parts, asked in (
        ({"bias"}, ("bias", "residual"), ["bias"]),
        ({"bias", "residual"}, ("bias", "residual"), ["bias", "residual"]),
        ({"residual"}, ("bias", "residual"), []),  # the bias comes before it
        ({"residual"}, ("residual",), ["residual"]),
    ):
        backend = Fusing(serving("cpu"), frozenset(fuses))
        register(backend)
        try:
            got = gemm(a, b, Epilogue(dtype=FP32, **{part: rest[part] for part in parts}))
        finally:
            use("reference")
        assert backend.asked == [asked]
        expected = a.dequantize().double() @ b.dequantize().double().t() + sum(rest[part] for part in parts)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("plain", [False, True], ids=["fp8", "plain"])
@pytest.mark.parametrize("chosen", [c for n in range(3) for c in itertools.combinations(PARTS[:2], n)], ids="-".join)
def test_an_epilogue_is_done_in_its_order(chosen, plain):
    a, b = scaled(M, K), scaled(N, K)
    if plain:
        a, b = a.dequantize(), b.dequantize()
    product = (a if plain else a.dequantize()).double() @ (b if plain else b.dequantize()).double().t()
    given = {"bias": torch.randn(N), "residual": torch.randn(M, N)}
    expected = product + given["bias"] if "bias" in chosen else product
    expected = expected + given["residual"] if "residual" in chosen else expected
    epilogue = {part: given[part] for part in chosen}
    got = gemm(a, b, Epilogue(dtype=FP32, **epilogue))
    assert got.dtype == FP32 and (got - expected).abs().max() < 1e-5 * expected.abs().max()
    before = torch.randn(M, N)
    into = before.clone()
    assert gemm(a, b, Epilogue(into=into, accumulate=True, **epilogue)) is into
    assert torch.equal(into, before + got)
    assert gemm(a, b, Epilogue(into=into, **epilogue)) is into and torch.equal(into, got)


def test_bf16_storage_accumulates_as_fp32_does():
    a, b = scaled(M, K), scaled(N, K)
    for dtype in (BF16, FP32):
        before = torch.randn(M, N).to(dtype)
        into = before.clone()
        gemm(a, b, Epilogue(into=into, accumulate=True))
        assert torch.equal(into, before + gemm(a, b, Epilogue(dtype=dtype)))


def test_layouts_are_exchanged_without_a_copy():
    x = scaled(M, K)
    assert x.T.payload is x.columns and x.T.columns is x.payload and x.T.T.payload is x.payload
    assert torch.equal(x.T.dequantize(), x.dequantize().t())


def test_e5m2_by_e5m2_is_refused_and_fast_accum_changes_nothing_here():
    a, b = scaled(M, K), scaled(N, K, E5M2)
    with pytest.raises(ValueError, match="E5M2 by E5M2"):
        gemm(b, b)
    assert torch.equal(gemm(a, b), gemm(a, b, fast_accum=True))


def test_an_unknown_backend():
    with pytest.raises(KeyError):
        use("cutlass of tomorrow")
