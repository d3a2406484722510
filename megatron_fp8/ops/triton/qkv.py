"""Triton kernels that split the QKV GEMM's output, with its rotary embedding, and join the gradients; one pass each.

Bytes per element:

    split     with one group, or one head a group: 2 + 2 of q and k, in place (0 without rotation)
              else 2 + 2 of q, k and v
    join      2 read; 2 written, or 1 for each payload

A program takes ROWS tokens and HEADS heads, one after the other. It keeps cos and sin of its tokens in registers,
because reading them for every head would move more bytes than the heads. A head's rotated numbers are pairs,
ROWS x d/2; its other numbers are a tile of their own. Interleaved pairs are loaded and stored as vectors and separated
in registers. Loading each number by itself, with a stride of two, is slower: a split took 2314 us instead of 140, a
join in FP8 3241 us instead of 284 (the sizes below). Blocks are powers of two with masks, so a head may have any size.

There are three joins. Without rotation, a join in FP8 with columns is a cast of tiles, each inside a head; it is
cast.py's, and as fast. If whole heads are rotated, a program rotates two such tiles against each other: the head's
halves, or its even and odd columns. It takes 246 us for 201 M elements in heads of 128 on an H200; variants took 290
(four or eight heads a program), 333 (the general kernel), and 225 (one table for both numbers of a pair; but a caller
may give two). The general kernel does all other cases.

In place, no thread may read an element that another has written. One thread reads and writes a pair, because a tile has
more pairs than the program has threads. Interleaved pairs may change threads, but only after a barrier.

The cast to FP8 is cast.py's, of the float32 gradient. Products and sums are rounded by themselves, as in the reference
(enable_fp_fusion=False). A program's largest magnitude goes to amax in one integer atomic, so the programs' order does
not matter. Offsets that include a row are 64-bit.
Agreement with reference_qkv.py: bit for bit, except for the sign and payload of NaN.
"""

import torch
import triton
import triton.language as tl

from ...numerics.formats import E4M3, Format
from .cast import (
    TILE_K,
    TILE_M,
    TILE_WARPS,
    as_type,
    by_words,
    fp8_code,
    fp8_pair,
    larger,
    magnitude_bits,
    raise_amax,
    store_codes,
    tile_place,
)
from .launch import cdiv, launched, next_power_of_2

PAIRS, HEADS, WARPS = 1024, 8, 4  # pairs in a tile, the most heads a program, warps a program
COLUMN_ROWS, COLUMN_WARPS = 32, 8  # with a transposed payload, which is written in runs of ROWS bytes
TURN_M, TURN_WARPS = 32, 2  # rows of a tile, and warps for heads up to 128
NARROWEST = 16  # columns of the narrowest tile for which cast.py's way is faster


