"""Grouped GEMMs in Triton, with the operands and tables of grouped.cuh: persistent blocks, no wait for counts.

    rows   D (R, N)    = A (R, K) B_e (N, K)^T       forward, dgrad
    sums   D_e (M, N)  = A (M, R) B (N, R)^T         wgrad

A block takes every SMS-th tile, along N first. Operands are read by TMA, whose descriptors the host makes once.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP_TILE = 128
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def rows_kernel(
    a, b, d, scale_a, scale_b, first, expert, experts, N, K,
    STEP_A: tl.constexpr, STEP_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SMS: tl.constexpr, PROMOTE: tl.constexpr, OUT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.load(first + experts) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, SMS, flatten=FLATTEN):
        m = tile // tiles_n
        n = tile % tiles_n
        e = tl.load(expert + m)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            x = a.load([m * BM, k])
            w = b.load([e * N + n * BN, k])
            sums = tl.dot(x, w.T, sums, max_num_imprecise_acc=PROMOTE)
        scale = tl.load(scale_a + e * STEP_A) * tl.load(scale_b + e * STEP_B)
        d.store([m * BM, n * BN], (sums * scale).to(OUT))


@triton.jit
def sums_kernel(
    a, b, d, scale_a, scale_b, first, experts, M, N,
    STEP_A: tl.constexpr, STEP_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SMS: tl.constexpr, PROMOTE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    tiles = experts * tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, SMS):
        e = tile // (tiles_m * tiles_n)
        m = tile // tiles_n % tiles_m
        n = tile % tiles_n
        begin = tl.load(first + e) * BK
        end = tl.load(first + e + 1) * BK
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(begin, end, BK):
            x = a.load([m * BM, k])
            w = b.load([n * BN, k])
            sums = tl.dot(x, w.T, sums, max_num_imprecise_acc=PROMOTE)
        scale = tl.load(scale_a + e * STEP_A) * tl.load(scale_b + e * STEP_B)
        d.store([e * M + m * BM, n * BN], (sums * scale).to(OUT))


def _described(t: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t.view(-1, t.shape[-1]), [rows, columns])


def rows(a, b, d, scale_a, scale_b, first, expert, tile, promote=0, sms=132, warps=8, stages=3, flatten=False):
    """The call, ready to launch. a (R, K), b (E, N, K), d (R, N)."""
    (bm, bn), (experts, n, k) = tile, b.shape
    assert bm == GROUP_TILE
    at = _described(a, bm, 128), _described(b, bn, 128), _described(d, bm, bn)
    steps = {"STEP_A": int(scale_a.numel() > 1), "STEP_B": int(scale_b.numel() > 1)}
    how = {"BM": bm, "BN": bn, "BK": 128, "SMS": sms, "PROMOTE": promote or None, "OUT": TYPES[d.dtype]}
    how |= {"FLATTEN": flatten, "num_warps": warps, "num_stages": stages}
    return lambda: rows_kernel[(sms,)](*at, scale_a, scale_b, first, expert, experts, n, k, **steps, **how)


def sums(a, b, d, scale_a, scale_b, first, tile, promote=0, sms=132, warps=8, stages=3):
    """The call, ready to launch. a (M, R), b (N, R), d (E, M, N); M a multiple of the tile's."""
    (bm, bn), (experts, m, n) = tile, d.shape
    if m % bm:
        raise ValueError(f"{m} rows are no multiple of the tile's {bm}: a tile would write into the next expert")
    at = _described(a, bm, 128), _described(b, bn, 128), _described(d, bm, bn)
    steps = {"STEP_A": int(scale_a.numel() > 1), "STEP_B": int(scale_b.numel() > 1)}
    how = {"BM": bm, "BN": bn, "BK": 128, "SMS": sms, "PROMOTE": promote or None, "OUT": TYPES[d.dtype]}
    how |= {"num_warps": warps, "num_stages": stages}
    return lambda: sums_kernel[(sms,)](*at, scale_a, scale_b, first, experts, m, n, **steps, **how)
