"""Triton kernels for cross-entropy: one read of the logits forward, one read and one write backward, no FP32 in memory.

Bytes per element of BF16 logits:

    forward    2      backward   2 + 2, or 2 for a row with dloss 0, which is not read

A program takes one row. Rows are many (8,192, while an H200 runs 1,320 programs at once) and long; splitting them would
only add a pass that combines the parts. Each lane keeps its own running maximum and sum of e^(x - maximum) (Milakov and
Gimelshein's online softmax, arXiv 1805.02867), and takes GROUPS values at a time. The sum is rescaled once for these,
so an element costs 1 + 1/GROUPS exponentials, and no warp waits for another before the row ends. A lane that has seen
only minus infinity keeps the sum 0. The lanes combine in a fixed order, without atomics.

A vocabulary that is no multiple of 8 (of 4 in FP32) is read element by element, which is slower. Megatron pads to 128.
Row offsets are 64-bit.
Agreement with reference_cross_entropy.py: maximum, predicted logit and zeros bit for bit; sums, probabilities and
losses within 1e-5 of the larger of themselves and 1 (approximate exponentials, another order).
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched

LANES, GROUPS, STATISTICS_WARPS = 1024, 4, 4  # a thread has eight neighbouring lanes and loads 16 bytes of BF16
BLOCK, GRADIENT_WARPS = 2048, 4
LOSS_BLOCK = 256


@launched
@triton.jit
def _cross_entropy_statistics_kernel(
    logits_ptr, target_ptr, out_ptr, rows, first, COLUMNS: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """One row of out (3, rows)."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * COLUMNS
    offsets = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, COLUMNS, GROUPS * LANES):
        inside = start + offsets < COLUMNS
        x = tl.load(x_ptr + start + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[None, :]), axis=0)
        largest = larger
    top = tl.max(largest, axis=0)
    total = tl.sum(total * tl.exp(largest - tl.where(top == -float("inf"), 0.0, top)), axis=0)
    column = tl.load(target_ptr + row) - first
    predicted = tl.load(x_ptr + column, mask=(column >= 0) & (column < COLUMNS), other=0.0)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + rows + row, total)
    tl.store(out_ptr + 2 * rows + row, predicted.to(tl.float32))


@launched
@triton.jit
def _cross_entropy_loss_kernel(
    statistics_ptr, target_ptr, loss_ptr, normalizer_ptr, rows, vocabulary, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK rows; statistics (RANKS, 3, rows)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for rank in range(RANKS):
        top = tl.maximum(top, tl.load(statistics_ptr + 3 * rank * rows + row, mask=inside, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    predicted = tl.zeros((BLOCK,), tl.float32)
    for rank in range(RANKS):
        largest_ptr = statistics_ptr + 3 * rank * rows + row
        largest = tl.load(largest_ptr, mask=inside, other=0.0)
        total += tl.load(largest_ptr + rows, mask=inside, other=1.0) * tl.exp(largest - top)
        predicted += tl.load(largest_ptr + 2 * rows, mask=inside, other=0.0)
    target = tl.load(target_ptr + row, mask=inside, other=0)
    below = tl.where((target >= 0) & (target < vocabulary), predicted - top, 0.0)
    tl.store(loss_ptr + row, tl.log(total) - below, mask=inside)
    tl.store(normalizer_ptr + row, top, mask=inside)
    tl.store(normalizer_ptr + rows + row, total, mask=inside)


@launched
@triton.jit
def _cross_entropy_gradient_kernel(
    logits_ptr, target_ptr, normalizer_ptr, dloss_ptr, out_ptr, rows, first,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. A thread reads an element before it writes it, so out may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, dx_ptr = logits_ptr + row * COLUMNS, out_ptr + row * COLUMNS
    offsets = tl.arange(0, BLOCK)
    dloss = tl.load(dloss_ptr + row)
    if dloss == 0:
        for start in range(0, COLUMNS, BLOCK):
            zeros = tl.zeros((BLOCK,), dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + start + offsets, zeros, mask=start + offsets < COLUMNS)
    else:
        top = tl.load(normalizer_ptr + row)
        inverse = 1.0 / tl.load(normalizer_ptr + rows + row)
        column = tl.load(target_ptr + row) - first
        column = tl.where((column >= 0) & (column < COLUMNS), column, -1).to(tl.int32)
        for start in range(0, COLUMNS, BLOCK):
            inside = start + offsets < COLUMNS
            x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(x - top) * inverse
            dx = tl.where(start + offsets == column, p - 1.0, p) * dloss
            tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def cross_entropy_statistics(logits: torch.Tensor, target: torch.Tensor, first: int) -> torch.Tensor:
    """See reference_cross_entropy.cross_entropy_statistics. One read."""
    rows, columns = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _cross_entropy_statistics_kernel[(rows,)](
        logits, target, out, rows, first, COLUMNS=columns, LANES=LANES, GROUPS=GROUPS, num_warps=STATISTICS_WARPS
    )
    return out


def cross_entropy_loss(
    statistics: torch.Tensor, target: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference_cross_entropy.cross_entropy_loss. One launch."""
    ranks, _, rows = statistics.shape
    loss, normalizer = statistics.new_empty(rows), statistics.new_empty(2, rows)
    _cross_entropy_loss_kernel[(cdiv(rows, LOSS_BLOCK),)](
        statistics, target, loss, normalizer, rows, vocabulary, RANKS=ranks, BLOCK=LOSS_BLOCK
    )
    return loss, normalizer


def cross_entropy_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    first: int,
    normalizer: torch.Tensor,
    dloss: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See reference_cross_entropy.cross_entropy_gradient. One read and one write."""
    rows, columns = logits.shape
    _cross_entropy_gradient_kernel[(rows,)](
        logits, target, normalizer, dloss, out, rows, first, COLUMNS=columns, BLOCK=BLOCK, num_warps=GRADIENT_WARPS
    )
