"""S7: what the tensor core's sum loses over a long K, if none, one or both of the operands have a mean.

Hopper's FP8 tensor cores add products with about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2): each product
is shifted to the exponent of the largest, or of the sum so far, and what falls below 14 bits is cut off. "Fast" keeps
the whole sum there; "full" adds each part of it into an FP32 register. A linear's forward pass is E4M3 by E4M3, fast;
its gradients are E5M2 by E4M3, full. The exact product is that of the same FP8 numbers in FP64, so the casts' error is
not in it. Results are FP32.

    error = |C - exact| / |exact|        gain = <C, exact> / |exact|^2

If both operands have a mean (are positive, as an activation function's output can be), the sum grows with K, and a
product is soon smaller than its last bit. If only one has, the sum grows with K's root, as without a mean. That is a
linear's case: activations may be positive, weights have almost no mean.

Without a GPU the 14 bits are emulated, 32 products at a time. An H200's fast sums at K 1,536, 4,096 and 14,336 are off
by 0.07, 0.13 and 0.29 % if one operand or none has a mean, emulated ones by 0.07, 0.13 and 0.30; if both have one by
2.3, 6.5 and 22 %, emulated ones by 2.3, 7.1 and 20. Judged is the error; E4M3's own rounding is 3.7 %.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from ... import cpu, gemm, ops
from ...gemm.cutlass import CUTLASS
from ...gemm.cutlass_build import Unavailable
from ...gemm.interface import prepared, serving, through, use
from ...numerics.formats import E4M3, E5M2, Format, decode
from ...numerics.scaled import ScaledTensor
from ...numerics.scaling import compute_scale
from .drawing import curves
from .network import device, size
from .suite import JUDGED, Found, Point, Stress

REAL_K = (1536, 4096, 14336, 28672, 53248)  # the widths that fc2 of SmolLM2, a 1B, 8B, 70B and 405B sum over
TOY_K = (512, 1536, 4096)
CASES = "without a mean", "one with a mean", "with a mean"
_BITS, _PART = 14, 32

type Product = Callable[[ScaledTensor, ScaledTensor], torch.Tensor]


def _emulated(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    """The sum in a register of 14 bits, to which each product is aligned and cut."""
    x, y = decode(a.payload).double(), decode(b.payload).double()
    total = torch.zeros(len(x), len(y), dtype=torch.float64, device=x.device)
    for k in range(0, x.shape[1], _PART):
        products = x[:, None, k : k + _PART] * y[None, :, k : k + _PART]
        _, exponent = torch.frexp(torch.maximum(products.abs().amax(-1), total.abs()))
        bit = torch.ldexp(torch.ones_like(total), exponent - _BITS)
        total = ((products / bit[..., None]).trunc().sum(-1) + (total / bit).trunc()) * bit
    return total * (a.scale_inv * b.scale_inv).double()


def _of(name: str, fast: bool, a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    # Prepared anew: plans are the process's, and made by whoever was prepared last.
    return through(prepared(name), a, b, gemm.Epilogue(torch.float32), fast)


def arms() -> dict[str, Product]:
    """What this machine can multiply with; our CUTLASS kernels only if they are built."""
    if cpu.needed():
        return {"14 bits, emulated": _emulated, "FP32": functools.partial(_of, "reference", False)}
    try:
        CUTLASS.prepare(build=False)
        ours = True
    except Unavailable:
        ours = False
    found: dict[str, Product] = {
        "cuBLASLt, forward: fast": functools.partial(_of, "cublaslt", True),
        "cuBLASLt, forward if full": functools.partial(_of, "cublaslt", False),
        "cuBLASLt, backward: full": functools.partial(_of, "cublaslt", False),
    }
    if ours:
        found["CUTLASS, backward: full"] = functools.partial(_of, "cutlass", False)
    return found


def measure(seed: int) -> Iterator[Found]:
    torch.manual_seed(seed)
    served = serving(device().type).name
    try:
        yield from _measured()
    finally:
        use(served)


def _measured() -> Iterator[Found]:
    products, m = arms(), size().products
    for k in TOY_K if cpu.needed() else REAL_K:
        for case in CASES:
            x, y = (torch.randn(m, k, device=device()) for _ in "xy")
            if case != "without a mean":
                x = x.abs()
            if case == "with a mean":
                y = y.abs()
            b, operands = _cast(y, E4M3), {fmt: _cast(x, fmt) for fmt in (E4M3, E5M2)}
            exact = {fmt: _exact(a, b) for fmt, a in operands.items()}
            for arm, multiply in products.items():
                fmt = E5M2 if "backward" in arm else E4M3
                found, known = multiply(operands[fmt], b).double(), exact[fmt]
                error = 100 * float((found - known).norm() / known.norm())
                yield Found(arm, case, k, "error", error)
                yield Found(arm, case, k, "gain", 100 * float((found * known).sum() / known.square().sum()))
                yield Found(arm, f"{case}, K {k}", k, JUDGED, error)


def _cast(x: torch.Tensor, fmt: Format) -> ScaledTensor:
    scale = compute_scale(ops.amax(x), fmt)
    return ScaledTensor(ops.quantize(x, fmt, scale), scale.reciprocal())


def _exact(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    return (decode(a.payload).double() @ decode(b.payload).double().T) * (a.scale_inv * b.scale_inv).double()


def draw(points: list[Point]):
    return curves(
        "s7", points, "error", CASES, "K", "% of the product",
        "S7: error of the tensor core's sum over K, the casts' error left out", log_x=True, log_y=True, limit=LIMIT,
    )  # fmt: skip


LIMIT = 1.0
STRESS = Stress(
    "S7",
    "Accumulation",
    "One GEMM of FP8 operands, beside the same numbers' product in FP64. Judged: the error of the sum; at most 1 %, "
    "about a quarter of what the casts have.",
    {f"{case}, K {k}": LIMIT for k in {*REAL_K, *TOY_K} for case in CASES},
    "% of the product",
    measure,
    draw,
)
