"""Experts' SwiGLU, times the probabilities, with its cast to FP8 in one pass, forward and backward (ops/groups.py).

Bytes per element of act (R', F):

    weighted_quantize             reads 4 of h; writes 1 for each payload of act
    weighted_backward_quantize    reads 2 of dy and 4 of h; writes 2 for each payload of dh

A pass of its own for the activation function would write 2 of act, or 4 of dh, and the cast read them again.

A tile's rows have one expert, and so one scale and one amax (groups.py here). The probability is found by the table of
sources: they stay as the router gave them, and a row of padding has none. Such a row is not read: its codes are zeros.

act and dh are rounded to h's type before they are cast, as if they had been in memory. The rounding costs an
instruction, and no code depends on whether the two passes are one.

The gradient of a probability is a sum over a row, of which a program has a tile. Each program writes its part at the
given row's place, and a small pass sums the parts in a fixed order. There are no atomics but amax's, and no program
writes what another reads.
"""

import torch
import triton
import triton.language as tl

from ...numerics.formats import E4M3, Format
from ..groups import TILE, Groups
from .activation import act_value, act_value_and_slope
from .cast import empty_payload, fp8_pair, larger, raise_amax, store_codes, tile_place
from .launch import cdiv, launched

# Rows and columns of a tile, and warps: the fastest of six on an H100, for experts of Qwen3 and of DeepSeek-V2-Lite.
FORWARD, BACKWARD = (64, 128, 8), (32, 128, 4)


