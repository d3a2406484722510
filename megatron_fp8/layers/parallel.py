"""Products whose rows come from the other tensor-parallel ranks, or go to them: GEMMs of own rows hide the transfer.

    gathered   rows of T ranks -> y      gather    [ ........ ]
                                         GEMM      [ own rows ] [ the others' rows ]
    summed     y -> the sum over T       GEMM      [ the others' rows ] [ own rows ]
                                         exchange                       [ ........ ] [ + ]

Both need only the right order of two GEMMs, because a rank has its own rows before the others', and needs its own rows
last.  A GEMM over a T-th of the rows takes several times longer than the gather of the others over NVLink.  If it would
be short (SPLIT_FROM), the rows stay in one piece.

torch's fused_all_gather_scaled_matmul and fused_scaled_matmul_reduce_scatter do the same with T pieces over symmetric
memory. They use torch's _scaled_mm only: without the algorithms that are chosen here, biases, or FP8 sums.
"""

import torch

from .. import gemm
from ..comm import tensor
from ..comm.wire import Flight
from ..numerics.scaled import ScaledTensor

SPLIT_FROM = 1 << 35  # multiplications of a T-th of the product: 50 us of an H200


def gathered_product(
    q: ScaledTensor, arriving: Flight, group, w: ScaledTensor, epilogue: gemm.Epilogue, fast_accum: bool = False
) -> tuple[torch.Tensor, ScaledTensor]:
    """y (T M, N) = x w^T for x's rows on all ranks, and all rows (T M, K) of q(x).

    q: this rank's rows (M, K); arriving: the gather of all ranks' rows, under way; w (N, K); epilogue: for each row of
    y.
    """
    (m, k), n, ranks, rank = q.payload.shape, w.payload.shape[0], group.size(), group.rank()
    if not _splits(m, n, k):
        rows = ScaledTensor(arriving.land(), q.scale_inv)
        return gemm.gemm(rows, w, epilogue, fast_accum=fast_accum), rows
    whole = ranks * m
    y = torch.empty(whole, n, dtype=epilogue.dtype, device=q.payload.device)
    own, after = rank * m, (rank + 1) * m

    def multiply(part: torch.Tensor, out: torch.Tensor) -> None:
        into = gemm.Epilogue(epilogue.dtype, epilogue.bias, None, out)
        gemm.gemm(ScaledTensor(part, q.scale_inv), w, into, fast_accum=fast_accum)

    multiply(q.payload, y[own:after])
    rows = arriving.land()
    if own:
        multiply(rows[:own], y[:own])
    if after < whole:
        multiply(rows[after:], y[after:])
    return y, ScaledTensor(rows, q.scale_inv)


def summed_product(
    q: ScaledTensor, w: ScaledTensor, group, dtype: torch.dtype, scatter: bool, fp8: bool
) -> torch.Tensor:
    """The sum of q w^T (M, N) over the ranks in a forward pass; with `scatter`, only this rank's rows (M/T, N)."""
    (m, k), n, ranks, rank = q.payload.shape, w.payload.shape[0], group.size(), group.rank()
    m //= ranks
    if not (scatter and _splits(m, n, k)):
        y = gemm.gemm(q, w, gemm.plain(dtype), fast_accum=True)
        return Flight(tensor.add(y, group, scatter, fp8)).land()

    others = torch.empty(ranks - 1, m, n, dtype=dtype, device=q.payload.device)
    room = torch.empty(1 if fp8 else ranks, m, n, dtype=dtype, device=q.payload.device)
    own, after = rank * m, (rank + 1) * m

    def multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
        gemm.gemm(ScaledTensor(rows, q.scale_inv), w, gemm.Epilogue(dtype, None, None, out), fast_accum=True)

    flat = others.view(-1, n)
    if own:
        multiply(q.payload[:own], flat[:own])
    if after < ranks * m:
        multiply(q.payload[after:], flat[own:])
    arriving = Flight(tensor.add_early(others, room, group, fp8))
    multiply(q.payload[own:after], room[-1])
    return arriving.land()


def _splits(m: int, n: int, k: int) -> bool:
    """Whether products of m rows are worth a GEMM of their own."""
    return m % 16 == 0 and m * n * k >= SPLIT_FROM
