"""cuBLASLt by ctypes: what torch._scaled_mm cannot do. No compiler, no build.

    D (m, n) = a_scale b_scale A B^T (+ bias) (+ D)        A (m, k), B (n, k)

torch's call knows no beta, so that a weight gradient is a product and then a pass that adds it; and it takes the first
algorithm of the library's heuristic, where gemm_search.py measures. What Hopper's cuBLASLt has:

    A, B             scales    D                       layouts
    E4M3, E4M3       yes       BF16, FP16, FP32, E4M3  both along k ("TN"), m, n, k and rows in multiples of 16 bytes
    E4M3, E5M2       yes       and E5M2                the same; E5M2 by E5M2 does not exist
    BF16, BF16       no        BF16, FP32              any; FP16 likewise
    bias (n,)                  of D's type; BF16 where D is FP32 or FP8 and the operands are FP8
    E4M3, E5M2 as D            written as D * out_scale, saturating; amax is overwritten by max|D| before the scale

A call's shape is a `Problem`; its descriptors and its algorithm are made once, a `Plan`, and then a call is one ctypes
call on torch's current stream. It waits for nothing and can be captured in a CUDA graph.
cuBLAS counts in columns: a matrix by rows is its transpose there, so D^T = B A^T is what is asked for.

Sums are FP32 and partial sums of a split k are added in FP32: algorithms that would add them in D's type are ruled out.

Source: the library's header, which comes with torch's own wheels (nvidia-cublas); cublaslt_library.py has its numbers.
"""

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_fp8.ops.cublaslt_library import (
    ALIGNMENT,
    COMPUTE_32F,
    CONFIG,
    CUDA_TYPES,
    DESC,
    EPILOGUE_BIAS,
    FP8,
    NAMES,
    NOT_SUPPORTED,
    OP_N,
    OP_T,
    POINTERS,
    PREF,
    REDUCTION_COMPUTE_TYPE,
    SUCCESS,
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

__all__ = ["FP8", "NAMES", "CublasLtError", "bound", "version", "why_not"]  # of the library's, for who uses it
__all__ += ["Choice", "Plan", "Problem", "plans", "product", "renew"]


class Problem(NamedTuple):
    """A call's shape, all that descriptors and algorithm depend on.

    a_rows, b_rows: whether the operand is contiguous along k; *_ld: elements from one row, or column, to the next.
    align: bytes, up to 16, of which all addresses are multiples.
    bias: its type.  add: D is read.  amax: it is asked for.
    """

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    d: torch.dtype
    a_rows: bool
    b_rows: bool
    a_ld: int
    b_ld: int
    d_ld: int
    align: int
    fast_accum: bool
    bias: torch.dtype | None
    add: bool
    amax: bool

    def __str__(self) -> str:
        """As "8192 x 12288 x 4096 E4M3 x E4M3 -> BF16, fast, bias": one for each problem of usual strides."""
        extras = {
            "fast": self.fast_accum,
            f"bias {NAMES.get(self.bias)}": self.bias is not None,  # type: ignore[arg-type]
            "added": self.add,
            "amax": self.amax,
            "A by columns": not self.a_rows,
            "B by columns": not self.b_rows,
            f"rows of {self.a_ld}, {self.b_ld}, {self.d_ld}": self._strided(),
            f"aligned to {self.align}": self.align != ALIGNMENT,
        }
        types = f"{NAMES[self.a]} x {NAMES[self.b]} -> {NAMES[self.d]}"
        return ", ".join([f"{self.m} x {self.n} x {self.k} {types}", *(text for text, has in extras.items() if has)])

    def _strided(self) -> bool:
        usual = (self.k if self.a_rows else self.m, self.k if self.b_rows else self.n, self.n)
        return usual != (self.a_ld, self.b_ld, self.d_ld)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Choice:
    """An algorithm: its bytes in hexadecimal; and what a search measured, milliseconds, 0 where none was made."""

    algo: str
    ms: float = 0.0
    first_ms: float = 0.0  # of the heuristic's first


# Descriptors and algorithms


class Descriptors:
    """Of one Problem. cuBLAS's first operand is our B, its second our A, each by columns."""

    def __init__(self, problem: Problem):
        self._lib, self.problem = library(), problem
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
        self.added = self._layout(torch.bfloat16, p.n, p.m, p.d_ld) if p.d in FP8 else self.result

    @property
    def layouts(self) -> tuple[int, int, int, int]:
        return self.first, self.second, self.added, self.result

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

    def candidates(self, device: int, count: int) -> list[Heuristic]:
        """Up to `count` algorithms, the library's favourite first; CublasLtError where it has none."""
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
                handle(device), self.operation, *self.layouts, preference, count, found, byref(returned)
            )
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        usable = [one for one in found[: returned.value] if one.state == SUCCESS] if status == SUCCESS else []
        if not usable:
            check(status or NOT_SUPPORTED, self.problem)
        return usable

    def verified(self, algo: Algo, device: int) -> Heuristic | None:
        """`algo` as the library judges it here; None where it will not run."""
        result = Heuristic()
        status = self._lib.cublasLtMatmulAlgoCheck(
            handle(device), self.operation, *self.layouts, byref(algo), byref(result)
        )
        if status != SUCCESS or result.workspace > WORKSPACE:
            return None
        result.algo = algo
        return result


