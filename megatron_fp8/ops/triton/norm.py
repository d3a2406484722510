"""Triton kernels, bound by memory, for LayerNorm and RMSNorm with the cast to FP8, and for their backward pass.

Bytes per element, for BF16:

    norm            2 + 2; a program holds whole rows in registers
    norm_quantize   2 + 1 in the same kernel; columns are a transpose of its payload, 1 + 1, partly from the L2 cache
    norm_backward   2 + 2 + 2, and 2 more with a residual; a program steps through its rows, one in registers at a time

Keeping n in FP8 for the backward pass costs the row kernel 1 more (2 + 1 + 1, without columns), and norm_backward reads
1 instead of x's 2. The columns that wgrad reads are then cast from the kept n, in the backward pass (norm_requantize,
1 + 1).

Two other versions with columns were slower (8192 x 4096, H200; two kernels take at least 51 us). One kernel that went
over a program's rows twice, to read them from the L2 cache, took 124 us: rows are so wide that there were too few
programs to hide the first pass. A first kernel for the statistics alone, and a second that cast tiles of x, took 63 us
(2 + 2 + 1 + 1 bytes).

The backward's sums over rows have two stages: each program sums its rows in registers, and a second kernel sums over
the programs, in order. So the result depends on the number of multiprocessors, and is otherwise deterministic. A row is
cut into two powers of two (12288 = 8192 + 4096), because a single one would leave a quarter of the registers unused.

Agreement with reference_norm.py: except for the order of sums and fused multiply-adds. Offsets are 64-bit.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...numerics.formats import E4M3, Format
from ..reference_norm import kept_scale
from .cast import (
    TILE_K,
    TILE_M,
    TILE_WARPS,
    as_type,
    by_words,
    empty_payload,
    fp8_code,
    fp8_pair,
    fp8_quad,
    magnitude_bits,
    raise_amax,
    store_codes,
    tile_place,
    transpose,
)
from .launch import cdiv, launched, next_power_of_2
from .sums import sum_parts

_INTERPRETED = triton.knobs.runtime.interpret


class Backward(NamedTuple):
    """norm_backward's launch parameters."""

    rows: int  # in a step of the loop
    warps: int
    stages: int  # of the software pipeline: loads in flight
    programs: int  # per multiprocessor; sets the grid and the registers of a thread


# By the largest K that an entry serves. benchmarks/fused_norm.py times alternatives.
BACKWARD = {
    1024: Backward(1, 2, 3, 8),
    4096: Backward(1, 8, 3, 2),
    8192: Backward(1, 16, 3, 1),
    16384: Backward(1, 16, 2, 1),
    1 << 31: Backward(1, 16, 1, 1),  # FP32 in two stages would exceed the shared memory
}


@triton.jit
def _gain(w_ptr, cols, K: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The gain of these columns, float32; 0 beyond K."""
    gain = tl.load(w_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    return tl.where(cols < K, gain + 1.0, 0.0) if ZERO_CENTERED else gain


@triton.jit
def _affine(normalized, w_ptr, b_ptr, cols, K: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """y = normalized * gain + bias, (rows, columns); 0 beyond K. cols: of the same shape, or one row."""
    y = normalized * _gain(w_ptr, cols, K, ZERO_CENTERED)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    return y


@launched
@triton.jit(do_not_specialize=["zero"])
def _norm_rows_kernel(
    x_ptr, w_ptr, b_ptr, M, eps, y_ptr, kept_ptr, mean_ptr, rstd_ptr, scale_ptr, amax_ptr, zero,
    K: tl.constexpr, ZERO_CENTERED: tl.constexpr, E4M3: tl.constexpr, KEPT_SCALE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows, COLS >= K: the statistics, and y in its own type, or in FP8 if there is a scale_ptr.

    With kept_ptr also n in FP8. Without mean_ptr the norm is RMSNorm.
    """
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(own, M - 1)  # rows from M on repeat the last one, which does not change the maximum
    cols = tl.arange(0, COLS)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    inside = cols < K
    offsets = rows.to(tl.int64)[:, None] * K + cols
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, 1) / K
        tl.store(mean_ptr + own, mean, mask=own < M)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / K + eps)
    tl.store(rstd_ptr + own, rstd, mask=own < M)
    mask = (own < M)[:, None] & inside
    n = x * rstd[:, None]
    if kept_ptr is not None:
        tl.store(as_type(kept_ptr, tl.uint8) + offsets, fp8_quad(n, n * KEPT_SCALE, zero), mask=mask)
    # cols has x's shape although its rows are equal: else other threads would load gain and bias, and move them.
    y = _affine(n, w_ptr, b_ptr, cols, K, ZERO_CENTERED)
    if amax_ptr is not None:
        raise_amax(amax_ptr, magnitude_bits(y))
    if scale_ptr is None:
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    elif E4M3:
        tl.store(as_type(y_ptr, tl.uint8) + offsets, fp8_quad(y, y * tl.load(scale_ptr), zero), mask=mask)
    else:
        tl.store(as_type(y_ptr, tl.uint8) + offsets, fp8_code(y, y * tl.load(scale_ptr), zero, E4M3), mask=mask)


