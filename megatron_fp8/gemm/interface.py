"""The GEMM that layers call: C (M, N) = A B^T with an epilogue, for A (M, K) and B (N, K), both FP8 or both plain.

Hopper's FP8 tensor cores need the summed dimension contiguous in both operands, so a linear's three GEMMs are

    forward   Y  (tokens, out)   = X  (tokens, in)    W   (out, in)^T      gemm(x, w)          E4M3 x E4M3
    dgrad     dX (tokens, in)    = dY (tokens, out)   W^T (in, out)^T      gemm(dy, w.T)       E5M2 x E4M3
    wgrad     dW (out, in)       = dY^T (out, tokens) X^T (in, tokens)^T   gemm(dy.T, x.T)     E5M2 x E4M3

with ScaledTensors that hold the layout that is read (numerics/scaled.py), or with plain tensors.

An `Epilogue` describes the steps that follow the product, in this order:

    C = A B^T -> + bias -> + residual -> added into / written to `into` | returned

A `Backend` computes the FP8 product on some devices. It names the parts of an epilogue that it computes in the GEMM
itself (`fuses`). It gets the epilogue up to the first part that it lacks; separate operations do the rest (`_follow`).
So a backend may be a product alone, and a caller does not depend on the backend.

    cublaslt    CUDA     cuBLASLt by our own binding (cublaslt.py): bias, residual, beta = 1; torch if it is not bound
    cutlass     CUDA     our own kernels (cutlass.py): the same; chosen by name, or for a shape by a search (search.py)
    auto        CUDA     our own kernels for shapes that they should run faster, else cuBLASLt
    torch       CUDA     torch._scaled_mm; it fuses nothing
    reference   CPU      decode, multiply in float32 (ops/reference.py)

`register` adds a backend and lets it serve its devices; `use` chooses one by name. The tensor core sums with about 14
bits. With `fast_accum` it sums all of K (for the forward pass: the error is well below E4M3's rounding). Without it,
partial sums are added in float32, which costs about 7 % (for the backward pass: sums are long and gradients small).

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

PARTS = ("bias", "residual", "accumulate")  # in the order of their computation


@dataclass(slots=True, eq=False)
class Epilogue:
    """The steps that follow the product; see the top of the file. It is not changed once it is made.

    Attributes:
        dtype: of a returned result, and of the backend's result if separate operations follow.
        bias: (N,).
        residual: (M, N).
        into: a contiguous tensor for the result, of its own dtype; it is also returned.
        accumulate: add the result to `into` instead of overwriting.
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
        """The members of PARTS that this epilogue has."""
        return [part for part in PARTS if (has := getattr(self, part)) is not None and has is not False]

    def only(self, parts: list[str]) -> "Epilogue":
        """The epilogue with these parts alone. Unless they are all, it has no `into`: other operations follow."""
        if parts == self.parts():
            return self
        # accumulate is last, so it is not among these parts.
        dtype = self.dtype if self.into is None else self.into.dtype
        return Epilogue(dtype, **{part: getattr(self, part) for part in parts})


PLAIN = Epilogue()


@functools.cache
def plain(dtype: torch.dtype) -> Epilogue:
    """The epilogue that returns the product in this type."""
    return Epilogue(dtype)


class Backend(Protocol):
    """A way to compute a b^T for ScaledTensors a (M, K), b (N, K).

    Attributes:
        name: its name for `use`.
        devices: device types that it serves.
        fuses: the members of PARTS that it computes in the GEMM.
    """

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def fuses(self) -> frozenset[str]: ...

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        """The product, with an epilogue that it fuses completely, in the epilogue's dtype or in `into`."""


class ScaledMM:
    """torch._scaled_mm. M, N and K must be multiples of 16."""

    name, devices, fuses = "torch", ("cuda",), frozenset[str]()

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        into = epilogue.into
        return torch._scaled_mm(
            a.payload, b.payload.t(), scale_a=a.scale_inv, scale_b=b.scale_inv, use_fast_accum=fast_accum,
            out_dtype=epilogue.dtype if into is None else into.dtype, **({} if into is None else {"out": into}),
        )  # fmt: skip