class Plan:
    """A Problem's descriptors and algorithm on a device."""

    def __init__(self, problem: Problem, device: int, pointers: tuple[int, ...], algorithm: Heuristic | None = None):
        self.problem, self.device = problem, device
        self.pointers: tuple[int, ...] = (0,) * len(POINTERS)
        self._slots = [(c_void_p(), DESC[name][0]) for name in POINTERS]
        self.descriptors, self._set = Descriptors(problem), library().cublasLtMatmulDescSetAttribute
        self.point(pointers)  # before the heuristic is asked: it looks at them
        if algorithm is None:
            algorithm, self.choice = self._algorithm()
        else:
            self.choice = Choice(bytes(algorithm.algo).hex())
        self.algo, self.workspace = algorithm.algo, algorithm.workspace
        self._algo = ctypes.addressof(self.algo)
        self._matmul, self._handle = library().cublasLtMatmul, handle(device)
        self._beta = _ONE if problem.add else _ZERO

    def _algorithm(self) -> tuple[Heuristic, Choice]:
        choice = None if look_up is None else look_up(self.problem)
        if choice is not None:
            usable = self.descriptors.verified(Algo.from_buffer_copy(bytes.fromhex(choice.algo)), self.device)
            if usable is not None:
                return usable, choice
        first = self.descriptors.candidates(self.device, 1)[0]
        return first, Choice(bytes(first.algo).hex())

    def point(self, pointers: tuple[int, ...]) -> None:
        """Have the descriptor hold these addresses, in the order of POINTERS; 0: none."""
        for pointer, held, (slot, number) in zip(pointers, self.pointers, self._slots, strict=True):
            if pointer != held:
                slot.value = pointer
                status = self._set(self.descriptors.operation, number, byref(slot), 8)
                if status:
                    check(status, self.problem)
        self.pointers = pointers

    def run(self, a: int, b: int, d: int, stream: int) -> None:
        """Launch it on tensors' addresses; under `_lock`, as the scales that it reads were pointed to before."""
        made, size = self.descriptors, self.workspace
        room = _workspace(self.device, stream, size) if size else None
        status = self._matmul(
            *(self._handle, made.operation, _ONE, b, made.first, a, made.second, self._beta),
            *(d, made.added, d, made.result, self._algo, None if room is None else room.data_ptr(), size, stream),
        )
        if status:
            check(status, self.problem)

    def described(self) -> str:
        """As "algorithm 66, tile 24, stages 36, cluster 4, 1402 TFLOP/s (first choice 1350)"."""
        value, parts = c_int32(), []
        for name, number in CONFIG.items():
            status = library().cublasLtMatmulAlgoConfigGetAttribute(byref(self.algo), number, byref(value), 4, None)
            if status == SUCCESS and (name != "split-k" or value.value > 1):
                parts.append(f"{name} {value.value}")
        if self.choice.ms:
            ours, first = (self.problem.flops / ms / 1e9 for ms in (self.choice.ms, self.choice.first_ms))
            parts.append(f"{ours:.0f} TFLOP/s (first choice {first:.0f})")
        return ", ".join(parts)


# Calls

