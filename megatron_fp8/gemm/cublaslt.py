"""GEMMs by cuBLASLt, called with ctypes, which needs no compiler.

    D (m, n) = a_scale b_scale A B^T (+ bias) (+ C)        A (m, k), B (n, k); C is D, or another tensor

torch._scaled_mm has no beta, so a weight gradient would need a second pass to be added. It also always takes the first
algorithm of the library's heuristic, while race.py can measure them all. cuBLASLt has these products on Hopper:

    A, B             scales    D                       layouts
    E4M3, E4M3       yes       BF16, FP16, FP32        both along k ("TN"), m, n, k and rows in multiples of 16 bytes
    E4M3, E5M2       yes       the same                the same; E5M2 by E5M2 does not exist
    BF16, BF16       no        BF16, FP32              any; FP16 likewise
    bias (n,)                  of D's type; BF16 if D is FP32 and the operands are FP8

A problem's descriptors and algorithm are made once (plans.py). After that, a GEMM is one ctypes call. cuBLAS matrices
are column-major, so a row-major matrix is its own transpose there: the library is asked for D^T = B A^T.

The heuristic's first algorithm is the fastest in a burst. But a GPU in training is limited by its power, and under load
tiles of 176 x 128 and 168 x 128 were up to 12 % faster than 192 x 192, the first choice for many forward GEMMs
(docs/performance.md). So these tiles come first here.

Sums are FP32. Algorithms that would add the partial sums of a split k in D's type are excluded.

Source: the library's header, which comes with torch's wheels (nvidia-cublas); cublaslt_library.py has its constants.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_void_p
from typing import Any

import torch

from .cublaslt_library import (
    COMPUTE_32F,
    CONFIG,
    CUDA_TYPES,
    DESC,
    EPILOGUE_BIAS,
    NOT_SUPPORTED,
    OP_N,
    OP_T,
    POINTERS,
    PREF,
    REDUCTION_COMPUTE_TYPE,
    SUCCESS,
    TILES,
    WORKSPACE,
    Algo,
    CublasLtError,
    Heuristic,
    bound,
    check,
    handle,
    library,
    version,
    why_not,
)
from .plans import FP8, Problem

__all__ = ["CUBLASLT", "Algorithm", "CublasLt", "CublasLtError", "bound", "version", "why_not"]


class Descriptors:
    """cuBLASLt's descriptors of one Problem. cuBLAS's first operand is our B, its second our A, both column-major."""

    def __init__(self, problem: Problem, device: int, pointers: tuple[int, ...]):
        self._lib, self.problem, self.device = library(), problem, device
        self._destroy: list[tuple[Any, int]] = []
        self.operation = self._make("MatmulDesc", COMPUTE_32F, CUDA_TYPES[torch.float32])
        p = problem
        self.set("TRANSA", OP_T if p.b_rows else OP_N)
        self.set("TRANSB", OP_N if p.a_rows else OP_T)
        if p.a in FP8:
            self.set("FAST_ACCUM", int(p.fast_accum))
        if p.bias is not None:
            self.set("EPILOGUE", EPILOGUE_BIAS)
            self.set("BIAS_DATA_TYPE", CUDA_TYPES[p.bias])
        self.first = self._layout(p.b, *((p.k, p.n) if p.b_rows else (p.n, p.k)), p.b_ld)
        self.second = self._layout(p.a, *((p.k, p.m) if p.a_rows else (p.m, p.k)), p.a_ld)
        self.result = self._layout(p.d, p.n, p.m, p.d_ld)
        for name, pointer in zip(POINTERS, pointers, strict=True):
            if pointer:
                self.set(name, pointer)

    @property
    def layouts(self) -> tuple[int, int, int, int]:
        return self.first, self.second, self.result, self.result

    def set(self, name: str, value: int) -> None:
        number, kind = DESC[name]
        held = kind(value)
        status = self._lib.cublasLtMatmulDescSetAttribute(self.operation, number, byref(held), ctypes.sizeof(held))
        check(status, f"{name} of {self.problem}")

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, ld: int) -> int:
        return self._make("MatrixLayout", CUDA_TYPES[dtype], rows, columns, ld)

    def _make(self, kind: str, *arguments: int) -> int:
        made = c_void_p()
        check(getattr(self._lib, f"cublasLt{kind}Create")(byref(made), *arguments), f"{kind} of {self.problem}")
        assert made.value is not None
        self._destroy.append((getattr(self._lib, f"cublasLt{kind}Destroy"), made.value))
        return made.value

    def __del__(self) -> None:
        for destroy, made in self._destroy:
            destroy(made)

    def candidates(self, count: int) -> list[Heuristic]:
        """Up to `count` algorithms, the heuristic's first choice first; CublasLtError if there is none."""
        lib, preference = self._lib, c_void_p()
        check(lib.cublasLtMatmulPreferenceCreate(byref(preference)), "a preference")
        try:
            aligned = dict.fromkeys((name for name in PREF if "ALIGNMENT" in name), self.problem.align)
            wanted = {"MAX_WORKSPACE_BYTES": WORKSPACE, "REDUCTION_SCHEME_MASK": REDUCTION_COMPUTE_TYPE, **aligned}
            for name, value in wanted.items():
                number, kind = PREF[name]
                held = kind(value)
                set_to = lib.cublasLtMatmulPreferenceSetAttribute
                check(set_to(preference, number, byref(held), ctypes.sizeof(held)), name)
            found, returned = (Heuristic * count)(), c_int()
            status = lib.cublasLtMatmulAlgoGetHeuristic(
                handle(self.device), self.operation, *self.layouts, preference, count, found, byref(returned)
            )
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        usable = [one for one in found[: returned.value] if one.state == SUCCESS] if status == SUCCESS else []
        if not usable:
            check(status or NOT_SUPPORTED, self.problem)
        return usable

    def verified(self, algo: Algo) -> Heuristic | None:
        """`algo` with its workspace size, or None if the library cannot run it here."""
        result = Heuristic()
        status = self._lib.cublasLtMatmulAlgoCheck(
            handle(self.device), self.operation, *self.layouts, byref(algo), byref(result)
        )
        if status != SUCCESS or result.workspace > WORKSPACE:
            return None
        result.algo = algo
        return result


