"""The casts of several experts' rows to FP8 (ops/groups.py) as Triton kernels.

    quantize_groups    padding, cast, transpose and amax at once
    quantize_routed    rows gathered and cast, before they are sent to their experts
    spread_groups      padding and transpose of rows that came in FP8

In the first a program casts 64 rows of one tile of 128, so all its rows have one expert's scale and amax. It finds a
row of x by the table of sources: rows that are given without padding are spread by the same loads, and padding is not
read at all. A program beyond the last tile ends at once. How codes are made, transposed and stored: cast.py.

In the second, one program has one row: it belongs to one expert, so its amax is one atomic at most.

Bytes an element: 2 of x, 1 of codes and of each payload. Agreement with reference_groups.py: bit for bit, except for
the payload of NaN.
"""

import torch
import triton
import triton.language as tl

from ...numerics.formats import E4M3, Format
from ..groups import TILE, Groups
from . import cast
from .cast import (
    as_type,
    empty_payload,
    fp8_code,
    fp8_pair,
    larger,
    magnitude_bits,
    raise_amax,
    store_codes,
    tile_place,
)
from .launch import cdiv, launched, next_power_of_2

ROW = 2048  # columns that a program has at once


@triton.jit
def _load_given(x_ptr, source_ptr, rows, cols, K, GIVEN: tl.constexpr):
    source = tl.load(source_ptr + rows)
    mask = (source >= 0)[:, None] & (cols < K)[None, :]
    at = source if GIVEN else rows
    return tl.load(x_ptr + at.to(tl.int64)[:, None] * K + cols[None, :], mask=mask, other=0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["zero"])
def _groups_kernel(
    x_ptr, M, K, scale_ptr, first_ptr, expert_ptr, source_ptr, experts, out_ptr, out_t_ptr, amax_ptr, zero,
    E4M3: tl.constexpr, GIVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, quads, cols = tile_place(K, TILE_M, TILE_K)
    group = tile * TILE_M // GROUP
    if group < tl.load(first_ptr + experts):
        expert = tl.load(expert_ptr + group)
        scale = tl.load(scale_ptr + expert)
        largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(2):
            x_0 = _load_given(x_ptr, source_ptr, 4 * quads + 2 * i, cols, K, GIVEN)
            x_1 = _load_given(x_ptr, source_ptr, 4 * quads + 2 * i + 1, cols, K, GIVEN)
            if amax_ptr is not None:
                largest = larger(largest, x_0, x_1)
            word |= fp8_pair(x_0, x_1, scale, zero, E4M3) << (16 * i)
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, K, K, True)
        if amax_ptr is not None:
            raise_amax(amax_ptr + expert, largest)


@launched
@triton.jit(do_not_specialize=["zero"])
def _quantize_routed_kernel(
    x_ptr, K, source_ptr, expert_ptr, scale_ptr, out_ptr, amax_ptr, zero, E4M3: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + row)
    scale = tl.load(scale_ptr + expert)
    x_ptr += tl.load(source_ptr + row) * K
    out_ptr = as_type(out_ptr, tl.uint8) + row * K
    largest = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, K, BLOCK):
        cols = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < K, other=0).to(tl.float32)
        tl.store(out_ptr + cols, fp8_code(x, x * scale, zero, E4M3), mask=cols < K)
        largest = tl.maximum(largest, magnitude_bits(x))
    if amax_ptr is not None:
        raise_amax(amax_ptr + expert, largest)


@launched
@triton.jit
def _spread_groups_kernel(
    codes_ptr, M, K, first_ptr, source_ptr, experts, out_ptr, out_t_ptr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, quads, cols = tile_place(K, TILE_M, TILE_K)
    codes_ptr = as_type(codes_ptr, tl.uint8)
    if tile * TILE_M // GROUP < tl.load(first_ptr + experts):
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(4):
            source = tl.load(source_ptr + 4 * quads + i)
            mask = (source >= 0)[:, None] & (cols < K)[None, :]
            codes = tl.load(codes_ptr + source.to(tl.int64)[:, None] * K + cols[None, :], mask=mask, other=0)
            word |= codes.to(tl.int32) << (8 * i)
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, K, K, True)


@launched
@triton.jit
def _transpose_kernel(x_ptr, M, K, step, out_t_ptr, WORDS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """out_t = x^T of FP8 matrices (M, K), `step` bytes from one to the next, one for each program along y."""
    number = tl.program_id(1).to(tl.int64)
    x_ptr = as_type(x_ptr, tl.uint8) + number * step
    _, quads, cols = tile_place(K, TILE_M, TILE_K)
    word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    for i in tl.static_range(4):
        rows = 4 * quads + i
        mask = (rows < M)[:, None] & (cols < K)[None, :]
        codes = tl.load(x_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=mask, other=0)
        word |= codes.to(tl.int32) << (8 * i)
    store_codes(word, None, as_type(out_t_ptr, tl.uint8) + number * M * K, quads, cols, 0, M, K, K, WORDS)


def transpose_each(payloads: torch.Tensor, out: torch.Tensor) -> None:
    """See reference_groups.transpose_each. One pass; `out` must be contiguous."""
    count, M, K = payloads.shape
    grid = (cdiv(M, cast.TILE_M) * cdiv(K, cast.TILE_K), count)
    tiles = {"TILE_M": cast.TILE_M, "TILE_K": cast.TILE_K}
    words = cast.by_words(out, M)
    _transpose_kernel[grid](payloads, M, K, payloads.stride(0), out, WORDS=words, **tiles, num_warps=cast.TILE_WARPS)


def quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_groups.quantize_groups. One pass; amax_out must not be negative."""
    x, M, K = x.contiguous(), groups.rows, x.shape[1]
    payload = empty_payload(x, (M, K), fmt) if rows else None
    payload_t = empty_payload(x, (K, M), fmt) if columns else None
    tables = groups.first, groups.expert, groups.source, groups.counts.numel()
    _groups_kernel[(M // cast.TILE_M * cdiv(K, cast.TILE_K),)](
        x, M, K, scale, *tables, payload, payload_t, amax_out, 0, E4M3=fmt == E4M3, GIVEN=x.shape[0] != M,
        TILE_M=cast.TILE_M, TILE_K=cast.TILE_K, GROUP=TILE, num_warps=cast.TILE_WARPS,
    )  # fmt: skip
    return payload, payload_t


def quantize_routed(
    x: torch.Tensor,
    source: torch.Tensor,
    expert: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference_groups.quantize_routed. One pass; amax_out must not be negative."""
    x, rows, K = x.contiguous(), source.numel(), x.shape[1]
    payload = empty_payload(x, (rows, K), fmt)
    if rows:
        how = {"E4M3": fmt == E4M3, "BLOCK": min(ROW, next_power_of_2(K))}
        _quantize_routed_kernel[(rows,)](x, K, source, expert, scale, payload, amax_out, 0, **how)
    return payload


def spread_groups(
    codes: torch.Tensor, groups: Groups, *, rows: bool, columns: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_groups.spread_groups. One pass."""
    codes, M, K = codes.contiguous(), groups.rows, codes.shape[1]
    payload = codes.new_empty(M, K) if rows else None
    payload_t = codes.new_empty(K, M) if columns else None
    _spread_groups_kernel[(M // cast.TILE_M * cdiv(K, cast.TILE_K),)](
        codes, M, K, groups.first, groups.source, groups.counts.numel(), payload, payload_t,
        TILE_M=cast.TILE_M, TILE_K=cast.TILE_K, GROUP=TILE, num_warps=cast.TILE_WARPS,
    )  # fmt: skip
    return payload, payload_t
