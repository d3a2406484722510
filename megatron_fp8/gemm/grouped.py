"""The products of several experts at once, for rows that lie in one matrix (ops/groups.py).

    rows    Y (R', N)     = X (R', K)  W_e (N, K)^T        forward, dgrad: each expert's rows by its own weight
    sums    dW_e (N, K)   = dY_e^T X_e                     wgrad: over an expert's rows; zeros if it has none

Each is one GEMM an expert, of its rows padded to a multiple of 16, on any backend (interface.py), so the host has to
know the counts. On the CPU the results are those of experts that run one after the other, bit for bit. There is no
kernel for all experts yet; docs/performance.md says what was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..numerics.scaled import ScaledTensor
from ..ops.groups import Groups
from .interface import Epilogue, gemm

MULTIPLE = 16  # of an FP8 GEMM's sides


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Rows of several experts in FP8, each expert's with its scale: as ScaledTensor, but for padded rows.

    payload (R', K) or None; columns (K, R') or None; scale_inv (E,) float32.
    """

    groups: Groups
    scale_inv: torch.Tensor
    payload: torch.Tensor | None
    columns: torch.Tensor | None


def rows(
    a: GroupedTensor, weights: Sequence[ScaledTensor], out: torch.Tensor, *, fast_accum: bool = False
) -> torch.Tensor:
    """Write each expert's rows of a (R', K) by its weight (N, K) to out (R', N), and return it.

    Rows of padding beyond a multiple of 16, and beyond the last tile, are not written.
    """
    assert a.payload is not None
    for part, scale_inv, weight in zip(_parts(a.groups), _apart(a.scale_inv), weights, strict=True):
        if part.start < part.stop:
            gemm(ScaledTensor(a.payload[part], scale_inv), weight, Epilogue(into=out[part]), fast_accum=fast_accum)
    return out


def sums(dy: GroupedTensor, x: GroupedTensor, into: Sequence[torch.Tensor], *, accumulate: bool = False) -> None:
    """Write or add dW_e to each of `into` (N, K), of dy (R', N) and x (R', K), both by their columns."""
    assert dy.columns is not None and x.columns is not None
    scales = zip(_apart(dy.scale_inv), _apart(x.scale_inv), strict=True)
    for part, (scale_dy, scale_x), place in zip(_parts(dy.groups), scales, into, strict=True):
        if part.start < part.stop:
            a, b = (t.columns[:, part].contiguous() for t in (dy, x) if t.columns is not None)
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


def spaced(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors (N, K) as one (E, N, K), if they lie in one memory at equal distances; else None."""
    first, at = tensors[0], [tensor.data_ptr() for tensor in tensors]
    step = at[1] - at[0] if len(at) > 1 else first.nbytes
    if step < first.nbytes or any(at[0] + i * step != place for i, place in enumerate(at)):
        return None
    if at[-1] + first.nbytes > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None  # neighbours by chance, in memory of their own
    n, k = first.shape
    return first.as_strided((len(at), n, k), (step // first.itemsize, k, 1))
