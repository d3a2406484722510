"""Activation functions with the cast to FP8 in one pass, forward and backward, as Triton kernels.

Bytes per element:

    activate_quantize             reads 2 of h; writes 1 for each payload, rows and columns, of act(h + bias)
    activate_backward_quantize    reads 2 of dy and 2 of h; writes 1 for each payload of dh; sums dh over rows

If h is kept in RowBlocks for the backward pass, the first writes 1 more for it, but no columns; the second reads 1 of h
and writes those columns (`again`). A tile is then one block wide.

The kernels are bound by memory only if an element costs few instructions: an H200 issues about 30 of them in the time
that its memory takes for 4 bytes. Hence

- Phi(-a), a >= 0, is 2 ** P(a), P of degree 5: one special function, no branch. Against float64 the error of Phi is
  below 3.5e-7 = 2^-21.4 in float32, that of gelu and of its slope below 1.6e-6, both absolute
  (tests/gpu/test_activation_cuda.py). The slope's Gaussian is a power of two as well. tanh is 2 sigmoid(2 u) - 1.
- ex2.approx and rcp.approx are used without correction (error at most 2^-22; denormals are zeros).
- A program reads its tile as four tiles of every fourth row. The codes of four rows then make one 32-bit word in a
  register, and words instead of bytes go through shared memory for the transpose (see cast.py).

Sums over rows: a program sums over its tiles, and sums.py sums over the programs. There are no atomics.
"""

import math

import torch
import triton
import triton.language as tl

from ...numerics.blocks import BLOCK, RowBlocks
from ...numerics.formats import E4M3, Format
from ..reference_activation import GATED, shape_of
from .blocks import block_scale, scaled_to_blocks
from .cast import (
    as_type,
    by_words,
    empty_payload,
    fp8_pair,
    fp8_quad,
    larger,
    raise_amax,
    store_codes,
    tile_place,
)
from .launch import cdiv, launched
from .sums import empty_sums, summed

_BLOCK = tl.constexpr(BLOCK)
# (rows of a program's tile, columns, warps)
FORWARD, BACKWARD = (64, 128, 8), (32, 128, 4)
GATED_FORWARD, GATED_BACKWARD = (64, 128, 8), (32, 128, 8)

# log2 Phi(-a), a >= 0, highest power first: a minimax fit on [0, 6], weighted for Phi's error; it falls beyond 6.
_P5, _P4, _P3, _P2, _P1, _P0 = (
    tl.constexpr(c)
    for c in (-5.18860317e-04, 7.38721194e-03, -5.25380423e-02, -4.59276660e-01, -1.15108315e00, -1.00000084e00)
)
_LOG2E = tl.constexpr(math.log2(math.e))
_HALF_LOG2E = tl.constexpr(0.5 * math.log2(math.e))
_LOG2_DENSITY = tl.constexpr(-0.5 * math.log2(2 * math.pi))
_C2, _CUBE = tl.constexpr(2 * math.sqrt(2 / math.pi)), tl.constexpr(0.044715)


@triton.jit
def exp2(x):
    """2^x, error 2^-22; 0 below 2^-126."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x, error 1 ulp; 0 above 2^126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _share(x, KIND: tl.constexpr):
    """The factor of x in the activation's value: Phi(x), or a sigmoid."""
    if KIND == "gelu":
        a = tl.abs(x)
        tail = exp2(((((_P5 * a + _P4) * a + _P3) * a + _P2) * a + _P1) * a + _P0)
        return tl.where(x >= 0.0, 1.0 - tail, tail)
    elif KIND == "swiglu":
        return reciprocal(1.0 + exp2(-_LOG2E * x))
    else:
        return reciprocal(1.0 + exp2(x * (-_LOG2E * _C2 * _CUBE * (x * x) - _LOG2E * _C2)))


@triton.jit
def act_value(x, KIND: tl.constexpr):
    if KIND == "squared_relu":
        x = tl.where(x < 0.0, 0.0, x)  # unlike a maximum, this keeps NaN
        return x * x
    else:
        return x * _share(x, KIND)


@triton.jit
def act_value_and_slope(x, KIND: tl.constexpr):
    if KIND == "squared_relu":
        x = tl.where(x < 0.0, 0.0, x)
        return x * x, 2.0 * x
    else:
        share = _share(x, KIND)
        value = x * share
        if KIND == "gelu":
            slope = share + x * exp2(_LOG2_DENSITY - _HALF_LOG2E * (x * x))
        elif KIND == "swiglu":
            slope = share + value * (1.0 - share)
        else:
            slope = share + value * (1.0 - share) * (3.0 * _C2 * _CUBE * (x * x) + _C2)
        return value, slope


