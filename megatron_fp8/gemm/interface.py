"""The GEMM: C (M, N) = A B^T, A (M, K) and B (N, K), both FP8 with a scale or both plain; and what follows it.

Hopper's FP8 tensor cores read both operands along the sum, so a linear's three GEMMs are

    forward   Y  (tokens, out)   = X  (tokens, in)    W   (out, in)^T      gemm(x, w)          E4M3 x E4M3
    dgrad     dX (tokens, in)    = dY (tokens, out)   W^T (in, out)^T      gemm(dy, w.T)       E5M2 x E4M3
    wgrad     dW (out, in)       = dY^T (out, tokens) X^T (in, tokens)^T   gemm(dy.T, x.T)     E5M2 x E4M3

with ScaledTensors that hold the layout that is read (numerics/scaled.py), or with plain tensors.

What is done to the product before it is written is data, an `Epilogue`, in this order:

    C = A B^T -> + bias -> + residual -> added into / written to `into` | returned

A `Backend` is a way to compute the FP8 product on some devices. It names the parts of an epilogue that it does in the
GEMM itself (`fuses`); it gets those up to the first one that it lacks, and the rest is done here, by operations that
follow (`_follow`). So a backend may be as small as a product, and a caller never asks who computes.

    cublaslt    CUDA     cuBLASLt by our own binding (cublaslt.py): bias, residual, beta = 1; where that fails, torch's
    cutlass     CUDA     our own kernels (cutlass.py): the same; chosen by name, or a shape by a search (search.py)
    auto        CUDA     our own where they are known to be faster, else cuBLASLt
    torch       CUDA     torch._scaled_mm; no epilogue but the type of the result and where it goes
    reference   CPU      decode, multiply in float32 (reference.py)

`register` adds a backend and lets it serve its devices; `use` chooses one by name. The tensor core itself sums with
about 14 bits; `fast_accum` leaves the whole sum over K to it (forward: the error is well below E4M3's own rounding),
without it partial sums are added in float32 at a cost of some 7 % (backward: sums are long and gradients small).

Source: PyTorch's torch._scaled_mm; DeepSeek-V3, arXiv 2412.19437, section 3.3, for the accumulator's width.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..numerics.formats import E5M2
from ..numerics.scaled import ScaledTensor
from ..ops import reference
from . import cublaslt, plans
from .cutlass import CUTLASS

type Operand = ScaledTensor | torch.Tensor

PARTS = ("bias", "residual", "accumulate")  # in the order in which they are done


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What follows the product; see the top of the file.

    Attributes:
        dtype: of the result where it is returned; what follows a backend's own part reads it so.
        bias: (N,).
        residual: (M, N).
        into: where the result goes, contiguous, in its own dtype; it is what is returned.
        accumulate: the result is added to what `into` holds.
    """

    dtype: torch.dtype = torch.bfloat16
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    into: torch.Tensor | None = None
    accumulate: bool = False

    def __post_init__(self):
        if self.accumulate and self.into is None:
            raise ValueError("an epilogue that accumulates needs `into`, the tensor that the result is added to")

    def parts(self) -> list[str]:
        """Which of PARTS it has."""
        return [part for part in PARTS if (has := getattr(self, part)) is not None and has is not False]

    def only(self, parts: list[str]) -> "Epilogue":
        """With these of its parts; for a result that others go on with, unless they are all."""
        if parts == self.parts():
            return self
        # Accumulation comes last: if it is among the parts, they are all.
        dtype = self.dtype if self.into is None else self.into.dtype
        return Epilogue(dtype, **{part: getattr(self, part) for part in parts})


PLAIN = Epilogue()


class Backend(Protocol):
    """A way to compute a b^T of ScaledTensors a (M, K), b (N, K).

    Attributes:
        name: what `use` calls it.
        devices: device types that it serves.
        fuses: those of PARTS that it does.
    """

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def fuses(self) -> frozenset[str]: ...

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        """The product with an epilogue of what it fuses, of the epilogue's dtype or in `into`."""


class ScaledMM:
    """torch._scaled_mm. M, N and K are multiples of 16."""

    name, devices, fuses = "torch", ("cuda",), frozenset[str]()

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        into = epilogue.into
        return torch._scaled_mm(
            a.payload, b.payload.t(), scale_a=a.scale_inv, scale_b=b.scale_inv, use_fast_accum=fast_accum,
            out_dtype=epilogue.dtype if into is None else into.dtype, **({} if into is None else {"out": into}),
        )  # fmt: skip


