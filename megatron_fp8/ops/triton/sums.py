"""The second stage of a sum over rows, for the gradients of a bias or a norm's weight: sums over the programs.

In the first stage each program writes the float32 sum of its rows. The second stage adds these, in order, so the
gradient does not depend on the order of atomics. In cast.py and activation.py a program sums several tiles.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched

# 256 parts of 4096 columns take 7 us; 11 us with 32 columns a program; 16 us with torch's sum and cast (H200).
ROWS, COLUMNS = 64, 16
FEWEST_PROGRAMS = 512  # the first stage has at least so many programs, if there are as many tiles


@launched
@triton.jit
def _parts_sum_kernel(
    parts_ptr, P, first_ptr, second_ptr, K: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum parts (n, P, K) over P, and store the result in first (K,) and, if n is 2, second (K,). ADD: add to them."""
    which = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < P)[:, None] & (cols < K)[None, :]
        total += tl.load(parts_ptr + (which * P + rows)[:, None] * K + cols[None, :], mask=mask, other=0.0)
    out = first_ptr + cols
    if second_ptr is not None:
        out = tl.where(which == 0, first_ptr, second_ptr) + cols
    found = tl.sum(total, 0)
    if ADD:
        found += tl.load(out, mask=cols < K, other=0.0).to(tl.float32)
        tl.debug_barrier()  # several threads read a column, and one writes it
    tl.store(out, found.to(first_ptr.dtype.element_ty), mask=cols < K)


def empty_sums(M: int, K: int, tile_m: int, tile_k: int, width: int, device) -> tuple[torch.Tensor, int]:
    """(an uninitialised (1, programs, width) float32 for the programs' sums, the number of tiles a program sums).

    The first stage covers (M, K) with tiles, and a program takes several, one below the other. More tiles a program
    mean fewer sums to store and add, but also fewer programs to fill the GPU.
    """
    down, across = cdiv(M, tile_m), cdiv(K, tile_k)
    tiles = next(n for n in (8, 4, 2, 1) if n == 1 or down // n * across >= FEWEST_PROGRAMS)
    return torch.empty(1, cdiv(down, tiles), width, dtype=torch.float32, device=device), tiles


def summed(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum (K,) over P of parts (1, P, K) float32, rounded to `dtype`."""
    out = torch.empty(parts.shape[-1], dtype=dtype, device=parts.device)
    sum_parts(parts, out)
    return out


def sum_parts(parts: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None, add: bool = False) -> None:
    """Sum parts (1 or 2, P, K) float32 over P and write the sums, rounded once, to first (K,) and second (K,) if given.

    add: add the sums to first and second instead. Both have one type.
    """
    n, p, k = parts.shape
    _parts_sum_kernel[(cdiv(k, COLUMNS), n)](parts, p, first, second, K=k, ADD=add, ROWS=ROWS, COLUMNS=COLUMNS)
