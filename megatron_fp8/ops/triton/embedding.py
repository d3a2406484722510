"""Triton kernels for the gradient of an embedding table: add values to their rows in a fixed order, without atomics.

The n row numbers are sorted (stably, in some microseconds), so equal ones become neighbours: a run. The sorted places
are cut into chunks of CHUNK. One program for each chunk and BLOCK columns steps through its places and sums each run:

    a run inside the chunk              is added to its row at once; no other program writes that row
    a run across chunks                 leaves partial sums in `parts`: the tail of the chunk where it begins, and the
                                        head of each chunk where it continues

A second kernel, with one program for each chunk, sums the parts of the run that begins as that chunk's tail. So a row
that half of all tokens share (padding, or the tokens masked in a vocabulary shard) takes no more than CHUNK steps, and
then one for each chunk.

Agreement with reference_embedding.py: except for the order of the sum over chunks.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched

CHUNK, BLOCK, WARPS = 32, 512, 4


@triton.jit
def _add(at, total, mask):
    now = tl.load(at, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(at, now.to(at.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _embedding_runs_kernel(
    into_ptr, rows_ptr, order_ptr, values_ptr, parts_ptr, n, V, K,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < K
    first = chunk * CHUNK
    row = tl.load(rows_ptr + first)
    goes_on = (chunk > 0) & (tl.load(rows_ptr + first - 1, mask=chunk > 0, other=-1) == row)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHUNK):
        place = first + i
        there = place < n
        row = tl.load(rows_ptr + place, mask=there, other=-1)
        after = tl.load(rows_ptr + place + 1, mask=place + 1 < n, other=-2)
        source = tl.load(order_ptr + place, mask=there, other=0).to(tl.int64)
        total += tl.load(values_ptr + source * K + columns, mask=mask & there, other=0.0).to(tl.float32)
        ends = there & (after != row)
        tl.store(parts_ptr + chunk * 2 * K + columns, total, mask=mask & ends & goes_on)  # the head
        known = (row >= 0) & (row < V)
        at = into_ptr + tl.where(known, row, 0).to(tl.int64) * K + columns
        here = mask & ends & (goes_on == 0) & known
        _add(at, total, here)
        total = tl.where(ends, 0.0, total)
        goes_on = goes_on & (ends == 0)
    last = first + CHUNK - 1
    after = tl.load(rows_ptr + last + 1, mask=last + 1 < n, other=-2)
    open_ = (last + 1 < n) & (row == after)
    part = tl.where(goes_on, 0, 1)
    tl.store(parts_ptr + (chunk * 2 + part) * K + columns, total, mask=mask & open_)


@launched
@triton.jit
def _embedding_joins_kernel(
    into_ptr, rows_ptr, parts_ptr, n, V, K, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """If a run begins in this chunk and continues in the next, sum its parts and add them to its row."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < K
    first, end = chunk * CHUNK, (chunk + 1) * CHUNK
    row = tl.load(rows_ptr + end - 1, mask=end < n, other=-1)
    open_ = (end < n) & (tl.load(rows_ptr + end, mask=end < n, other=-2) == row)
    whole = tl.load(rows_ptr + first) == row
    before = tl.load(rows_ptr + first - 1, mask=chunk > 0, other=-3)
    begins = (whole == 0) | (before != row)
    if open_ & begins & (row >= 0) & (row < V):
        total = tl.load(parts_ptr + (chunk * 2 + 1) * K + columns, mask=mask, other=0.0)
        other = chunk + 1
        while other < chunks:
            total += tl.load(parts_ptr + other * 2 * K + columns, mask=mask, other=0.0)
            stop = (other + 1) * CHUNK
            more = (stop < n) & (tl.load(rows_ptr + stop, mask=stop < n, other=-2) == row)
            other = tl.where(more, other + 1, chunks)
        at = into_ptr + row.to(tl.int64) * K + columns
        _add(at, total, mask)


def add_rows(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """See reference_embedding.add_rows. `into` must be contiguous."""
    n, k = values.shape
    if not n:
        return
    ordered, order = rows.sort(stable=True)
    values = values.contiguous()
    chunks = cdiv(n, CHUNK)
    parts = values.new_empty(chunks, 2, k, dtype=torch.float32)
    grid = chunks, cdiv(k, BLOCK)
    how = {"CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": WARPS}
    _embedding_runs_kernel[grid](into, ordered, order, values, parts, n, into.shape[0], k, **how)
    _embedding_joins_kernel[grid](into, ordered, parts, n, into.shape[0], k, chunks, **how)