@triton.jit
def _load(h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, half: tl.constexpr, GATED: tl.constexpr):
    """h + bias as float32, of rows (R,) and columns (C,) of one half of width F (half 0 if there is no gate).

    With exponents_ptr h is blocks; it points to the exponent of the tile's block in the first row. Rows from M on
    repeat the last row, which does not change a maximum. Columns from F on are zeros.
    """
    inside = cols < F
    own = tl.minimum(rows, M - 1).to(tl.int64)
    if GATED:
        own = 2 * own + half
    x = tl.load(h_ptr + own[:, None] * F + cols[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + half * F + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if exponents_ptr is not None:
        x *= block_scale(tl.load(exponents_ptr + own * tl.cdiv(F, _BLOCK)).to(tl.int32))[:, None]
    return x


@triton.jit
def _keep(x, kept_ptr, exponents_ptr, rows, cols, M, F, half: tl.constexpr, GATED: tl.constexpr, zero):
    """Store float32 x (R, 128) as blocks, in the layout that _load reads."""
    own = rows.to(tl.int64)
    if GATED:
        own = 2 * own + half
    y, byte = scaled_to_blocks(x)
    mask = (rows < M)[:, None] & (cols < F)[None, :]
    tl.store(as_type(kept_ptr, tl.uint8) + own[:, None] * F + cols[None, :], fp8_quad(x, y, zero), mask=mask)
    tl.store(exponents_ptr + own * tl.cdiv(F, _BLOCK), byte.to(tl.uint8), mask=rows < M)


@triton.jit
def _store(x, ptr, rows, cols, M, F, first, width):
    mask = (rows < M)[:, None] & (cols < F)[None, :]
    tl.store(ptr + rows.to(tl.int64)[:, None] * width + (cols + first)[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _act(
    h_ptr, bias_ptr, exponents_ptr, kept_ptr, kept_exponents_ptr, rows, cols, M, F, zero,
    KIND: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """act(h + bias), float32. With a kept_ptr, h + bias is stored there as blocks."""
    x = _load(h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, 0, GATED)
    if kept_ptr is not None:
        _keep(x, kept_ptr, kept_exponents_ptr, rows, cols, M, F, 0, GATED, zero)
    x = act_value(x, KIND)
    if GATED:
        gated = _load(h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, 1, GATED)
        if kept_ptr is not None:
            _keep(gated, kept_ptr, kept_exponents_ptr, rows, cols, M, F, 1, GATED, zero)
        x *= gated
    return x


@triton.jit
def _act_back(
    dy_ptr, h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, KIND: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """(dh of columns `cols`, dh of columns F + `cols`, act(h + bias)), float32. The second is unused if not gated.

    For rows from M on, h repeats the last row and dy is 0. So they add 0 to a sum, or NaN to a sum that is NaN already.
    """
    there = (rows < M)[:, None] & (cols < F)[None, :]
    dy = tl.load(dy_ptr + rows.to(tl.int64)[:, None] * F + cols[None, :], mask=there, other=0.0).to(tl.float32)
    value, slope = act_value_and_slope(_load(h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, 0, GATED), KIND)
    dh, y = dy * slope, value
    if GATED:
        gated = _load(h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, 1, GATED)
        dh *= gated
        y *= gated
    return dh, dy * value, y


@launched
@triton.jit(do_not_specialize=["zero"])
def _activate_kernel(
    h_ptr, bias_ptr, exponents_ptr, M, F, kept_ptr, kept_exponents_ptr, scale_ptr, out_ptr, out_t_ptr, amax_ptr, zero,
    KIND: tl.constexpr, GATED: tl.constexpr, E4M3: tl.constexpr, WORDS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """act(h + bias) of a tile: with a scale_ptr, cast into out and out_t, if given; else stored in out.

    With exponents_ptr, h is blocks. With kept_ptr, h + bias is stored there as blocks. A tile is one block wide then.
    """
    _, quads, cols = tile_place(F, TILE_M, TILE_K)
    if exponents_ptr is not None:
        exponents_ptr += tl.program_id(0) % tl.cdiv(F, TILE_K)
    if kept_ptr is not None:
        kept_exponents_ptr += tl.program_id(0) % tl.cdiv(F, TILE_K)
    word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    for i in tl.static_range(2):
        rows = 4 * quads + 2 * i
        x_0 = _act(
            h_ptr, bias_ptr, exponents_ptr, kept_ptr, kept_exponents_ptr, rows, cols, M, F, zero, KIND, GATED
        )  # fmt: skip
        x_1 = _act(
            h_ptr, bias_ptr, exponents_ptr, kept_ptr, kept_exponents_ptr, rows + 1, cols, M, F, zero, KIND, GATED
        )  # fmt: skip
        if amax_ptr is not None:
            largest = larger(largest, x_0, x_1)
        if scale_ptr is not None:
            word |= fp8_pair(x_0, x_1, tl.load(scale_ptr), zero, E4M3) << (16 * i)
        else:
            _store(x_0, out_ptr, rows, cols, M, F, 0, F)
            _store(x_1, out_ptr, rows + 1, cols, M, F, 0, F)
    if scale_ptr is not None:
        store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, F, F, WORDS)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest)


@launched
@triton.jit(do_not_specialize=["zero"])
def _activate_backward_kernel(
    dy_ptr, h_ptr, bias_ptr, exponents_ptr, M, F, scale_ptr, out_ptr, out_t_ptr, amax_ptr, sums_ptr,
    again_scale_ptr, again_ptr, zero,
    KIND: tl.constexpr, GATED: tl.constexpr, E4M3: tl.constexpr, WORDS: tl.constexpr,
    AGAIN_E4M3: tl.constexpr, AGAIN_WORDS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """dh of TILES tiles, one below the other, stored as _activate_kernel stores act.

    With sums_ptr, the sum over these tiles' rows goes to row `tile` of sums (., width). With again_ptr, payload_t of
    act(h + bias) goes there.
    """
    tile, _, cols = tile_place(F, TILE_M * TILES, TILE_K)
    width = 2 * F if GATED else F
    if exponents_ptr is not None:
        exponents_ptr += tl.program_id(0) % tl.cdiv(F, TILE_K)
    largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    total = tl.zeros((TILE_M // 4, TILE_K), tl.float32)
    total_2 = tl.zeros((TILE_M // 4, TILE_K), tl.float32)
    for n in range(TILES):
        quads = (tile * TILES + n) * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
        word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word_2 = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        word_again = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        for i in tl.static_range(2):
            rows = 4 * quads + 2 * i
            a_0, b_0, y_0 = _act_back(dy_ptr, h_ptr, bias_ptr, exponents_ptr, rows, cols, M, F, KIND, GATED)
            a_1, b_1, y_1 = _act_back(dy_ptr, h_ptr, bias_ptr, exponents_ptr, rows + 1, cols, M, F, KIND, GATED)
            if amax_ptr is not None:
                largest = larger(largest, a_0, a_1)
                if GATED:
                    largest = larger(largest, b_0, b_1)
            if again_ptr is not None:
                word_again |= fp8_pair(y_0, y_1, tl.load(again_scale_ptr), zero, AGAIN_E4M3) << (16 * i)
            if sums_ptr is not None:
                total += a_0 + a_1
                total_2 += b_0 + b_1
            if scale_ptr is not None:
                scale = tl.load(scale_ptr)
                word |= fp8_pair(a_0, a_1, scale, zero, E4M3) << (16 * i)
                if GATED:
                    word_2 |= fp8_pair(b_0, b_1, scale, zero, E4M3) << (16 * i)
            else:
                _store(a_0, out_ptr, rows, cols, M, F, 0, width)
                _store(a_1, out_ptr, rows + 1, cols, M, F, 0, width)
                if GATED:
                    _store(b_0, out_ptr, rows, cols, M, F, F, width)
                    _store(b_1, out_ptr, rows + 1, cols, M, F, F, width)
        if scale_ptr is not None:
            store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, F, width, WORDS)
            if GATED:
                store_codes(word_2, out_ptr, out_t_ptr, quads, cols, F, M, F, width, WORDS)
        if again_ptr is not None:
            store_codes(word_again, None, again_ptr, quads, cols, 0, M, F, F, AGAIN_WORDS)
    if sums_ptr is not None:
        sums = sums_ptr + tile.to(tl.int64) * width + cols
        tl.store(sums, tl.sum(total, axis=0), mask=cols < F)
        if GATED:
            tl.store(sums + F, tl.sum(total_2, axis=0), mask=cols < F)
    if amax_ptr is not None:
        raise_amax(amax_ptr, largest)


def _operand(h: torch.Tensor | RowBlocks, bias: torch.Tensor | None, tile_k: int):
    """(h, bias, exponents) as kernel arguments."""
    if isinstance(h, RowBlocks):
        if bias is not None or tile_k != BLOCK:
            raise ValueError(f"h in blocks takes no bias (it is included) and tiles {BLOCK} wide, not {tile_k}")
        return h.payload, None, h.exponents
    if bias is not None and bias.shape != h.shape[1:]:
        raise ValueError(f"bias {tuple(bias.shape)} must have h's width {h.shape[1]}")
    return h.contiguous(), bias, None


def _gradient_shape(h: torch.Tensor | RowBlocks, kind: str) -> tuple[int, int]:
    M, F = shape_of(h, kind)
    return M, 2 * F if kind in GATED else F


def _forward(h, kind, bias, kept, out, out_t=None, scale=None, fmt=None, amax_out=None):
    M, F = shape_of(h, kind)
    tile_m, tile_k, warps = GATED_FORWARD if kind in GATED else FORWARD
    assert kept is None or tile_k == BLOCK
    keeping = (None, None) if kept is None else (kept.payload, kept.exponents)
    _activate_kernel[(cdiv(M, tile_m) * cdiv(F, tile_k),)](
        *_operand(h, bias, tile_k), M, F, *keeping, scale, out, out_t, amax_out, 0,
        KIND=kind, GATED=kind in GATED, E4M3=fmt == E4M3, WORDS=by_words(out_t, M),
        TILE_M=tile_m, TILE_K=tile_k, num_warps=warps,
    )  # fmt: skip


def _backward(dy, h, kind, bias, out, out_t=None, scale=None, fmt=None, amax_out=None, bias_grad=False, again=None):
    """Write dh, or its payloads; return the sum of dh's rows if bias_grad is True."""
    M, F = shape_of(h, kind)
    tile_m, tile_k, warps = GATED_BACKWARD if kind in GATED else BACKWARD
    again_scale, again_t = again or (None, None)
    width = _gradient_shape(h, kind)[1]
    sums, tiles = empty_sums(M, F, tile_m, tile_k, width, dy.device) if bias_grad else (None, 1)
    _activate_backward_kernel[(cdiv(M, tile_m * tiles) * cdiv(F, tile_k),)](
        dy.contiguous(), *_operand(h, bias, tile_k), M, F, scale, out, out_t, amax_out, sums,
        again_scale, again_t, 0,
        KIND=kind, GATED=kind in GATED, E4M3=fmt == E4M3, WORDS=by_words(out_t, M),
        AGAIN_E4M3=again_t is not None and again_t.dtype == E4M3.dtype, AGAIN_WORDS=by_words(again_t, M),
        TILE_M=tile_m, TILE_K=tile_k, TILES=tiles, num_warps=warps,
    )  # fmt: skip
    return None if sums is None else summed(sums, dy.dtype)


def activate(
    h: torch.Tensor, kind: str, bias: torch.Tensor | None = None, kept: RowBlocks | None = None
) -> torch.Tensor:
    """See reference_activation.activate. One pass."""
    out = h.new_empty(shape_of(h, kind))
    _forward(h, kind, bias, kept, out)
    return out


def activate_backward(
    dy: torch.Tensor, h: torch.Tensor | RowBlocks, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See reference_activation.activate_backward. One pass."""
    out = dy.new_empty(_gradient_shape(h, kind))
    _backward(dy, h, kind, bias, out)
    return out


def activate_quantize(
    h: torch.Tensor | RowBlocks,
    kind: str,
    fmt: Format,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    kept: RowBlocks | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_activation.activate_quantize. One pass; amax_out must not be negative."""
    M, F = shape_of(h, kind)
    payload = empty_payload(scale, (M, F), fmt) if rows else None
    payload_t = empty_payload(scale, (F, M), fmt) if columns else None
    _forward(h, kind, bias, kept, payload, payload_t, scale, fmt, amax_out)
    return payload, payload_t


def activate_backward_quantize(
    dy: torch.Tensor,
    h: torch.Tensor | RowBlocks,
    kind: str,
    fmt: Format,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    bias_grad: bool = False,
    again: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See reference_activation.activate_backward_quantize. One pass, and a small one over the programs' dbias."""
    shape = _gradient_shape(h, kind)
    payload = empty_payload(dy, shape, fmt) if rows else None
    payload_t = empty_payload(dy, shape[::-1], fmt) if columns else None
    dbias = _backward(dy, h, kind, bias, payload, payload_t, scale, fmt, amax_out, bias_grad, again)
    return payload, payload_t, dbias
