"""FP8 GEMMs by our own CUTLASS kernels: plans (plans.py) from the library that is built from csrc/ (cutlass_build.py).

    D = scale_a scale_b A B^T + bias + C        E4M3 x E4M3, E5M2 x E4M3, E4M3 x E5M2, into BF16 or FP32

Scales are read on the device. `use("cutlass")` (interface.py) chooses these kernels, and builds the library if needed.
With a search (search.py) they run the shapes for which they are faster than cuBLASLt. They do not take an N or K that
is no multiple of 16, or a bias that is not BF16; cuBLASLt runs those.

The library holds kernels of a few tile shapes. If no search has chosen a kernel and an order of tiles, `estimate` finds
the cheapest. A wave of tiles takes as long as a tile is large, so a good tile leaves few multiprocessors idle in the
last wave; large tiles read less memory per multiplication. Tiles are bundled side by side for the L2 cache, and the
tiles of a bundle outside the matrix take as long as the others.

Sums: with `fast_accum` the tensor core sums all of K, with 14 bits. Without it, partial sums over `promote` of K are
added in FP32 (csrc/promoted.cuh). DeepGEMM and CUTLASS promote every 128. Every 256 is 2 to 8 % faster, and adds 0.3 %
to the error of a BF16 result; the error of an FP32 result is 1.7e-4 of it instead of 1.0e-4. Promoting every 512, or
pairs of partial sums, was slower (docs/performance.md).

A thread block takes its tiles from a counter (csrc/counted.cuh). So a collective that occupies some multiprocessors
delays only the tiles that would run there. (With pingpong, a block has a fixed share of the tiles.)

`is_faster` tells without a search which problems run faster than by cuBLASLt on a GPU under load: long sums, promoted
every 256, without C, whose tiles keep the multiprocessors busy. These are dgrads of wide layers, and weight gradients
of many tokens if there is nothing to add them to yet.

Source: NVIDIA's CUTLASS 4.2 for all but the promotion's loop; DeepSeek's DeepGEMM for promoting while MMAs run.
"""

import ctypes
import math
from dataclasses import dataclass

import torch

from . import cutlass_build
from .plans import ALIGNMENT, Problem

_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.bfloat16: 2, torch.float32: 3}  # of csrc/abi.h
_TYPES = {code: dtype for dtype, code in _CODES.items()}

# A multiprocessor's relative speed by tile shape. Estimated from the memory a tile reads per multiplication.
SPEED = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.96, (128, 128): 0.87}
LONG, PROMOTE, WHOLE = 6144, 256, 0.95  # is_faster's minima of k, promote, and the share of time multiprocessors work
ORDERS = ((8, 0), (8, 1), (8, 2), (4, 0), (2, 0), (1, 1), (1, 2))  # (swizzle, order) that a search tries


@dataclass(frozen=True)
class Kernel:
    """One kernel of the library: operand and result types, `promote` (0: fast), tile and cluster as (M, N)."""

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
class GroupedKernel(Kernel):
    """One kernel for several experts (csrc/grouped.cuh). sums: whether it sums over an expert's rows."""

    sums: bool


@dataclass(frozen=True)
class Choice:
    """A kernel and the order of its tiles: at most `swizzle` side by side; `order` 0: either way, 1: along M, 2: N."""

    kernel: Kernel
    swizzle: int = 8
    order: int = 0

    def __str__(self) -> str:
        return f"{self.kernel} {self.swizzle}/{self.order}"


