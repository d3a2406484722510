"""Triton kernel that merges attention over two sets of keys in one pass.

A program has ROWS whole rows of one head, with their logarithms, so that it may overwrite what it has read.  To merge
two BF16 results it moves 6 bytes an element; torch's element-wise operations move 22.

Agreement with reference_attention.py: FP32 arithmetic, in which exp and log differ by some units in the last place.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched, next_power_of_2

ROWS, WARPS = 32, 4


@launched
@triton.jit
def _attention_merge_kernel(
    into_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, S, H, D, start, first,
    into_s, into_b, into_h, out_s, out_b, out_h, part_s, part_b, part_h,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)  # of all b * H
    rows = start + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    there, merges = rows < S, (rows < S) & (rows >= first)
    mine, other = lse_ptr + head.to(tl.int64) * S + rows, part_lse_ptr + head.to(tl.int64) * (S - first) + rows - first
    a = tl.load(mine, mask=there, other=0.0)
    b = tl.load(other, mask=merges, other=float("-inf"))
    # There are more threads than rows: several hold a row's logarithm. All of them read it before one overwrites it.
    tl.debug_barrier()
    most = tl.maximum(a, b)
    whole = most + tl.log(tl.exp(a - most) + tl.exp(b - most))
    tl.store(mine, whole, mask=merges)
    old, new = tl.exp(a - whole)[:, None], tl.exp(b - whole)[:, None]
    batch, rows_64 = head // H, rows.to(tl.int64)[:, None]
    here, theirs = there[:, None] & (columns < D)[None], merges[:, None] & (columns < D)[None]
    out_at = out_ptr + rows_64 * out_s + batch * out_b + head % H * out_h + columns[None]
    part_at = part_ptr + (rows_64 - first) * part_s + batch * part_b + head % H * part_h + columns[None]
    into_at = into_ptr + rows_64 * into_s + batch * into_b + head % H * into_h + columns[None]
    x = tl.load(out_at, mask=here, other=0.0).to(tl.float32)
    y = tl.load(part_at, mask=theirs, other=0.0).to(tl.float32)
    tl.store(into_at, (x * old + y * new).to(into_ptr.dtype.element_ty), mask=here)


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See reference_attention.merge_attention."""
    s, b, h, d = out.shape
    keeps = out.dtype == dtype and out.is_contiguous()
    into = out if keeps else torch.empty(out.shape, dtype=dtype, device=out.device)
    first = s - len(part)
    start = first if keeps else 0
    out, part = (t if t.stride(-1) == 1 else t.contiguous() for t in (out, part))
    strides = [stride for t in (into, out, part) for stride in t.stride()[:3]]
    grid = cdiv(s - start, ROWS), b * h
    _attention_merge_kernel[grid](
        into, out, lse, part, part_lse.contiguous(), s, h, d, start, first, *strides,
        ROWS=ROWS, WIDTH=next_power_of_2(d), num_warps=WARPS,
    )  # fmt: skip
    return into
