"""FP8 GEMMs by CUTLASS: the backend "cutlass", of the library that csrc/ makes (cutlass_build.py).

    D = scale_a scale_b A B^T + bias + C        E4M3 x E4M3, E5M2 x E4M3, E4M3 x E5M2, into BF16 or FP32

C is a residual, or D itself to accumulate; scales are read on the device. It is registered but serves nobody until
`use("cutlass")` (gemm.py), which builds the library where it must. What it does not do goes to "cublaslt": N or K that
is no multiple of 16, unaligned memory, a bias that is not BF16, a residual of another type than the result, and a
residual together with accumulation.

The library holds kernels of a few tile shapes (`kernels`). Which serves a shape is in `choices` where somebody measured
it (benchmarks/gemm_cutlass.py), else what `_estimate` finds cheapest: a wave of tiles takes as long as a tile is large,
so a tile is good that leaves few multiprocessors idle in the last wave, and large ones read less memory a product.

Sums: with `fast_accum` all of K is left to the tensor core's 14 bits; without, partial sums over `promote` of K are
added in FP32 (csrc/promoted.cuh). `promote` is 128, as DeepGEMM and CUTLASS have it; longer ones are for measuring.

Source: NVIDIA's CUTLASS 4.2 for all but the promotion's loop; DeepSeek's DeepGEMM for promoting beside running MMAs.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops import cutlass_build
from megatron_fp8.ops.gemm import Epilogue, known, register, through

_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.bfloat16: 2, torch.float32: 3}  # of csrc/abi.h
_TYPES = {code: dtype for dtype, code in _CODES.items()}

# Work of a multiprocessor a unit of time, by tile shape; the largest is 1. Guessed from what a tile reads a product.
SPEED = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.96, (128, 128): 0.87}


@dataclass(frozen=True)
class Kernel:
    """One of the library's: operand and result types, `promote` (0: fast), the tile and cluster as (M, N)."""

    index: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    promote: int
    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool

    def __str__(self) -> str:
        how = "fast" if not self.promote else f"promoted/{self.promote}"
        return f"{self.tile[0]}x{self.tile[1]} {self.cluster[0]}x{self.cluster[1]} {how}{' pingpong' * self.pingpong}"


@dataclass(frozen=True)
class Choice:
    """A kernel, and the order of its tiles: `swizzle` of them side by side at most, along 0: either, 1: M, 2: N."""

    kernel: Kernel
    swizzle: int = 8
    order: int = 0