class Launch:
    """A plan (plans.py): a Problem and a Choice."""

    maker = "cutlass"

    def __init__(self, library: ctypes.CDLL, problem: Problem, device: int, pointers: tuple[int, ...], choice: Choice):
        self.problem, self.choice, self._gemm = problem, choice, library.mfp8_gemm
        shape = {"m": problem.m, "n": problem.n, "k": problem.k, "device": device}
        self._args = cutlass_build.Args(**shape, swizzle=choice.swizzle, raster=choice.order)
        self._at, self._index, self._add = ctypes.byref(self._args), choice.kernel.index, problem.add
        self.point(pointers)

    @property
    def name(self) -> str:
        return str(self.choice)

    def point(self, pointers: tuple[int, ...]) -> None:
        self.pointers, args = pointers, self._args
        args.scale_b, args.scale_a, args.bias = pointers

    def run(self, a: int, b: int, c: int, d: int, stream: int) -> None:
        args = self._args
        args.a, args.b, args.c, args.d, args.stream = a, b, c if self._add else 0, d, stream
        if status := self._gemm(self._index, self._at):
            what = {cutlass_build.UNKNOWN: "no such kernel", cutlass_build.UNFIT: "it does not take this shape"}
            raise RuntimeError(f"CUTLASS {self.choice}: {self.problem}: {what.get(status, 'the launch failed')}")

    def described(self) -> str:
        return self.name