class Planned:
    """GEMMs by plans (plans.py), or by another backend if cuBLASLt is not bound. M, N and K must be multiples of 16.

    ours: whether CUTLASS, instead of cuBLASLt, makes a problem's plan; None: never.
    """

    devices = ("cuda",)

    def __init__(self, name: str, otherwise: Backend, ours: Callable[[plans.Problem], bool] | None = None):
        self.name, self._otherwise, self._ours = name, otherwise, ours

    def prepare(self) -> None:
        """Make this backend's plans the ones in use. Raises cutlass_build.Unavailable if it needs CUTLASS' library and
        there is none."""
        if self._ours is not None:
            CUTLASS.prepare()
        plans.serve(self.maker_of)

    def maker_of(self, problem: plans.Problem) -> plans.Maker:
        """The maker of a problem's plan."""
        return CUTLASS if self._ours is not None and self._ours(problem) else cublaslt.CUBLASLT

    @functools.cached_property
    def fuses(self) -> frozenset[str]:
        if cublaslt.bound():
            return frozenset({"bias", "residual", "accumulate"})
        warnings.warn(f"cuBLASLt is not bound ({cublaslt.why_not()}); using torch._scaled_mm", stacklevel=2)
        return self._otherwise.fuses

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        if not self.fuses:
            return self._otherwise.product(a, b, epilogue, fast_accum)
        x, w, out, bias, residual = a.payload, b.payload, epilogue.into, epilogue.bias, epilogue.residual
        if out is None:
            out = torch.empty(x.shape[0], w.shape[0], dtype=epilogue.dtype, device=x.device)
        how = {"a_scale": a.scale_inv, "b_scale": b.scale_inv, "add": epilogue.accumulate, "fast_accum": fast_accum}
        if bias is None and residual is None:
            return plans.product(x, w, out, **how)
        # A GEMM reads a bias of D's type (BF16 if D is FP32) and one C with D's layout. The rest is added after it.
        early = bias if bias is not None and bias.dtype is _BIAS.get(out.dtype) else None
        form = out.dtype, out.shape, out.stride()
        fits = residual is not None and (residual.dtype, residual.shape, residual.stride()) == form
        c = residual if fits and not epilogue.accumulate else None
        plans.product(x, w, out, bias=early, residual=c, **how)
        if early is not bias:
            out.add_(bias)
        return out if c is residual else out.add_(residual)


_BIAS = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16, torch.float32: torch.bfloat16}


class Reference:
    """ops.reference.gemm, for the CPU; it ignores `fast_accum`."""

    name, devices, fuses = "reference", ("cpu",), frozenset[str]()

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        operands = a.payload, b.payload, a.scale_inv, b.scale_inv
        return reference.gemm(*operands, out_dtype=epilogue.dtype, out=epilogue.into)


_backends: dict[str, Backend] = {}
_serving: dict[str, Backend] = {}  # by device type


def register(backend: Backend, serve: bool = True) -> None:
    """Add a backend. serve: let it serve its devices from now on."""
    _backends[backend.name] = backend
    if serve:
        use(backend.name)


def prepared(name: str) -> Backend:
    """The backend of that name; KeyError if there is none.

    Calls its `prepare`, if it has one, which raises if the backend cannot serve.
    """
    backend = _backends[name]
    getattr(backend, "prepare", lambda: None)()
    return backend


def use(name: str) -> None:
    """Let the backend of that name serve its devices. Raises like `prepared`."""
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
    """a b^T for a (M, K) and b (N, K), then the epilogue: (M, N).

    Both are ScaledTensors with a payload, or both are plain tensors, which torch multiplies in their type. Hopper has
    no E5M2 x E5M2 product (ValueError). For FP8 on CUDA, M, N and K must be multiples of 16.
    """
    if not isinstance(a, ScaledTensor) or not isinstance(b, ScaledTensor):
        return _follow(torch.matmul(a, b.T), epilogue, epilogue.parts())
    if a.payload.dtype is E5M2.dtype and b.payload.dtype is E5M2.dtype:
        raise ValueError("gemm of E5M2 by E5M2: Hopper has no such product; one operand must be E4M3")
    return through(_serving[a.payload.device.type], a, b, epilogue, fast_accum)


def through(backend: Backend, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
    """`gemm` by one backend: it computes the parts up to the first that it lacks; `_follow` does the rest."""
    if len(backend.fuses) == len(PARTS):
        return backend.product(a, b, epilogue, fast_accum)
    parts = epilogue.parts()
    done = next((i for i, part in enumerate(parts) if part not in backend.fuses), len(parts))
    y = backend.product(a, b, epilogue.only(parts[:done]), fast_accum)
    return y if done == len(parts) else _follow(y, epilogue, parts[done:])


def _follow(y: torch.Tensor, epilogue: Epilogue, parts: list[str]) -> torch.Tensor:
    """Apply the remaining `parts` of an epilogue to y (M, N)."""
    if "bias" in parts:
        y = y + epilogue.bias
    if "residual" in parts:
        y = y + epilogue.residual
    if epilogue.accumulate and epilogue.into is not None:
        return epilogue.into.add_(y)
    return y.to(epilogue.dtype) if epilogue.into is None else epilogue.into.copy_(y)


@dataclass(slots=True, eq=False)
class Product:
    """a b^T, not computed yet. A weight gradient dW (N, K) = dy^T x is one until its storage chooses the epilogue."""

    a: Operand
    b: Operand

    def compute(self, **epilogue) -> torch.Tensor:
        """Compute it with an Epilogue of these fields."""
        return gemm(self.a, self.b, Epilogue(**epilogue))


@dataclass(frozen=True, eq=False)
class Computed:
    """In the place of a Product that was computed along with others; y: its result (M, N)."""

    y: torch.Tensor

    def compute(self, **epilogue) -> torch.Tensor:
        """As Product's, of the result."""
        steps = Epilogue(**epilogue)
        return _follow(self.y, steps, steps.parts())