@triton.jit
def _halves(h_ptr, source, rows, cols, F):
    """(h1, h2) of rows (Q,) and columns (C,), float32; zeros in padding and beyond F."""
    mask = (source >= 0)[:, None] & (cols < F)[None, :]
    at = h_ptr + rows.to(tl.int64)[:, None] * (2 * F) + cols[None, :]
    one = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return one, tl.load(at + F, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _probability(probs_ptr, source):
    """(Q, 1) float32; zeros in padding."""
    return tl.load(probs_ptr + source, mask=source >= 0, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _act(h_ptr, probs_ptr, source_ptr, rows, cols, F):
    source = tl.load(source_ptr + rows)
    one, two = _halves(h_ptr, source, rows, cols, F)
    act = act_value(one, "swiglu") * two * _probability(probs_ptr, source)
    return act.to(h_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _act_back(dy_ptr, h_ptr, probs_ptr, source_ptr, dprobs_ptr, rows, cols, F):
    """(dh of columns `cols`, dh of columns F + `cols`). This tile's part of dprobs is stored."""
    source = tl.load(source_ptr + rows)
    mask = (source >= 0)[:, None] & (cols < F)[None, :]
    given = tl.load(dy_ptr + rows.to(tl.int64)[:, None] * F + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    one, two = _halves(h_ptr, source, rows, cols, F)
    value, slope = act_value_and_slope(one, "swiglu")
    tl.store(dprobs_ptr + source, tl.sum(value * two * given, axis=1), mask=source >= 0)
    dy = given * _probability(probs_ptr, source)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    return (dy * slope * two).to(dtype).to(tl.float32), (dy * value).to(dtype).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["zero"])
def _weighted_kernel(
    h_ptr, probs_ptr, M, F, scale_ptr, first_ptr, expert_ptr, source_ptr, experts, out_ptr, out_t_ptr, amax_ptr, zero,
    E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile, quads, cols = tile_place(F, TILE_M, TILE_K)
    group = tile * TILE_M // GROUP
    if group < tl.load(first_ptr + experts):
        expert = tl.load(expert_ptr + group)
        scale = tl.load(scale_ptr + expert)
        largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(2):
            x_0 = _act(h_ptr, probs_ptr, source_ptr, 4 * quads + 2 * i, cols, F)
            x_1 = _act(h_ptr, probs_ptr, source_ptr, 4 * quads + 2 * i + 1, cols, F)
            if amax_ptr is not None:
                largest = larger(largest, x_0, x_1)
            word |= fp8_pair(x_0, x_1, scale, zero, E4M3) << (16 * i)
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, F, F, True)
        if amax_ptr is not None:
            raise_amax(amax_ptr + expert, largest)


@launched
@triton.jit(do_not_specialize=["zero"])
def _weighted_backward_kernel(
    dy_ptr, h_ptr, probs_ptr, M, F, scale_ptr, first_ptr, expert_ptr, source_ptr, experts, out_ptr, out_t_ptr,
    amax_ptr, dprobs_ptr, R, zero,
    E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The parts of dprobs go to dprobs (tiles of columns, R)."""
    tile, quads, cols = tile_place(F, TILE_M, TILE_K)
    group = tile * TILE_M // GROUP
    if group < tl.load(first_ptr + experts):
        expert = tl.load(expert_ptr + group)
        scale = tl.load(scale_ptr + expert)
        parts_ptr = dprobs_ptr + (tl.program_id(0) % tl.cdiv(F, TILE_K)).to(tl.int64) * R
        largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word_2 = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(2):
            rows = 4 * quads + 2 * i
            a_0, b_0 = _act_back(dy_ptr, h_ptr, probs_ptr, source_ptr, parts_ptr, rows, cols, F)
            a_1, b_1 = _act_back(dy_ptr, h_ptr, probs_ptr, source_ptr, parts_ptr, rows + 1, cols, F)
            if amax_ptr is not None:
                largest = larger(larger(largest, a_0, a_1), b_0, b_1)
            word |= fp8_pair(a_0, a_1, scale, zero, E4M3) << (16 * i)
            word_2 |= fp8_pair(b_0, b_1, scale, zero, E4M3) << (16 * i)
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, F, 2 * F, True)
        store_codes(word_2, out_ptr, out_t_ptr, quads, cols, F, M, F, 2 * F, True)
        if amax_ptr is not None:
            raise_amax(amax_ptr + expert, largest)


def _tables(groups: Groups) -> tuple:
    return groups.first, groups.expert, groups.source, groups.counts.numel()


def weighted_quantize(
    h: torch.Tensor,
    probs: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_weighted.weighted_quantize. One pass; amax_out must not be negative."""
    M, F = groups.rows, h.shape[1] // 2
    payload = empty_payload(h, (M, F), fmt) if rows else None
    payload_t = empty_payload(h, (F, M), fmt) if columns else None
    tile_m, tile_k, warps = FORWARD
    _weighted_kernel[(M // tile_m * cdiv(F, tile_k),)](
        h.contiguous(), probs.contiguous(), M, F, scale, *_tables(groups), payload, payload_t, amax_out, 0,
        E4M3=fmt == E4M3, TILE_M=tile_m, TILE_K=tile_k, GROUP=TILE, num_warps=warps,
    )  # fmt: skip
    return payload, payload_t


def weighted_backward_quantize(
    dy: torch.Tensor,
    h: torch.Tensor,
    probs: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    dprobs: torch.Tensor,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_weighted.weighted_backward_quantize. One pass, and a small one over the programs' parts of dprobs;
    amax_out must not be negative."""
    M, F = groups.rows, h.shape[1] // 2
    payload = empty_payload(h, (M, 2 * F), fmt) if rows else None
    payload_t = empty_payload(h, (2 * F, M), fmt) if columns else None
    tile_m, tile_k, warps = BACKWARD
    tiles, given = cdiv(F, tile_k), probs.numel()
    make = torch.zeros if groups.bound else torch.empty  # then some given rows are nowhere
    parts = make(tiles, given, dtype=torch.float32, device=h.device)
    _weighted_backward_kernel[(M // tile_m * tiles,)](
        dy.contiguous(), h.contiguous(), probs.contiguous(), M, F, scale, *_tables(groups), payload, payload_t,
        amax_out, parts, given, 0,
        E4M3=fmt == E4M3, TILE_M=tile_m, TILE_K=tile_k, GROUP=TILE, num_warps=warps,
    )  # fmt: skip
    torch.sum(parts, 0, out=dprobs)
    return payload, payload_t