class Cutlass:
    """Makes plans (see plans.Maker) from the library's kernels.

    Attributes: `promote`, the largest that it uses. After `prepare`: `kernels`, those of several experts (`grouped`),
    the GPU's `multiprocessors`, and the library's `version`.
    """

    name = "cutlass"

    def __init__(self) -> None:
        self.promote, self.multiprocessors = 256, 132
        self.kernels: tuple[Kernel, ...] = ()
        self.grouped: tuple[GroupedKernel, ...] = ()
        self._library: ctypes.CDLL | None = None
        self.version = ""

    def prepare(self, build: bool = True) -> None:
        """Load the library; build it first if it is missing and `build` allows. Raises cutlass_build.Unavailable."""
        if self._library is None:
            if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) != (9, 0):
                found = ".".join(map(str, capability))
                raise cutlass_build.Unavailable(f"the CUTLASS GEMMs are for Hopper, 9.0; this GPU is {found}")
            path = cutlass_build.library(build=build)
            library = cutlass_build.load(path)
            if torch.cuda.is_available():
                self.multiprocessors = torch.cuda.get_device_properties().multi_processor_count
            self.kernels = tuple(_describe(library, index) for index in range(library.mfp8_kernels()))
            grouped = range(library.mfp8_grouped_kernels())
            self.grouped = tuple(_describe_grouped(library, index) for index in grouped)
            self._library, self.version = library, cutlass_build.version(path)

    def takes(self, problem: Problem) -> bool:
        return bool(self._kernels(problem))

    def is_faster(self, problem: Problem) -> bool:
        """Whether CUTLASS takes the problem and should be faster than cuBLASLt; see the top of the file."""
        p = problem
        if p.k < LONG or p.d != torch.bfloat16 or p.add:
            return False
        long = [choice for choice in self.choices(p) if choice.kernel.promote >= PROMOTE]
        times = [self.estimate(choice, p) for choice in long if choice.swizzle > 1]  # 1 reads too much memory twice
        return bool(times) and p.m * p.n / self.multiprocessors >= WHOLE * min(times)

    def candidates(self, problem: Problem, device: int, pointers: tuple[int, ...], count: int | None = None) -> list:
        choices = self.choices(problem)
        choices.sort(key=lambda choice: (self.estimate(choice, problem), -choice.kernel.promote))
        return [self.launch(choice, problem, device, pointers) for choice in choices[:count]]

    def named(self, problem: Problem, device: int, pointers: tuple[int, ...], name: str) -> Launch | None:
        choice = next((choice for choice in self.choices(problem) if str(choice) == name), None)
        return None if choice is None else self.launch(choice, problem, device, pointers)

    def launch(self, choice: Choice, problem: Problem, device: int, pointers: tuple[int, ...]) -> Launch:
        """The plan for a choice whose kernel takes the problem."""
        assert self._library is not None  # loaded, because there is a kernel
        return Launch(self._library, problem, device, pointers, choice)

    def grouped_kernel(
        self, a: torch.dtype, b: torch.dtype, out: torch.dtype, n: int, *, sums: bool, fast_accum: bool
    ) -> GroupedKernel | None:
        """The kernel of these types for several experts: with fast_accum a fast one, or else a promoted one.

        n: columns of a result. Whole clusters of tiles cover them; a tile beyond the last column takes as long as the
        others. Blocks in pairs read less. So they serve if they waste no more columns than single ones.
        """
        same = [k for k in self.grouped if (k.a, k.b, k.out, k.sums) == (a, b, out, sums)]
        fast = [kernel for kernel in same if not kernel.promote] if fast_accum else []

        def cost(kernel: GroupedKernel) -> tuple[int, int]:
            width = kernel.tile[1] * kernel.cluster[1]
            return math.ceil(n / width) * width, -width

        return min(fast or [kernel for kernel in same if kernel.promote], key=cost, default=None)

    def run_grouped(self, kernel: GroupedKernel, args: cutlass_build.GroupedArgs) -> None:
        """Launch it."""
        assert self._library is not None
        if status := self._library.mfp8_grouped_gemm(kernel.index, ctypes.byref(args)):
            what = {cutlass_build.UNFIT: "it does not take this shape"}.get(status, "the launch failed")
            shape = f"{args.experts} experts, {args.m} x {args.n} x {args.k}"
            raise RuntimeError(f"CUTLASS {kernel}: {shape}: {what}")

    def choices(self, problem: Problem) -> list[Choice]:
        """All choices for a problem."""
        return [Choice(kernel, *order) for order in ORDERS for kernel in self._kernels(problem)]

    def estimate(self, choice: Choice, problem: Problem) -> float:
        """Estimated time of a problem, in elements of D that a multiprocessor computes at full speed.

        It counts whole waves of whole clusters and bundles of tiles.
        """
        kernel, sizes = choice.kernel, (problem.m, problem.n)
        clusters = [math.ceil(s / (tile * c)) for s, tile, c in zip(sizes, kernel.tile, kernel.cluster, strict=True)]
        shorter = min(count * c for count, c in zip(clusters, kernel.cluster, strict=True))
        # CUTLASS's rule: at most `swizzle` tiles side by side, and fewer if the shorter side has few tiles.
        bundle = next(b for b, least in ((8, 6), (4, 3), (2, 2), (1, 0)) if choice.swizzle >= b and shorter >= least)
        tiles = math.prod(kernel.cluster) * math.prod(math.ceil(count / bundle) * bundle for count in clusters)
        return math.ceil(tiles / self.multiprocessors) * math.prod(kernel.tile) / SPEED.get(kernel.tile, 0.9)

    def _kernels(self, problem: Problem) -> list[Kernel]:
        """The kernels that take a problem: with fast_accum the fast ones, or the promoted ones if there are none."""
        p = problem
        whole = p.packed and p.a_rows and p.b_rows and p.align == ALIGNMENT and min(p.m, p.n, p.k) > 0
        if not whole or p.n % 16 or p.k % 16 or p.bias not in (None, torch.bfloat16):
            return []
        same = [kernel for kernel in self.kernels if (kernel.a, kernel.b, kernel.out) == (p.a, p.b, p.d)]
        fast = [kernel for kernel in same if not kernel.promote] if p.fast_accum else []
        return fast or [kernel for kernel in same if 0 < kernel.promote <= self.promote]


def _describe(library: ctypes.CDLL, index: int) -> Kernel:
    info = cutlass_build.Info()
    library.mfp8_describe(index, ctypes.byref(info))
    return _kernel(index, info)


def _describe_grouped(library: ctypes.CDLL, index: int) -> GroupedKernel:
    info, sums = cutlass_build.Info(), ctypes.c_int32()
    library.mfp8_grouped_describe(index, ctypes.byref(info), ctypes.byref(sums))
    return GroupedKernel(**vars(_kernel(index, info)), sums=bool(sums.value))


def _kernel(index: int, info: cutlass_build.Info) -> Kernel:
    types = (_TYPES[info.a], _TYPES[info.b], _TYPES[info.d])
    tile, cluster = (info.tile_m, info.tile_n), (info.cluster_m, info.cluster_n)
    return Kernel(index, *types, info.promote, tile, cluster, bool(info.pingpong))


CUTLASS = Cutlass()