class Planned:
    """By plans (plans.py), or another backend where cuBLASLt is not bound. M, N and K: multiples of 16.

    ours: whether a problem's plan is CUTLASS's, and not cuBLASLt's; None: it never is.
    """

    devices = ("cuda",)

    def __init__(self, name: str, otherwise: Backend, ours: Callable[[plans.Problem], bool] | None = None):
        self.name, self._otherwise, self._ours = name, otherwise, ours

    def prepare(self) -> None:
        """Raises cutlass_build.Unavailable where CUTLASS may make plans and has no library."""
        if self._ours is not None:
            CUTLASS.prepare()
        plans.serve(self.maker_of)

    def maker_of(self, problem: plans.Problem) -> plans.Maker:
        """Who makes a problem's plan."""
        return CUTLASS if self._ours is not None and self._ours(problem) else cublaslt.CUBLASLT

    @functools.cached_property
    def fuses(self) -> frozenset[str]:
        if cublaslt.bound():
            return frozenset({"bias", "residual", "accumulate"})
        warnings.warn(f"cuBLASLt is not bound ({cublaslt.why_not()}): torch._scaled_mm serves", stacklevel=2)
        return self._otherwise.fuses

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        if not self.fuses:
            return self._otherwise.product(a, b, epilogue, fast_accum)
        x, w, out, bias, residual = a.payload, b.payload, epilogue.into, epilogue.bias, epilogue.residual
        if out is None:
            out = torch.empty(x.shape[0], w.shape[0], dtype=epilogue.dtype, device=x.device)
        # A GEMM reads a bias of D's type, BF16 where D is FP32, and one C, as D is: the rest is added after it.
        early = bias if bias is not None and bias.dtype is _BIAS.get(out.dtype) else None
        form = out.dtype, out.shape, out.stride()
        fits = residual is not None and (residual.dtype, residual.shape, residual.stride()) == form
        c = residual if fits and not epilogue.accumulate else None
        how = {"a_scale": a.scale_inv, "b_scale": b.scale_inv, "bias": early, "fast_accum": fast_accum}
        plans.product(x, w, out, residual=c, add=epilogue.accumulate, **how)
        if early is not bias:
            out.add_(bias)
        return out if c is residual else out.add_(residual)


_BIAS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, torch.float32: torch.bfloat16}


class Reference:
    """reference.gemm; `fast_accum` changes nothing."""

    name, devices, fuses = "reference", ("cpu",), frozenset[str]()

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        operands = a.payload, b.payload, a.scale_inv, b.scale_inv
        return reference.gemm(*operands, out_dtype=epilogue.dtype, out=epilogue.into)


_backends: dict[str, Backend] = {}
_serving: dict[str, Backend] = {}  # by device type


def register(backend: Backend, serve: bool = True) -> None:
    """Make a backend known; from now on it serves its devices, unless it waits to be chosen."""
    _backends[backend.name] = backend
    if serve:
        use(backend.name)


def prepared(name: str) -> Backend:
    """The backend of that name; KeyError where there is none.

    A backend with a `prepare` is prepared, which raises where it cannot serve.
    """
    backend = _backends[name]
    getattr(backend, "prepare", lambda: None)()
    return backend


def use(name: str) -> None:
    """Have the backend of that name, prepared, serve its devices; raises what `prepared` does."""
    backend = prepared(name)
    _serving.update(dict.fromkeys(backend.devices, backend))


def serving(device: str) -> Backend:
    """The backend that serves a device type."""
    return _serving[device]


_torch = ScaledMM()
register(_torch)
register(Planned("cutlass", _torch, CUTLASS.takes), serve=False)
register(Planned("auto", _torch, CUTLASS.is_faster), serve=False)
register(Planned("cublaslt", _torch))
register(Reference())


def gemm(a: Operand, b: Operand, epilogue: Epilogue = PLAIN, *, fast_accum: bool = False) -> torch.Tensor:
    """a b^T of a (M, K) and b (N, K), then the epilogue: (M, N).

    Both are ScaledTensors, which hold their rows; E4M3 and E5M2 mix freely, but for E5M2 x E5M2, which Hopper lacks:
    ValueError; on CUDA, M, N and K are multiples of 16. Or both are plain: then torch multiplies them in their type.
    """
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _follow(torch.matmul(a, b.T), epilogue, epilogue.parts())
    if a.payload.dtype == b.payload.dtype == E5M2.dtype:
        raise ValueError("gemm of E5M2 by E5M2: Hopper has no such product; one operand must be E4M3")
    return through(_serving[a.payload.device.type], a, b, epilogue, fast_accum)


def through(backend: Backend, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
    """`gemm` by one backend: what it fuses, up to the first part that it lacks, and what is left after it."""
    parts = epilogue.parts()
    if backend.fuses.issuperset(parts):
        return backend.product(a, b, epilogue, fast_accum)
    done = next((i for i, part in enumerate(parts) if part not in backend.fuses), len(parts))
    y = backend.product(a, b, epilogue.only(parts[:done]), fast_accum)
    return y if done == len(parts) else _follow(y, epilogue, parts[done:])


def _follow(y: torch.Tensor, epilogue: Epilogue, parts: list[str]) -> torch.Tensor:
    """What is left of an epilogue, `parts`, of a product that is so far y (M, N)."""
    if "bias" in parts:
        y = y + epilogue.bias
    if "residual" in parts:
        y = y + epilogue.residual
    if epilogue.accumulate and epilogue.into is not None:
        return epilogue.into.add_(y)
    return y.to(epilogue.dtype) if epilogue.into is None else epilogue.into.copy_(y)


@dataclass(frozen=True, eq=False)
class Product:
    """a b^T, not computed yet: a weight's gradient, dW (N, K) = dy^T x, until its storage says how."""

    a: Operand
    b: Operand

    def compute(self, **epilogue) -> torch.Tensor:
        """With an Epilogue of these fields."""
        return gemm(self.a, self.b, Epilogue(**epilogue))
