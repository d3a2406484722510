"""The products of several experts at once, for rows that lie in one matrix (ops/groups.py).

    rows    Y (R', N)     = X (R', K)  W_e (N, K)^T        forward, dgrad: each expert's rows by its own weight
    sums    dW_e (N, K)   = dY_e^T X_e                     wgrad: over an expert's rows; zeros if it has none

Three ways. Each takes a product if it can, or leaves it to the next:

    CUTLASS    one launch (csrc/grouped.cuh), if the library serves: --fp8-gemm-backend auto or cutlass, on Hopper
    Triton     one launch (grouped_triton.py), on any GPU that multiplies FP8; only Hopper has run it
    the loop   one GEMM an expert, of its rows padded to a multiple of 16, on any backend (interface.py), and on the CPU

The first two read the counts on the device, so the host waits for nothing. The loop needs them on the host.

On the CPU the results are those of experts that run one after the other, bit for bit; on Hopper with CUTLASS they are
those of our dense kernels (tests/gpu/test_grouped_cuda.py). What lies in rows of padding is zero or undefined, and
beyond the last tile undefined.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..numerics.scaled import ScaledTensor
from ..ops.groups import Groups, Made
from . import plans
from .cutlass import CUTLASS, GroupedKernel
from .cutlass_build import GroupedArgs
from .interface import Epilogue, gemm, serving

MULTIPLE = 16  # of an FP8 GEMM's sides, and of the bytes where a matrix begins
PROMOTE = 128  # Triton's partial sums of gradients

type Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of a, b and the result


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Rows of several experts in FP8, each expert's with its scale: as ScaledTensor, but for padded rows.

    payload (R', K) or None; columns (K, R') or None; scale_inv (E,) float32. again: the rows that were cast, and their
    scale, with which they can be cast again.
    """

    groups: Groups
    scale_inv: torch.Tensor
    payload: torch.Tensor | None
    columns: torch.Tensor | None
    again: tuple[Made, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class GroupedWeights:
    """Each expert's weight in FP8: payload (E, N, K), each contiguous, and scale_inv (E,) float32, contiguous."""

    payload: torch.Tensor
    scale_inv: torch.Tensor

    @staticmethod
    def of(each: Sequence[ScaledTensor]) -> "GroupedWeights":
        """Weights (N, K): as they lie in memory if that has them at equal distances; else a copy."""
        scale_inv = torch.stack([weight.scale_inv for weight in each])
        return GroupedWeights(together([weight.payload for weight in each]), scale_inv)

    @property
    def each(self) -> list[ScaledTensor]:
        """One by one."""
        return [ScaledTensor(*one) for one in zip(self.payload, _apart(self.scale_inv), strict=True)]


def rows(a: GroupedTensor, weights: GroupedWeights, out: torch.Tensor, *, fast_accum: bool = False) -> torch.Tensor:
    """Write each expert's rows of a (R', K) by its weight (N, K) to out (R', N), and return it.

    Rows beyond the last tile are not written, nor does the loop write rows of padding beyond a multiple of 16.
    """
    if not out.is_cuda or not (_cutlass_rows(a, weights, out, fast_accum) or _triton_rows(a, weights, out, fast_accum)):
        loop_rows(a, weights, out, fast_accum)
    return out


def sums(
    dy: GroupedTensor, x: GroupedTensor, into: Sequence[torch.Tensor] | torch.Tensor, *, accumulate: bool = False
) -> None:
    """Write or add dW_e to each of `into` (N, K), of dy (R', N) and x (R', K), both by their columns.

    into: one tensor (E, N, K) spares the host the work of E.
    """
    d = None
    if dy.scale_inv.is_cuda:
        d = into if isinstance(into, torch.Tensor) else spaced(into)
    if d is None or not (_cutlass_sums(dy, x, d, accumulate) or _triton_sums(dy, x, d, accumulate)):
        loop_sums(dy, x, into, accumulate)


# ---- CUTLASS ---------------------------------------------------------------------------------------------------------


def _cutlass_rows(a: GroupedTensor, weights: GroupedWeights, out: torch.Tensor, fast_accum: bool) -> bool:
    """Whether there is a kernel for it; if not, nothing is done. The same for all below."""
    assert a.payload is not None
    b = weights.payload
    (_, n, k), types = b.shape, (a.payload.dtype, b.dtype, out.dtype)
    kernel = _kernel(types, n, sums=False, fast_accum=fast_accum)
    if kernel is None or not _whole(a.payload, b, out):
        return False
    operands = {"a": a.payload, "b": b, "scale_a": a.scale_inv, "scale_b": weights.scale_inv, "d": out}
    _launch(kernel, a.groups, operands, m=a.groups.rows, n=n, k=k, step_b=b.stride(0), step_d=0, accumulate=0)
    return True


def _cutlass_sums(dy: GroupedTensor, x: GroupedTensor, d: torch.Tensor, accumulate: bool) -> bool:
    assert dy.columns is not None and x.columns is not None
    (m, k), n = dy.columns.shape, x.columns.shape[0]
    kernel = _kernel((dy.columns.dtype, x.columns.dtype, d.dtype), n, sums=True, fast_accum=False)
    if kernel is None or not _whole(dy.columns, x.columns, d):
        return False
    operands = {"a": dy.columns, "b": x.columns, "scale_a": dy.scale_inv, "scale_b": x.scale_inv, "d": d}
    sizes = {"m": m, "n": n, "k": k, "step_b": 0, "step_d": d.stride(0)}
    _launch(kernel, dy.groups, operands, **sizes, accumulate=int(accumulate))
    return True


def _kernel(types: Types, n: int, *, sums: bool, fast_accum: bool) -> GroupedKernel | None:
    if serving("cuda").name not in ("auto", "cutlass"):
        return None
    return CUTLASS.grouped_kernel(*types, n, sums=sums, fast_accum=fast_accum)


def _launch(kernel: GroupedKernel, groups: Groups, operands: dict[str, torch.Tensor], **sizes: int) -> None:
    tensors = operands | {"first": groups.first, "expert": groups.expert}
    device, experts = groups.first.get_device(), groups.counts.numel()
    at = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    args = GroupedArgs(**at, **sizes, device=device, stream=plans._stream(device), experts=experts)
    CUTLASS.run_grouped(kernel, args)


# ---- Triton ----------------------------------------------------------------------------------------------------------


def _triton_rows(a: GroupedTensor, weights: GroupedWeights, out: torch.Tensor, fast_accum: bool) -> bool:
    assert a.payload is not None
    if not _whole(a.payload, weights.payload, out):
        return False
    from . import grouped_triton

    scales = a.scale_inv, weights.scale_inv
    grouped_triton.rows(a.payload, weights.payload, out, *scales, a.groups, promote=0 if fast_accum else PROMOTE)
    return True


def _triton_sums(dy: GroupedTensor, x: GroupedTensor, d: torch.Tensor, accumulate: bool) -> bool:
    assert dy.columns is not None and x.columns is not None
    if not _whole(dy.columns, x.columns, d):
        return False
    from . import grouped_triton

    operands = dy.columns, x.columns, d, dy.scale_inv, x.scale_inv, dy.groups
    grouped_triton.sums(*operands, add=accumulate, promote=PROMOTE)
    return True


def _whole(*matrices: torch.Tensor) -> bool:
    """Whether TMA can read and write them: all begin, as do their rows, at a multiple of 16 bytes."""
    return all(
        x.data_ptr() % MULTIPLE == 0 and x.shape[-1] % MULTIPLE == 0
        and all(step * x.itemsize % MULTIPLE == 0 for step in x.stride()[:-1]) for x in matrices
    )  # fmt: skip


# ---- The loop --------------------------------------------------------------------------------------------------------


def loop_rows(a: GroupedTensor, weights: GroupedWeights, out: torch.Tensor, fast_accum: bool) -> None:
    """`rows` by one GEMM an expert."""
    assert a.payload is not None
    for part, scale_inv, weight in zip(_parts(a.groups), _apart(a.scale_inv), weights.each, strict=True):
        if part.start < part.stop:
            gemm(ScaledTensor(a.payload[part], scale_inv), weight, Epilogue(into=out[part]), fast_accum=fast_accum)


def loop_sums(
    dy: GroupedTensor, x: GroupedTensor, into: Sequence[torch.Tensor] | torch.Tensor, accumulate: bool
) -> None:
    """`sums` by one GEMM an expert."""
    assert dy.columns is not None and x.columns is not None
    scales = zip(_apart(dy.scale_inv), _apart(x.scale_inv), strict=True)
    for part, (scale_dy, scale_x), place in zip(_parts(dy.groups), scales, into, strict=True):
        if part.start < part.stop:
            a, b = dy.columns[:, part].contiguous(), x.columns[:, part].contiguous()
            gemm(ScaledTensor(a, scale_dy), ScaledTensor(b, scale_x), Epilogue(into=place, accumulate=accumulate))
        elif not accumulate:
            place.zero_()


def _parts(groups: Groups) -> list[slice]:
    """Each expert's rows, up to a multiple of 16."""
    counts = (part.stop - part.start for part in groups.parts)
    padded = (-(-count // MULTIPLE) * MULTIPLE for count in counts)
    return [slice(part.start, part.start + count) for part, count in zip(groups.parts, padded, strict=True)]


def _apart(scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each scale, at a multiple of 16 bytes, as cuBLASLt wants it."""
    return torch.nn.functional.pad(scales[:, None], (0, 3))[:, 0].unbind()


def together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors (N, K) as one (E, N, K), where they lie if that can be; else a copy."""
    lying = spaced(tensors)
    return torch.stack(list(tensors)) if lying is None else lying


def spaced(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors (N, K) as one (E, N, K), if they lie in one memory at equal distances; else None."""
    first, at = tensors[0], [tensor.data_ptr() for tensor in tensors]
    step = at[1] - at[0] if len(at) > 1 else first.nbytes
    if step < first.nbytes or any(at[0] + i * step != place for i, place in enumerate(at)):
        return None
    memory = first.untyped_storage()
    if at[-1] + first.nbytes > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance, in memory of their own
    n, k = first.shape
    return first.as_strided((len(at), n, k), (step // first.itemsize, k, 1))
