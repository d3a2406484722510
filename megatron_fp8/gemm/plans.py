"""GEMM calls on CUDA memory: each shape gets a plan when it first occurs, and later calls find it with one look-up.

    D (m, n) = a_scale b_scale A B^T (+ bias) (+ C)     A (m, k), B (n, k); C is D, to accumulate, or a residual

A call's shape is a `Problem`. A `Maker` makes plans for it: cuBLASLt from its algorithms (cublaslt.py), CUTLASS from
its kernels (cutlass.py). A plan that a search chose comes first (search.py); otherwise the serving backend's maker for
the problem makes one (`serve`). A call does not wait for the device, and can be captured in a CUDA graph.

If an FP8 operand or its result is at an address that is no multiple of 16 bytes, the GEMM runs on aligned copies, with
the same bits. A result in FP8 is refused, because no maker can write it.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

ALIGNMENT = 16  # bytes; FP8 GEMMs and the tensor memory accelerator need it
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = {  # in log lines and files
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "E4M3",
    torch.float8_e5m2: "E5M2",
}


class Problem(NamedTuple):
    """The shape of a call: everything that a plan depends on.

    Attributes:
        a, b, d: types.
        a_rows, b_rows: whether the operand is contiguous along k.
        a_ld, b_ld, d_ld: elements from one row (column if not *_rows) to the next.
        align: largest power of two, up to 16 bytes, that divides all addresses.
        bias: its type, or None.
        add: whether C is read.
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

    def __str__(self) -> str:
        """Text such as "8192 x 12288 x 4096 E4M3 x E4M3 -> BF16, fast, bias BF16". Each problem has its own."""
        extras = {
            "fast": self.fast_accum,
            f"bias {NAMES.get(self.bias)}": self.bias is not None,  # type: ignore[arg-type]
            "added": self.add,
            "A by columns": not self.a_rows,
            "B by columns": not self.b_rows,
            f"rows of {self.a_ld}, {self.b_ld}, {self.d_ld}": not self.packed,
            f"aligned to {self.align}": self.align != ALIGNMENT,
        }
        types = f"{NAMES[self.a]} x {NAMES[self.b]} -> {NAMES[self.d]}"
        return ", ".join([f"{self.m} x {self.n} x {self.k} {types}", *(text for text, has in extras.items() if has)])

    @property
    def packed(self) -> bool:
        """Whether no matrix has gaps between its rows or columns."""
        usual = (self.k if self.a_rows else self.m, self.k if self.b_rows else self.n, self.n)
        return usual == (self.a_ld, self.b_ld, self.d_ld)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


class Plan(Protocol):
    """One way to run a Problem on a device.

    Attributes:
        maker: its maker's name.
        name: identifies the plan, so that `Maker.named` finds it in another process or after a rebuild.
        pointers: the addresses that it holds; see `pointers_of`.
    """

    maker: str
    problem: Problem
    pointers: tuple[int, ...]

    @property
    def name(self) -> str: ...

    def point(self, pointers: tuple[int, ...]) -> None:
        """Replace the addresses that it holds."""

    def run(self, a: int, b: int, c: int, d: int, stream: int) -> None:
        """Launch it on these addresses. Hold `_lock`, so that no other thread changes the plan's own addresses."""

    def described(self) -> str:
        """Text for a log line."""


class Maker(Protocol):
    """Makes plans. Attributes: `name`; `version`, for which the names of its plans are valid."""

    name: str

    @property
    def version(self) -> str: ...

    def takes(self, problem: Problem) -> bool:
        """Whether it may have plans for a problem."""

    def candidates(self, problem: Problem, device: int, pointers: tuple[int, ...], count: int | None = None) -> list:
        """Its plans for a problem, the best first, all or at most `count`; RuntimeError if it has none."""

    def named(self, problem: Problem, device: int, pointers: tuple[int, ...], name: str) -> Plan | None:
        """The plan of that name, or None if it cannot run here."""


_lock = threading.Lock()  # autograd's thread and the caller's share plans
KEPT = 4096  # plans: with experts each number of tokens is a shape, and each shape has plans
_plans: dict[tuple, Plan | None] = {}  # by `product`'s arguments without addresses; None: it needs aligned copies
maker_of: Callable[[Problem], Maker]  # the maker of a problem's plan
searched: Callable[[Problem, int, tuple[int, ...]], Plan | None] | None = None  # the plan that a search chose, if any
on_plan: Callable[[Plan], None] | None = None  # called with every new plan (gemm_log.py)


def serve(by: Callable[[Problem], Maker]) -> None:
    """From now on, let by(problem) make a problem's plan."""
    global maker_of
    maker_of = by
    renew()


def renew() -> None:
    """Forget all plans, so that each problem is planned again at its next call."""
    with _lock:
        _plans.clear()