@triton.jit
def _again(
    kept_ptr, w_ptr, b_ptr, rows, cols, M, K: tl.constexpr, ZERO_CENTERED: tl.constexpr, KEPT_SCALE: tl.constexpr
):
    """y (rows, columns) from the kept n; 0 beyond M and K."""
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    n = tl.load(kept_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, _affine(n * (1.0 / KEPT_SCALE), w_ptr, b_ptr, cols[None, :], K, ZERO_CENTERED), 0.0)


@launched
@triton.jit(do_not_specialize=["zero"])
def _norm_recast_kernel(
    kept_ptr, w_ptr, b_ptr, M, out_ptr, out_t_ptr, scale_ptr, zero,
    K: tl.constexpr, ZERO_CENTERED: tl.constexpr, E4M3: tl.constexpr, KEPT_SCALE: tl.constexpr, WORDS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Cast a tile of y, computed from the kept n, into out and out_t, if given, as cast.py's _tile_kernel does."""
    _, quads, cols = tile_place(K, TILE_M, TILE_K)
    word = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
    for i in tl.static_range(2):
        rows = 4 * quads + 2 * i
        y_0 = _again(kept_ptr, w_ptr, b_ptr, rows, cols, M, K, ZERO_CENTERED, KEPT_SCALE)
        y_1 = _again(kept_ptr, w_ptr, b_ptr, rows + 1, cols, M, K, ZERO_CENTERED, KEPT_SCALE)
        word |= fp8_pair(y_0, y_1, tl.load(scale_ptr), zero, E4M3) << (16 * i)
    store_codes(word, out_ptr, out_t_ptr, quads, cols, 0, M, K, K, WORDS)


@triton.jit
def _load_2d(ptr, rows, cols, inside, K: tl.constexpr):
    offsets = rows[:, None] * K + cols[None, :]
    return tl.load(ptr + offsets, mask=inside[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_dx(dx_ptr, residual_ptr, dx, rows, cols, inside, K: tl.constexpr):
    if residual_ptr is not None:  # two roundings, as in reference_norm.py
        dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32) + _load_2d(residual_ptr, rows, cols, inside, K)
    offsets = rows[:, None] * K + cols[None, :]
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & (cols < K)[None, :])


@launched
@triton.jit
def _norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, residual_ptr, M, per_program, dx_ptr, sums_ptr,
    K: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, KEPT: tl.constexpr, KEPT_SCALE: tl.constexpr,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of per_program rows (a multiple of ROWS), ROWS at a time, and this program's part of dweight and dbias.

    A row's columns are [0, A) and, unless B is 0, [A, A + B); both are in registers. sums (2, programs, K) float32 gets
    the program's sums for dweight and dbias; RMSNorm has no dbias. KEPT: x is the kept n.
    """
    program = tl.program_id(0).to(tl.int64)
    dw_ptr = sums_ptr + program * K
    db_ptr = dw_ptr + tl.num_programs(0).to(tl.int64) * K
    cols_a = tl.arange(0, A)
    gain_a = _gain(w_ptr, cols_a, K, ZERO_CENTERED)
    dw_a = tl.zeros((A,), tl.float32)
    db_a = tl.zeros((A,), tl.float32)
    if B:
        cols_b = A + tl.arange(0, B)
        gain_b = _gain(w_ptr, cols_b, K, ZERO_CENTERED)
        dw_b = tl.zeros((B,), tl.float32)
        db_b = tl.zeros((B,), tl.float32)
    for step in tl.range(0, per_program, ROWS, num_stages=STAGES):
        rows = program * per_program + step + tl.arange(0, ROWS)
        inside = rows < M
        rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)[:, None]
        dy_a = _load_2d(dy_ptr, rows, cols_a, inside, K)
        n_a = _load_2d(x_ptr, rows, cols_a, inside, K)
        if B:
            dy_b = _load_2d(dy_ptr, rows, cols_b, inside, K)
            n_b = _load_2d(x_ptr, rows, cols_b, inside, K)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]
            n_a -= mean
            if B:
                n_b -= mean
        n_a *= 1.0 / KEPT_SCALE if KEPT else rstd
        dw_a += tl.sum(dy_a * n_a, 0)
        g_a = dy_a * gain_a[None, :]
        along = tl.sum(g_a * n_a, 1)
        if B:
            n_b *= 1.0 / KEPT_SCALE if KEPT else rstd
            dw_b += tl.sum(dy_b * n_b, 0)
            g_b = dy_b * gain_b[None, :]
            along += tl.sum(g_b * n_b, 1)
        along = (along / K)[:, None]
        if not RMS:
            db_a += tl.sum(dy_a, 0)
            level = tl.sum(g_a, 1)
            if B:
                db_b += tl.sum(dy_b, 0)
                level += tl.sum(g_b, 1)
            level = (level / K)[:, None]
            g_a -= level
            if B:
                g_b -= level
        _store_dx(dx_ptr, residual_ptr, (g_a - n_a * along) * rstd, rows, cols_a, inside, K)
        if B:
            _store_dx(dx_ptr, residual_ptr, (g_b - n_b * along) * rstd, rows, cols_b, inside, K)
    tl.store(dw_ptr + cols_a, dw_a, mask=cols_a < K)
    if not RMS:
        tl.store(db_ptr + cols_a, db_a, mask=cols_a < K)
    if B:
        tl.store(dw_ptr + cols_b, dw_b, mask=cols_b < K)
        if not RMS:
            tl.store(db_ptr + cols_b, db_b, mask=cols_b < K)


def _chosen(table, K: int):
    return next(config for limit, config in table.items() if limit >= K)


def _registers(config: Backward) -> int:
    """Registers of a thread, so that config.programs fit a multiprocessor. ptxas would take 220, though 128 do not
    spill."""
    return min(65536 // (32 * config.warps * config.programs) // 8 * 8, 255)


def _statistics(x: torch.Tensor, rms: bool):
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return (None if rms else torch.empty_like(rstd)), rstd


def _launch_rows(x, weight, bias, eps, y, mean, rstd, zero_centered, kept, scale=None, amax=None, fmt=None):
    M, K = x.shape
    cols = next_power_of_2(K)
    rows = max(1, 4096 // cols)
    warps = 4 if cols <= 4096 else 8 if cols <= 16384 else 16
    _norm_rows_kernel[(cdiv(M, rows),)](
        x, weight, bias, M, eps, y, kept, mean, rstd, scale, amax, 0,
        K=K, ZERO_CENTERED=zero_centered, E4M3=fmt == E4M3, KEPT_SCALE=kept_scale(K), ROWS=rows, COLS=cols,
        num_warps=warps,
    )  # fmt: skip


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    rms: bool,
    zero_centered: bool,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See reference_norm.norm. One pass."""
    x = x.contiguous()
    y, (mean, rstd) = torch.empty_like(x), _statistics(x, rms)
    _launch_rows(x, weight, bias, eps, y, mean, rstd, zero_centered, kept)
    return y, mean, rstd


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rms: bool,
    zero_centered: bool,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """See reference_norm.norm_quantize. One kernel, or two with columns; amax_out must not be negative."""
    x = x.contiguous()
    mean, rstd = _statistics(x, rms)
    payload = empty_payload(x, x.shape, fmt)
    _launch_rows(x, weight, bias, eps, payload, mean, rstd, zero_centered, kept, scale, amax_out, fmt)
    payload_t = transpose(payload) if columns else None
    return payload if rows or not columns else None, payload_t, mean, rstd


def norm_requantize(
    kept: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    fmt: Format,
    scale: torch.Tensor,
    *,
    zero_centered: bool,
    rows: bool = True,
    columns: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See reference_norm.norm_requantize. One pass."""
    payload = empty_payload(kept, kept.shape, fmt) if rows or not columns else None
    payload_t = empty_payload(kept, kept.shape[::-1], fmt) if columns else None
    M, K = kept.shape
    grid = (cdiv(M, TILE_M) * cdiv(K, TILE_K),)
    _norm_recast_kernel[grid](
        kept, weight, bias, M, payload, payload_t, scale, 0,
        K=K, ZERO_CENTERED=zero_centered, E4M3=fmt == E4M3, KEPT_SCALE=kept_scale(K), WORDS=by_words(payload_t, M),
        TILE_M=TILE_M, TILE_K=TILE_K, num_warps=TILE_WARPS,
    )  # fmt: skip
    return payload, payload_t


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return 2 if _INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    rms: bool,
    zero_centered: bool,
    residual: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See reference_norm.norm_backward. One pass, and a small one over the programs' sums."""
    x, dy = x.contiguous(), dy.contiguous()
    M, K = x.shape
    config = _chosen(BACKWARD, K)
    most = _multiprocessors(x.device) * config.programs
    per_program = cdiv(cdiv(M, most), config.rows) * config.rows
    programs = cdiv(M, per_program) if M else 0
    a = 1 << (K.bit_length() - 1)
    dx, sums = torch.empty_like(dy), 1 if rms else 2
    partial = torch.empty(sums, programs, K, dtype=torch.float32, device=x.device)
    kept, residual = x.dtype == E4M3.dtype, None if residual is None else residual.contiguous()
    if into is None:
        dweight, dbias = (*(torch.empty(K, dtype=weight.dtype, device=x.device) for _ in range(sums)), None)[:2]
    else:
        dweight, dbias = into
    _norm_backward_kernel[(programs,)](
        dy, x, weight, None if kept else mean, rstd, residual, M, per_program,
        dx, partial,
        K=K, RMS=rms, ZERO_CENTERED=zero_centered, KEPT=kept, KEPT_SCALE=kept_scale(K),
        ROWS=config.rows, A=a, B=next_power_of_2(K - a) if a < K else 0,
        STAGES=config.stages, num_warps=config.warps, maxnreg=_registers(config),
    )  # fmt: skip
    sum_parts(partial, dweight, dbias, add=into is not None)
    return (dx, dweight, dbias) if into is None else (dx, None, None)
