"""Sums of experts' results as a Triton kernel: each token's k rows, which lie anywhere among the padded ones.

    y (R', K) ──┬─ row table[t, 0] ─┐
                ├─ ...              ├─ added in float32 ──► out[t]
                └─ row table[t, k-1] ─┘

Stock leaves the padding out first, and then adds the rows up by atomics, in BF16: each of k sums is rounded, in an
order that changes from run to run. Here no padded row is copied, and there are no atomics: a program has all rows of
one token. The same kernel adds up the gradients of x's rows, since each row of x was read k times.

Bytes per element of the given rows (R, K), with n bytes a value: reads n, and writes n / k. Cut and atomics together
read and write at least 3 n, and read and write the sums k times in the cache.

All k loads of a thread are under way at once, 16 bytes each. Agreement with reference_combine.py: bit for bit, except
for the payload of NaN.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched, next_power_of_2

BLOCK = 2048  # columns that a program has, at most
A_WARP = 256  # columns: 16 bytes of BF16 a thread


@launched
@triton.jit
def _combine_kernel(rows_ptr, table_ptr, out_ptr, K, TOP: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP):
        row = tl.load(table_ptr + token * TOP + i).to(tl.int64)
        mask = (cols < K) & (row >= 0)
        total += tl.load(rows_ptr + row * K + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * K + cols, total.to(out_ptr.dtype.element_ty), mask=cols < K)


def combine(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See reference_combine.combine. One pass."""
    (tokens, top), width = table.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    block = min(BLOCK, next_power_of_2(width))
    how = {"TOP": top, "BLOCK": block, "num_warps": max(block // A_WARP, 1)}
    if tokens:
        _combine_kernel[(tokens, cdiv(width, block))](rows.contiguous(), table.contiguous(), out, width, **how)
    return out