def plans() -> list[Plan]:
    """All plans made so far, in order."""
    return [plan for plan in _plans.values() if plan is not None]


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    add: bool = False,
    fast_accum: bool = False,
) -> torch.Tensor:
    """out (m, n) = a_scale b_scale A B^T + bias + residual; with `add`, added to `out`.

    Args:
        a, b: (m, k), (n, k); each contiguous along one dimension, FP8 along k.
        out: contiguous along n, not FP8.
        a_scale, b_scale: 0-d float32 on the device; for FP8 operands only.
        bias: (n,), contiguous.
        residual: of out's type, shape and strides; not with `add`.

    Raises:
        ValueError: strides that no GEMM reads; an FP8 `out`.
        RuntimeError: no maker has a plan. The text names the shape.
    """
    device = out.get_device()
    if device != _current_device():
        with torch.cuda.device(device):
            scales: Any = {"a_scale": a_scale, "b_scale": b_scale}
            rest: Any = {"bias": bias, "residual": residual, "add": add, "fast_accum": fast_accum}
            return product(a, b, out, **scales, **rest)
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), out.data_ptr()
    c_at = out_at if residual is None else residual.data_ptr()
    pointers = pointers_of(a_scale, b_scale, bias)
    together = a_at | b_at | c_at | out_at | pointers[2] | ALIGNMENT
    key = (
        *(a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, out.shape, out.stride(), out.dtype, device),
        *(together & -together, fast_accum, None if bias is None else bias.dtype, add or residual is not None),
    )
    with _lock:
        plan = _plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            if len(_plans) >= KEPT:
                del _plans[next(iter(_plans))]  # the oldest
            plan = _plans[key] = _plan(problem_of(a, b, out, *key[-4:]), device, pointers)
        if plan is not None:
            if plan.pointers != pointers:
                plan.point(pointers)
            plan.run(a_at, b_at, c_at, out_at, _stream(device))
            return out
    room = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if add:
        room.copy_(out)
    # The residual stays a separate tensor: if C is D, cuBLASLt may run a kernel that rounds differently.
    apart = None if residual is None else _aligned(residual.contiguous())
    how: Any = {"a_scale": a_scale, "b_scale": b_scale, "bias": _aligned(bias), "residual": apart, "add": add}
    return out.copy_(product(_aligned(a), _aligned(b), room, fast_accum=fast_accum, **how))


_UNKNOWN: Any = object()


def pointers_of(
    a_scale: torch.Tensor | None, b_scale: torch.Tensor | None, bias: torch.Tensor | None = None
) -> tuple[int, ...]:
    """The addresses that a plan holds between calls; 0: none. b's is first, because b is cuBLAS's first operand."""
    return (
        0 if b_scale is None else b_scale.data_ptr(),
        0 if a_scale is None else a_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


def problem_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *how: Any) -> Problem:
    """The Problem of these operands. how: its fields from `align` on. ValueError if no GEMM computes it."""
    (m, k), n = a.shape, b.shape[0]
    (a_rows, a_ld), (b_rows, b_ld), (d_rows, d_ld) = map(_layout, (a, b, out))
    if not d_rows or b.shape[1] != k or out.shape != (m, n):
        raise ValueError(f"product of {tuple(a.shape)} and {tuple(b.shape)} into {tuple(out.shape)}, {out.stride()}")
    if out.dtype in FP8:
        raise ValueError(f"a GEMM into {NAMES[out.dtype]}: no GEMM here writes FP8; write BF16 and quantize it")
    return Problem(m, n, k, a.dtype, b.dtype, out.dtype, a_rows, b_rows, a_ld, b_ld, d_ld, *how)


def _plan(problem: Problem, device: int, pointers: tuple[int, ...]) -> Plan | None:
    """A new plan for a problem, or None if it needs aligned copies."""
    if problem.a in FP8:
        if not all(pointers[:2]):
            raise ValueError("a product of FP8 operands needs the scales of both")
        if problem.align != ALIGNMENT:
            return None
    plan = None if searched is None else searched(problem, device, pointers)
    if plan is None:
        plan = usual(problem, device, pointers)
    if on_plan is not None:
        on_plan(plan)
    return plan


def usual(problem: Problem, device: int, pointers: tuple[int, ...]) -> Plan:
    """The plan for a problem if no search has chosen one."""
    return maker_of(problem).candidates(problem, device, pointers, 1)[0]


def _aligned(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _layout(x: torch.Tensor) -> tuple[bool, int]:
    """(whether x is contiguous along its last dimension, elements from one row, or column, to the next)."""
    across, along = x.stride()
    rows, columns = x.shape
    if (along == 1 or columns == 1) and (across >= columns or rows == 1):
        return True, across if rows > 1 else columns
    if (across == 1 or rows == 1) and along >= rows:
        return False, along
    raise ValueError(f"a matrix of {rows} x {columns} with strides {across}, {along}: no GEMM reads it")


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _current_device() -> int:
    return torch._C._cuda_getDevice()