_lock = threading.Lock()  # autograd's thread and the caller's share descriptors
_scalars = c_float(0.0), c_float(1.0)
_ZERO, _ONE = map(ctypes.addressof, _scalars)
_plans: dict[tuple, Plan] = {}  # by what `product` is given, addresses aside
_workspaces: dict[tuple[int, int], torch.Tensor] = {}  # by (device, stream)
look_up: Callable[[Problem], Choice | None] | None = None  # what a search found (gemm_search.py)
on_plan: Callable[[Plan], None] | None = None  # is told of every plan that is made (announce.py)


def _workspace(device: int, stream: int, size: int) -> torch.Tensor:
    """Memory for one call: a stream's own, for what runs on it runs in turn; in a CUDA graph the graph's own, which the
    allocator gives to what follows in the graph."""
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    room = _workspaces.get((device, stream))
    if room is None:
        room = _workspaces[device, stream] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return room


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def renew() -> None:
    """Choose every problem's algorithm anew when it is met again."""
    with _lock:
        _plans.clear()


def plans() -> list[Plan]:
    """Of all problems that were met, in the order in which they were."""
    return list(_plans.values())


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    add: bool = False,
    fast_accum: bool = False,
    out_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """out (m, n) = a_scale b_scale A B^T + bias, added to what `out` holds with `add`.

    Args:
        a, b: (m, k), (n, k); each contiguous along one of its dimensions, FP8 along k.
        out: contiguous along n.
        a_scale, b_scale: 0-d float32 on the device, of FP8 operands.
        bias: (n,), contiguous.
        out_scale, amax: 0-d float32, of an FP8 `out`: what the result is multiplied by, and where max|result| goes.

    Raises:
        ValueError: strides that no GEMM reads.  CublasLtError: what the library does not do, with the shape.
    """
    device = out.get_device()
    if device != _current_device():
        with torch.cuda.device(device):
            scales: Any = {"a_scale": a_scale, "b_scale": b_scale, "out_scale": out_scale}
            return product(a, b, out, bias=bias, add=add, fast_accum=fast_accum, amax=amax, **scales)
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), out.data_ptr()
    together = a_at | b_at | out_at | ALIGNMENT
    key = (
        *(a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, out.shape, out.stride(), out.dtype, device),
        *(together & -together, fast_accum, None if bias is None else bias.dtype, add, amax is not None),
    )
    pointers = (  # cuBLAS's first operand is our second
        0 if b_scale is None else b_scale.data_ptr(),
        0 if a_scale is None else a_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if out_scale is None else out_scale.data_ptr(),
        0 if amax is None else amax.data_ptr(),
    )
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            if a.dtype in FP8 and not all(pointers[:2]):
                raise ValueError("a product of FP8 operands needs the scales of both")
            plan = _plans[key] = Plan(_problem(a, b, out, *key[-5:]), device, pointers)
            if on_plan is not None:
                on_plan(plan)
        if plan.pointers != pointers:
            plan.point(pointers)
        plan.run(a_at, b_at, out_at, _stream(device))
    return out


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *how: Any) -> Problem:
    """Of the operands and the fields of a Problem from `align` on; ValueError where there is none."""
    (m, k), n = a.shape, b.shape[0]
    (a_rows, a_ld), (b_rows, b_ld), (d_rows, d_ld) = map(_layout, (a, b, out))
    if not d_rows or b.shape[1] != k or out.shape != (m, n):
        raise ValueError(f"product of {tuple(a.shape)} and {tuple(b.shape)} into {tuple(out.shape)}, {out.stride()}")
    return Problem(m, n, k, a.dtype, b.dtype, out.dtype, a_rows, b_rows, a_ld, b_ld, d_ld, *how)


def _layout(x: torch.Tensor) -> tuple[bool, int]:
    """Whether x is contiguous along its last dimension, and the elements from one row, or column, to the next."""
    across, along = x.stride()
    rows, columns = x.shape
    if (along == 1 or columns == 1) and (across >= columns or rows == 1):
        return True, across if rows > 1 else columns
    if (across == 1 or rows == 1) and along >= rows:
        return False, along
    raise ValueError(f"a matrix of {rows} x {columns} with strides {across}, {along}: no GEMM reads it")
