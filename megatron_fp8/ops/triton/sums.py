"""Sums over rows that programs have each summed a part of: the second stage of a bias's or a norm's gradient.

A program of the first stage goes through some rows and writes their sum in float32; here they are added, in order. So
no atomic has a say in what a gradient is. Where it goes through tiles (cast.py, activation.py), it takes several.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched

# 256 parts of 4096 columns take 7 us, of 32 columns a program 11, torch's sum and cast 16 (H200).
ROWS, COLUMNS = 64, 16
FEWEST_PROGRAMS = 512  # of the first stage, if there are as many tiles


@launched
@triton.jit
def _parts_sum_kernel(
    parts_ptr, P, first_ptr, second_ptr, K: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sums over P of parts (n, P, K), the first to first (K,), the second, if there is one, to second, or with ADD
    added to them."""
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
    tl.store(out, found.to(first_ptr.dtype.element_ty), mask=cols < K)


def empty_sums(M: int, K: int, tile_m: int, tile_k: int, width: int, device) -> tuple[torch.Tensor, int]:
    """(1, programs down, width) float32 for sums of programs of tiles over (M, K), and how many tiles one goes down:
    more make fewer sums, in programs and of programs, but leave fewer programs to fill a GPU."""
    down, across = cdiv(M, tile_m), cdiv(K, tile_k)
    tiles = next(n for n in (8, 4, 2, 1) if n == 1 or down // n * across >= FEWEST_PROGRAMS)
    return torch.empty(1, cdiv(down, tiles), width, dtype=torch.float32, device=device), tiles


def summed(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(K,) of parts (1, P, K) float32."""
    out = torch.empty(parts.shape[-1], dtype=dtype, device=parts.device)
    sum_parts(parts, out)
    return out


def sum_parts(parts: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None, add: bool = False) -> None:
    """first (K,) and, if it is given, second become the sums over P of parts (1 or 2, P, K) float32, rounded once; or,
    with `add`, have them added. Both are of one type."""
    n, p, k = parts.shape
    _parts_sum_kernel[(cdiv(k, COLUMNS), n)](parts, p, first, second, K=k, ADD=add, ROWS=ROWS, COLUMNS=COLUMNS)