class Algorithm:
    """A plan (plans.py): the descriptors of a Problem and one algorithm, on one device."""

    maker = "cublaslt"

    def __init__(self, descriptors: Descriptors, pointers: tuple[int, ...], algorithm: Heuristic):
        self.problem, self.descriptors, self.pointers = descriptors.problem, descriptors, pointers
        self._device, self._slots = descriptors.device, [(c_void_p(), DESC[name][0]) for name in POINTERS]
        self._algorithm, self._room = algorithm.algo, algorithm.workspace
        self._at = ctypes.addressof(self._algorithm)
        self._matmul, self._handle = library().cublasLtMatmul, handle(self._device)
        self._set, self._beta = library().cublasLtMatmulDescSetAttribute, _ONE if self.problem.add else _ZERO
        self._operation, (self._b, self._a, self._d, _) = descriptors.operation, descriptors.layouts

    @property
    def name(self) -> str:
        return bytes(self._algorithm).hex()

    def point(self, pointers: tuple[int, ...]) -> None:
        for pointer, held, (slot, number) in zip(pointers, self.pointers, self._slots, strict=True):
            if pointer != held:
                slot.value = pointer
                status = self._set(self.descriptors.operation, number, byref(slot), 8)
                if status:
                    check(status, self.problem)
        self.pointers = pointers

    def run(self, a: int, b: int, c: int, d: int, stream: int) -> None:
        size, of_d = self._room, self._d
        room = _workspace(self._device, stream, size).data_ptr() if size else None
        status = self._matmul(
            self._handle, self._operation, _ONE, b, self._b, a, self._a, self._beta, c, of_d, d, of_d, self._at, room,
            size, stream,
        )  # fmt: skip
        if status:
            check(status, self.problem)

    def described(self) -> str:
        """Text such as "algorithm 66, tile 24, stages 36, cluster 4"."""
        values = {name: _setting(self._algorithm, name) for name in CONFIG}
        shown = (name for name, value in values.items() if value is not None and (name != "split-k" or value > 1))
        return ", ".join(f"{name} {values[name]}" for name in shown)


def _setting(algorithm: Algo, name: str) -> int | None:
    """The algorithm's value for a key of CONFIG, or None if it has none."""
    value = c_int32()
    get = library().cublasLtMatmulAlgoConfigGetAttribute
    return value.value if get(byref(algorithm), CONFIG[name], byref(value), 4, None) == SUCCESS else None


def by_load(problem: Problem, found: list[Heuristic]) -> list[Heuristic]:
    """The heuristic's algorithms, reordered for speed under load.

    If the first algorithm of an FP8 GEMM with fast accumulation has tiles of 192 x 192, the first one with 176 x 128,
    or else 168 x 128, moves before it: these were mostly faster under load.
    """
    tiles = [_setting(one.algo, "tile") for one in found] if problem.a in FP8 and problem.fast_accum else []
    if tiles and tiles[0] == TILES["192x192"]:
        for better in (TILES["176x128"], TILES["168x128"]):
            if better in tiles:
                first = found[tiles.index(better)]
                return [first, *(one for one in found if one is not first)]
    return found


class CublasLt:
    """Makes plans (see plans.Maker) from cuBLASLt's algorithms."""

    name = "cublaslt"

    @property
    def version(self) -> str:
        return str(version())

    def takes(self, problem: Problem) -> bool:
        return True  # if not, `candidates` raises

    def candidates(self, problem: Problem, device: int, pointers: tuple[int, ...], count: int | None = None) -> list:
        """See plans.Maker. Each plan has its own descriptors. They hold the pointers, which the heuristic looks at."""
        # The heuristic is always asked for all of them: its first choice is the same as if asked for one.
        found = by_load(problem, Descriptors(problem, device, pointers).candidates(CANDIDATES))
        return [Algorithm(Descriptors(problem, device, pointers), pointers, one) for one in found[:count]]

    def named(self, problem: Problem, device: int, pointers: tuple[int, ...], name: str) -> Algorithm | None:
        descriptors, held = Descriptors(problem, device, pointers), bytes.fromhex(name)
        usable = descriptors.verified(Algo.from_buffer_copy(held)) if len(held) == ctypes.sizeof(Algo) else None
        return None if usable is None else Algorithm(descriptors, pointers, usable)


CUBLASLT = CublasLt()
CANDIDATES = 16  # algorithms that a search tries
_scalars = c_float(0.0), c_float(1.0)
_ZERO, _ONE = map(ctypes.addressof, _scalars)
_workspaces: dict[tuple[int, int], torch.Tensor] = {}  # by (device, stream)


def _workspace(device: int, stream: int, size: int) -> torch.Tensor:
    """Workspace for one call.

    A stream has one for all its calls, which run one after the other. In a CUDA graph it comes from the graph's pool,
    whose allocator reuses it for later calls in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    room = _workspaces.get((device, stream))
    if room is None:
        room = _workspaces[device, stream] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return room