class Problem(NamedTuple):
    """What a choice depends on."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    fast: bool


class Cutlass:
    """The backend. Attributes: `promote`; `choices` by Problem, set by whoever measured one, the rest by estimate."""

    name, devices, fuses = "cutlass", ("cuda",), frozenset({"bias", "residual", "accumulate"})

    def __init__(self) -> None:
        self.promote = 128
        self.choices: dict[Problem, Choice | None] = {}
        self.kernels: tuple[Kernel, ...] = ()
        self._library: ctypes.CDLL | None = None

    def prepare(self) -> None:
        """Load the library, built first if it must be. Raises cutlass_build.Unavailable: why not, in one line."""
        if self._library is None:
            if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) != (9, 0):
                raise cutlass_build.Unavailable(f"the CUTLASS GEMMs are for Hopper, 9.0; this GPU is {capability}")
            library = cutlass_build.load(cutlass_build.library())
            self.kernels = tuple(_describe(library, index) for index in range(library.mfp8_kernels()))
            self._library = library

    def product(self, a: ScaledTensor, b: ScaledTensor, epilogue: Epilogue, fast_accum: bool) -> torch.Tensor:
        into = epilogue.into
        x, w, dtype = a.payload, b.payload, epilogue.dtype if into is None else into.dtype
        problem = Problem(x.shape[0], w.shape[0], x.shape[1], x.dtype, w.dtype, dtype, fast_accum)
        choice = self.choice(problem)
        out = torch.empty(problem.m, problem.n, dtype=dtype, device=x.device) if into is None else into
        added = out if epilogue.accumulate else epilogue.residual
        both = epilogue.accumulate and epilogue.residual is not None
        if choice is None or both or not _fit(x, w, out, added, epilogue.bias):
            return through(known("cublaslt"), a, b, epilogue, fast_accum)
        self.launch(choice, x, w, a.scale_inv, b.scale_inv, out, added, epilogue.bias)
        return out

    def choice(self, problem: Problem) -> Choice | None:
        """What serves a problem; None: nothing here."""
        if problem not in self.choices:
            candidates = self.candidates(problem)
            cheapest = min(candidates, key=lambda kernel: _estimate(kernel, problem), default=None)
            self.choices[problem] = None if cheapest is None else Choice(cheapest)
        return self.choices[problem]

    def candidates(self, problem: Problem) -> list[Kernel]:
        """The kernels of a problem; where it may be fast and none is, the promoted ones."""
        if min(problem.m, problem.n, problem.k) == 0 or problem.n % 16 or problem.k % 16:
            return []
        self.prepare()
        types = (problem.a, problem.b, problem.out)
        same = [kernel for kernel in self.kernels if (kernel.a, kernel.b, kernel.out) == types]
        fast = [kernel for kernel in same if not kernel.promote] if problem.fast else []
        return fast or [kernel for kernel in same if kernel.promote == self.promote]

    def launch(
        self,
        choice: Choice,
        x: torch.Tensor,
        w: torch.Tensor,
        scale_x: torch.Tensor,
        scale_w: torch.Tensor,
        out: torch.Tensor,
        added: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        """Put one GEMM on the current stream; all tensors fit (`_fit`)."""
        assert self._library is not None  # whoever has a choice has loaded it
        device = x.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.launch(choice, x, w, scale_x, scale_w, out, added, bias)
        stream = torch._C._cuda_getCurrentRawStream(device)
        c, d, plus = (0 if tensor is None else tensor.data_ptr() for tensor in (added, out, bias))
        (m, n), k = out.shape, x.shape[1]
        args = cutlass_build.Args(
            x.data_ptr(), w.data_ptr(), scale_x.data_ptr(), scale_w.data_ptr(), c, d, plus, stream,
            m, n, k, device, choice.swizzle, choice.order,
        )  # fmt: skip
        if status := self._library.mfp8_gemm(choice.kernel.index, ctypes.byref(args)):
            what = {cutlass_build.UNKNOWN: "no such kernel", cutlass_build.UNFIT: "it does not take this shape"}
            raise RuntimeError(f"CUTLASS {choice.kernel}, {m} x {n} x {k}: {what.get(status, 'the launch failed')}")


def _describe(library: ctypes.CDLL, index: int) -> Kernel:
    info = cutlass_build.Info()
    library.mfp8_describe(index, ctypes.byref(info))
    types = (_TYPES[info.a], _TYPES[info.b], _TYPES[info.d])
    tile, cluster = (info.tile_m, info.tile_n), (info.cluster_m, info.cluster_n)
    return Kernel(index, *types, info.promote, tile, cluster, bool(info.pingpong))


def _fit(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Whether the tensors are as the kernels read them: contiguous, at addresses that are multiples of 16."""
    if bias is not None and (bias.dtype != torch.bfloat16 or bias.shape != out.shape[1:]):
        return False
    if added is not None and (added.dtype != out.dtype or added.shape != out.shape):
        return False
    tensors = (tensor for tensor in (x, w, out, added, bias) if tensor is not None)
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _estimate(kernel: Kernel, problem: Problem, multiprocessors: int = 132) -> float:
    """Time of a problem, in products of a multiprocessor: whole waves of tiles, clusters being whole."""
    sizes = zip((problem.m, problem.n), kernel.tile, kernel.cluster, strict=True)
    tiles = math.prod(math.ceil(size / (tile * cluster)) * cluster for size, tile, cluster in sizes)
    return math.ceil(tiles / multiprocessors) * math.prod(kernel.tile) / SPEED.get(kernel.tile, 0.9)


CUTLASS = Cutlass()
register(CUTLASS, serve=False)