@triton.jit
def _load_pairs(places, wanted, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(first, second) number, (ROWS, BLOCK) each, of the pairs in the D numbers from the pointers `places` (ROWS,) on.

    Rows that are not `wanted` (ROWS,) are 0.
    """
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK)
        x = tl.load(places[:, None] + i[None, :], mask=wanted[:, None] & (i < D)[None, :], other=0.0)
        first, second = tl.split(tl.reshape(x, (places.shape[0], BLOCK, 2)))
    else:
        i = tl.arange(0, BLOCK)
        mask = wanted[:, None] & (i < D // 2)[None, :]
        first = tl.load(places[:, None] + i[None, :], mask=mask, other=0.0)
        second = tl.load(places[:, None] + (D // 2 + i)[None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def _together(first, second):
    """Interleave first and second (ROWS, BLOCK) again: (ROWS, 2 * BLOCK)."""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _store_pairs(places, first, second, wanted, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of _load_pairs."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK)
        mask = wanted[:, None] & (i < D)[None, :]
        tl.store(places[:, None] + i[None, :], _together(first, second), mask=mask)
    else:
        i = tl.arange(0, BLOCK)
        mask = wanted[:, None] & (i < D // 2)[None, :]
        tl.store(places[:, None] + i[None, :], first, mask=mask)
        tl.store(places[:, None] + (D // 2 + i)[None, :], second, mask=mask)


@launched
@triton.jit
def _qkv_split_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, batch, M, groups,
    R: tl.constexpr, HN: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Without q_ptr: rotate the query and key heads of x in place.

    With it: write all heads to q (M, groups * R * HN), k and v (M, groups * KV), with q and k rotated. KV: from a head
    of k or v to the next.
    """
    TURNED: tl.constexpr = R + 1
    TAKEN: tl.constexpr = TURNED if q_ptr is None else R + 2
    chunks = groups * TAKEN // HEADS
    rows = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    x_rows = rows * groups * ((R + 2) * HN)
    if D > 0:
        cos_1, cos_2 = _load_pairs(cos_ptr + rows // batch * D, inside, D, BLOCK, INTERLEAVED)
        sin_1, sin_2 = _load_pairs(sin_ptr + rows // batch * D, inside, D, BLOCK, INTERLEAVED)
    for i in range(HEADS):
        t = tl.program_id(0) % chunks * HEADS + i
        group, slot = t // TAKEN, t % TAKEN
        source = x_ptr + (group * (R + 2) + slot) * HN + x_rows
        if q_ptr is None:
            target = source
        else:
            is_q, is_k = slot < R, slot == R
            head = tl.where(is_q, q_ptr + (group * R + slot) * HN, tl.where(is_k, k_ptr, v_ptr) + group * KV)
            target = head + tl.where(is_q, rows * groups * (R * HN), rows * groups * KV)
        if D > 0:
            x_1, x_2 = _load_pairs(source, inside, D, BLOCK, INTERLEAVED)
            x_1, x_2 = x_1.to(tl.float32), x_2.to(tl.float32)
            y_1 = tl.where(slot < TURNED, x_1 * cos_1 - x_2 * sin_1, x_1).to(x_ptr.dtype.element_ty)
            y_2 = tl.where(slot < TURNED, x_2 * cos_2 + x_1 * sin_2, x_2).to(x_ptr.dtype.element_ty)
            _store_pairs(target, y_1, y_2, inside, D, BLOCK, INTERLEAVED)
        if q_ptr is not None and D < HN:
            tail = (D + tl.arange(0, TAIL))[None, :]
            tail_mask = inside[:, None] & (tail < HN)
            tl.store(target[:, None] + tail, tl.load(source[:, None] + tail, mask=tail_mask), mask=tail_mask)


@triton.jit
def _write(
    y, rows, inside, cols, cols_inside, M, width, scale_ptr, out_ptr, out_t_ptr, zero, E4M3: tl.constexpr
):  # fmt: skip
    """Store float32 y (ROWS, BLOCK) in out (M, width) and out_t, if given, cast to out's type, or to FP8 with a
    scale_ptr."""
    if scale_ptr is None:
        tile = y.to(out_ptr.dtype.element_ty)
    else:
        tile = fp8_code(y, y * tl.load(scale_ptr), zero, E4M3)
        if out_ptr is not None:
            out_ptr = as_type(out_ptr, tl.uint8)
        if out_t_ptr is not None:
            out_t_ptr = as_type(out_t_ptr, tl.uint8)
    if out_ptr is not None:
        mask = inside[:, None] & cols_inside[None, :]
        tl.store(out_ptr + (rows * width)[:, None] + cols[None, :], tile, mask=mask)
    if out_t_ptr is not None:
        mask_t = cols_inside[:, None] & inside[None, :]
        tl.store(out_t_ptr + (cols.to(tl.int64) * M)[:, None] + rows[None, :], tl.trans(tile), mask=mask_t)


@triton.jit
def _head(
    t, q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, R: tl.constexpr
):  # fmt: skip
    """(pointer, stride of s, stride of b, whether it is rotated) of head t of the joined gradient."""
    group, slot = t // (R + 2), t % (R + 2)
    is_q, is_k = slot < R, slot == R
    kv = tl.where(is_k, k_ptr + group.to(tl.int64) * k_h, v_ptr + group.to(tl.int64) * v_h)
    head = tl.where(is_q, q_ptr + (group * R + slot).to(tl.int64) * q_h, kv)
    s_stride, b_stride = tl.where(is_q, q_s, tl.where(is_k, k_s, v_s)), tl.where(is_q, q_b, tl.where(is_k, k_b, v_b))
    return head, s_stride, b_stride, is_q | is_k


@launched
@triton.jit(do_not_specialize=["zero"])
def _qkv_join_kernel(
    q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, cos_ptr, sin_ptr, batch, M, groups,
    scale_ptr, out_ptr, out_t_ptr, amax_ptr, zero,
    R: tl.constexpr, HN: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, E4M3: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Join q, k and v, given with strides, into out (M, groups * (R + 2) * HN) and out_t; in FP8 with a scale_ptr."""
    width = groups * ((R + 2) * HN)
    chunks = groups * (R + 2) // HEADS
    rows = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    s, b = rows // batch, rows % batch
    if D > 0:
        cos_1, cos_2 = _load_pairs(cos_ptr + s * D, inside, D, BLOCK, INTERLEAVED)
        sin_1, sin_2 = _load_pairs(sin_ptr + s * D, inside, D, BLOCK, INTERLEAVED)
        largest = tl.zeros((ROWS, BLOCK), tl.int32)
    if D < HN:
        tail = D + tl.arange(0, TAIL)
        tail_mask = inside[:, None] & (tail < HN)[None, :]
        tail_largest = tl.zeros((ROWS, TAIL), tl.int32)
    for n in range(HEADS):
        t = tl.program_id(0) % chunks * HEADS + n
        head, s_stride, b_stride, turned = _head(t, q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, R)
        source = head + s * s_stride + b * b_stride
        if D > 0:
            y_1, y_2 = _load_pairs(source, inside, D, BLOCK, INTERLEAVED)
            y_1, y_2 = y_1.to(tl.float32), y_2.to(tl.float32)
            x_1 = tl.where(turned, y_1 * cos_1 + y_2 * sin_2, y_1)
            x_2 = tl.where(turned, y_2 * cos_2 - y_1 * sin_1, y_2)
            if INTERLEAVED:
                i = tl.arange(0, 2 * BLOCK)
                x = _together(x_1, x_2)
                _write(
                    x, rows, inside, t * HN + i, i < D, M, width, scale_ptr, out_ptr, out_t_ptr, zero, E4M3
                )  # fmt: skip
            else:
                i = tl.arange(0, BLOCK)
                _write(
                    x_1, rows, inside, t * HN + i, i < D // 2, M, width, scale_ptr, out_ptr, out_t_ptr, zero, E4M3
                )  # fmt: skip
                i_2 = t * HN + D // 2 + i
                _write(
                    x_2, rows, inside, i_2, i < D // 2, M, width, scale_ptr, out_ptr, out_t_ptr, zero, E4M3
                )  # fmt: skip
            if amax_ptr is not None:
                largest = larger(largest, x_1, x_2)
        if D < HN:
            x = tl.load(source[:, None] + tail[None, :], mask=tail_mask, other=0.0).to(tl.float32)
            _write(
                x, rows, inside, t * HN + tail, tail < HN, M, width, scale_ptr, out_ptr, out_t_ptr, zero, E4M3
            )  # fmt: skip
            if amax_ptr is not None:
                tail_largest = tl.maximum(tail_largest, magnitude_bits(x))
    if amax_ptr is not None:
        if D > 0:
            raise_amax(amax_ptr, largest)
        if D < HN:
            raise_amax(amax_ptr, tail_largest)


@triton.jit
def _load(columns, s_stride, b_stride, batch, rows, M):
    """float32 (rows, columns) of a head. columns (1, N): pointers; rows: tokens s * batch + b. 0 for rows from M on."""
    places = (rows // batch).to(tl.int64) * s_stride + (rows % batch).to(tl.int64) * b_stride
    return tl.load(columns + places[:, None], mask=(rows < M)[:, None], other=0.0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["zero"])
def _qkv_cast_kernel(
    q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, batch, M, groups,
    scale_ptr, out_ptr, out_t_ptr, amax_ptr, zero,
    R: tl.constexpr, HN: tl.constexpr, E4M3: tl.constexpr, WORDS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """_qkv_join_kernel in FP8 without rotation, with cast.py's tiles. A tile lies in one head."""
    width = groups * ((R + 2) * HN)
    _, quads, cols = tile_place(width, TILE_M, TILE_K)
    t = tl.program_id(0) % (width // TILE_K) * TILE_K // HN
    head, s_stride, b_stride, _ = _head(t, q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, R)
    within = tl.multiple_of(cols - t * HN, TILE_K)[None, :]
    word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    for i in tl.static_range(2):
        rows = 4 * quads + 2 * i
        x_0 = _load(head + within, s_stride, b_stride, batch, rows, M)
        x_1 = _load(head + within, s_stride, b_stride, batch, rows + 1, M)
        if amax_ptr is not None:
            largest = larger(largest, x_0, x_1)
        word |= fp8_pair(x_0, x_1, tl.load(scale_ptr), zero, E4M3) << (16 * i)
    store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, width, width, WORDS)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest)


@triton.jit
def _load_turned(
    head, s_stride, b_stride, cos_ptr, sin_ptr, batch, rows, turned, M, HN: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """_load_pairs of a head's gradient as float32, rotated back if the head is `turned`."""
    HALF: tl.constexpr = HN // 2
    inside, s = rows < M, rows // batch
    places = head + s.to(tl.int64) * s_stride + (rows % batch).to(tl.int64) * b_stride
    y_1, y_2 = _load_pairs(places, inside, HN, HALF, INTERLEAVED)
    y_1, y_2 = y_1.to(tl.float32), y_2.to(tl.float32)
    cos_1, cos_2 = _load_pairs(cos_ptr + s * HN, inside & turned, HN, HALF, INTERLEAVED)
    sin_1, sin_2 = _load_pairs(sin_ptr + s * HN, inside & turned, HN, HALF, INTERLEAVED)
    return tl.where(turned, y_1 * cos_1 + y_2 * sin_2, y_1), tl.where(turned, y_2 * cos_2 - y_1 * sin_1, y_2)


@launched
@triton.jit(do_not_specialize=["zero"])
def _qkv_turn_kernel(
    q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, cos_ptr, sin_ptr, batch, M, groups,
    scale_ptr, out_ptr, out_t_ptr, amax_ptr, zero,
    R: tl.constexpr, HN: tl.constexpr, INTERLEAVED: tl.constexpr, E4M3: tl.constexpr, WORDS: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """_qkv_join_kernel in FP8 if whole heads are rotated: cast.py's tile for each half of a head, or for the whole head
    if interleaved."""
    heads = groups * (R + 2)
    quads = tl.program_id(0) // heads * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    t = tl.program_id(0) % heads
    head, s_stride, b_stride, turned = _head(t, q_ptr, q_s, q_b, q_h, k_ptr, k_s, k_b, k_h, v_ptr, v_s, v_b, v_h, R)
    word_1 = tl.zeros((TILE_M // 4, HN // 2), tl.int32)
    word_2 = tl.zeros((TILE_M // 4, HN // 2), tl.int32)
    largest = tl.zeros((TILE_M // 4, HN // 2), tl.int32)
    for two in tl.static_range(2):
        rows = 4 * quads + 2 * two
        x_0, y_0 = _load_turned(
            head, s_stride, b_stride, cos_ptr, sin_ptr, batch, rows, turned, M, HN, INTERLEAVED
        )  # fmt: skip
        x_1, y_1 = _load_turned(
            head, s_stride, b_stride, cos_ptr, sin_ptr, batch, rows + 1, turned, M, HN, INTERLEAVED
        )  # fmt: skip
        if amax_ptr is not None:
            largest = larger(largest, x_0, x_1)
            largest = larger(largest, y_0, y_1)
        word_1 |= fp8_pair(x_0, x_1, tl.load(scale_ptr), zero, E4M3) << (16 * two)
        word_2 |= fp8_pair(y_0, y_1, tl.load(scale_ptr), zero, E4M3) << (16 * two)
    width = heads * HN
    if INTERLEAVED:
        word, i = _together(word_1, word_2), t * HN + tl.arange(0, HN)
        store_codes(word, out_ptr, out_t_ptr, quads, i, 0, M, width, width, WORDS)
    else:
        i = t * HN + tl.arange(0, HN // 2)
        store_codes(word_1, out_ptr, out_t_ptr, quads, i, 0, M, width, width, WORDS)
        store_codes(word_2, out_ptr, out_t_ptr, quads, HN // 2 + i, 0, M, width, width, WORDS)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest)


def _cut(heads: int, d: int, rest: int, transposed: bool = False) -> dict[str, int]:
    """Kernel constants and num_warps for `heads` heads, each of d rotated numbers and `rest` others."""
    block, tail = next_power_of_2(max(d // 2, 1)), next_power_of_2(max(rest, 1))
    pairs = max(block, tail // 2)  # a row of the wider tile holds so many
    rows = max(PAIRS // pairs, COLUMN_ROWS if transposed else 1)
    warps = WARPS if rows * pairs <= PAIRS else COLUMN_WARPS
    at_once = max(n for n in range(1, HEADS + 1) if heads % n == 0)
    return {"D": d, "BLOCK": block, "TAIL": tail, "ROWS": rows, "HEADS": at_once, "num_warps": warps}


def split_qkv(
    mixed: torch.Tensor,
    groups: int,
    heads_per_group: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    paired: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See reference_qkv.split_qkv. One pass, or none if there is nothing to do."""
    s, b, width = mixed.shape
    r = heads_per_group
    hn, d = width // (groups * (r + 2)), 0 if cos is None else cos.shape[-1]
    in_place = 1 in (groups, r)
    if in_place:
        # The views of mixed.view(s, b, groups, r + 2, hn).split([r, 1, 1], dim=3), in three ATen calls instead of ten.
        first, (*rows, unit) = mixed.storage_offset(), mixed.stride()
        head, group = hn * unit, (r + 2) * hn * unit
        q = mixed.as_strided((s, b, groups * r, hn), (*rows, group if r == 1 else head, unit), first)
        k, v = (mixed.as_strided((s, b, groups, hn), (*rows, group, unit), first + at * head) for at in (r, r + 1))
        outputs, taken, rest = (None, None, None), groups * (r + 1), 0
    else:
        q = mixed.new_empty(s, b, groups * r, hn)
        if paired:
            k, v = mixed.new_empty(s, b, groups, 2 * hn).split(hn, 3)
        else:
            k, v = (mixed.new_empty(s, b, groups, hn) for _ in range(2))
        outputs, taken, rest = (q, k, v), groups * (r + 2), hn - d
    if d or not in_place:
        cut = _cut(taken, d, rest)
        grid = (cdiv(s * b, cut["ROWS"]) * taken // cut["HEADS"],)
        _qkv_split_kernel[grid](
            mixed, *outputs, cos, sin, b, s * b, groups,
            R=r, HN=hn, KV=k.stride(2), INTERLEAVED=interleaved, **cut, enable_fp_fusion=False,
        )  # fmt: skip
    if d and in_place:  # autograd does not see the kernel's write; this makes it reject uses of the old values
        torch.autograd.graph.increment_version(mixed)
    return q, k, v


def _strided(x: torch.Tensor) -> tuple:
    """A tensor (s, b, heads, hn) and its first three strides; copied if hn's stride is not 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, *x.stride()[:3]


def join_qkv(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    fmt: Format | None = None,
    scale: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_qkv.join_qkv. One pass; amax_out must not be negative."""
    s, b, heads, hn = dq.shape
    groups = dk.shape[2]
    r = heads // groups
    M, width = s * b, groups * (r + 2) * hn
    dtype, device = dq.dtype if fmt is None else fmt.dtype, dq.device
    out = torch.empty(M, width, dtype=dtype, device=device) if rows else None
    out_t = torch.empty(width, M, dtype=dtype, device=device) if columns else None
    given = [part for x in (dq, dk, dv) for part in _strided(x)]
    d = 0 if cos is None else cos.shape[-1]
    tile_k = min(hn & -hn, TILE_K)  # the largest power of two in a head
    if columns and d == 0 and tile_k >= NARROWEST:
        _qkv_cast_kernel[(cdiv(M, TILE_M) * (width // tile_k),)](
            *given, b, M, groups, scale, out, out_t, amax_out, 0,
            R=r, HN=hn, E4M3=fmt == E4M3, WORDS=by_words(out_t, M), TILE_M=TILE_M, TILE_K=tile_k, num_warps=TILE_WARPS,
        )  # fmt: skip
        return out, out_t
    if columns and d == hn == next_power_of_2(hn) >= 2 * NARROWEST:
        _qkv_turn_kernel[(cdiv(M, TURN_M) * groups * (r + 2),)](
            *given, cos, sin, b, M, groups, scale, out, out_t, amax_out, 0,
            R=r, HN=hn, INTERLEAVED=interleaved, E4M3=fmt == E4M3, WORDS=by_words(out_t, M), TILE_M=TURN_M,
            num_warps=TURN_WARPS * max(hn // 128, 1), enable_fp_fusion=False,
        )  # fmt: skip
        return out, out_t
    cut = _cut(groups * (r + 2), d, hn - d, columns)
    grid = (cdiv(M, cut["ROWS"]) * groups * (r + 2) // cut["HEADS"],)
    _qkv_join_kernel[grid](
        *given, cos, sin, b, M, groups, scale, out, out_t, amax_out, 0,
        R=r, HN=hn, INTERLEAVED=interleaved, E4M3=fmt == E4M3, **cut, enable_fp_fusion=False,
    )  # fmt: skip
    return out if fmt is None else (out, out_t)
