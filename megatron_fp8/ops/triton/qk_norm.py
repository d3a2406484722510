"""Triton kernels for RMSNorm of each head of queries or keys with their rotary embedding: one pass each way.

Bytes per element, for BF16: norm_rotate 2 + 2; norm_rotate_backward 2 + 2 + 2.

torch's norm, Megatron's rotation and the split before them take a dozen passes. A program takes ROWS tokens and HEADS
heads, as in qkv.py, whose pairs these are; the gain, cos and sin stay in registers. A whole head is in registers too,
so its sums cost no second reading. Each program of the backward pass writes its sum for dweight, and sums.py adds these
in order: the result is deterministic.

Agreement with reference_qk_norm.py: except for the order of sums. Offsets that include a row are 64-bit.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launched
from .qkv import _cut, _load_pairs, _store_pairs, _strided
from .sums import summed


@triton.jit
def _one_row(ptr):
    """(pointers (1,), wanted (1,)) for _load_pairs and _store_pairs of a single row."""
    return ptr + tl.zeros((1,), tl.int32), tl.full((1,), True, tl.int1)


@triton.jit
def _gains(w_ptr, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """The gains of the rotated numbers, (1, BLOCK) each, float32."""
    place, wanted = _one_row(w_ptr)
    first, second = _load_pairs(place, wanted, D, BLOCK, INTERLEAVED)
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first + 1.0, second + 1.0) if ZERO_CENTERED else (first, second)


@triton.jit
def _tail(places, wanted, D: tl.constexpr, HN: tl.constexpr, TAIL: tl.constexpr):
    """float32 (rows, TAIL): the numbers of a head from D on, which are not rotated."""
    cols = D + tl.arange(0, TAIL)
    mask = wanted[:, None] & (cols < HN)[None, :]
    return tl.load(places[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tail(places, y, wanted, D: tl.constexpr, HN: tl.constexpr, TAIL: tl.constexpr):
    cols = D + tl.arange(0, TAIL)
    mask = wanted[:, None] & (cols < HN)[None, :]
    tl.store(places[:, None] + cols[None, :], y.to(places.dtype.element_ty), mask=mask)


@triton.jit
def _begin(
    w_ptr, cos_ptr, sin_ptr, batch, M, chunks, HN: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a program has for all of its heads. `chunks` programs share their tokens.

    Returns (its tokens, int64, which of them are there, their sequence and batch indices: (ROWS,) each; cos, sin and
    the gain, each for the first and second numbers of the pairs; the gain of a head's other numbers, 0 without any).
    """
    rows = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    s, b = rows // batch, rows % batch
    cos_1, cos_2 = _load_pairs(cos_ptr + s * D, inside, D, BLOCK, INTERLEAVED)
    sin_1, sin_2 = _load_pairs(sin_ptr + s * D, inside, D, BLOCK, INTERLEAVED)
    gain_1, gain_2 = _gains(w_ptr, D, BLOCK, INTERLEAVED, ZERO_CENTERED)
    gain_t = tl.zeros((1, TAIL), tl.float32)
    if D < HN:
        one, wanted = _one_row(w_ptr)
        gain_t = _tail(one, wanted, D, HN, TAIL) + (1.0 if ZERO_CENTERED else 0.0)
    return rows, inside, s, b, cos_1, cos_2, sin_1, sin_2, gain_1, gain_2, gain_t


@triton.jit
def _normalized(
    places, inside, eps,
    HN: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A head of each token from the pointers `places` (ROWS,) on, divided by its root mean square, float32.

    Returns (first and second numbers of its pairs (ROWS, BLOCK), its other numbers (ROWS, TAIL), the factor (ROWS, 1):
    0 if the token is not there).
    """
    x_1, x_2 = _load_pairs(places, inside, D, BLOCK, INTERLEAVED)
    x_1, x_2 = x_1.to(tl.float32), x_2.to(tl.float32)
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, 1)
    x_t = tl.zeros((places.shape[0], TAIL), tl.float32)
    if D < HN:
        x_t = _tail(places, inside, D, HN, TAIL)
        squares += tl.sum(x_t * x_t, 1)
    rstd = tl.where(inside, 1.0 / tl.sqrt_rn(squares / HN + eps), 0.0)[:, None]
    return x_1 * rstd, x_2 * rstd, x_t * rstd, rstd


@launched
@triton.jit
def _norm_rotate_kernel(
    x_ptr, x_s, x_b, x_g, w_ptr, eps, cos_ptr, sin_ptr, batch, M, heads, out_ptr,
    R: tl.constexpr, HN: tl.constexpr, OUT: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write x's heads, normalised and rotated, to out (M, heads), each OUT numbers after the one before."""
    chunks = heads // HEADS
    rows, inside, s, b, cos_1, cos_2, sin_1, sin_2, gain_1, gain_2, gain_t = _begin(
        w_ptr, cos_ptr, sin_ptr, batch, M, chunks, HN, ZERO_CENTERED, INTERLEAVED, D, BLOCK, TAIL, ROWS
    )
    for i in range(HEADS):
        head = tl.program_id(0) % chunks * HEADS + i
        source = x_ptr + (head // R).to(tl.int64) * x_g + head % R * HN + s * x_s + b * x_b
        n_1, n_2, n_t, _ = _normalized(source, inside, eps, HN, INTERLEAVED, D, BLOCK, TAIL)
        z_1, z_2 = n_1 * gain_1, n_2 * gain_2
        target = out_ptr + rows * heads * OUT + head * OUT
        y_1 = (z_1 * cos_1 - z_2 * sin_1).to(out_ptr.dtype.element_ty)
        y_2 = (z_2 * cos_2 + z_1 * sin_2).to(out_ptr.dtype.element_ty)
        _store_pairs(target, y_1, y_2, inside, D, BLOCK, INTERLEAVED)
        if D < HN:
            _store_tail(target, n_t * gain_t, inside, D, HN, TAIL)


@launched
@triton.jit
def _norm_rotate_backward_kernel(
    dy_ptr, dy_s, dy_b, dy_h, x_ptr, x_s, x_b, x_g, w_ptr, eps, cos_ptr, sin_ptr, batch, M, heads, dx_ptr, sums_ptr,
    R: tl.constexpr, HN: tl.constexpr, ZERO_CENTERED: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """dx (M, heads * HN), and this program's part of dweight in sums (programs, HN) float32."""
    chunks = heads // HEADS
    rows, inside, s, b, cos_1, cos_2, sin_1, sin_2, gain_1, gain_2, gain_t = _begin(
        w_ptr, cos_ptr, sin_ptr, batch, M, chunks, HN, ZERO_CENTERED, INTERLEAVED, D, BLOCK, TAIL, ROWS
    )
    dw_1 = tl.zeros((ROWS, BLOCK), tl.float32)
    dw_2 = tl.zeros((ROWS, BLOCK), tl.float32)
    dw_t = tl.zeros((ROWS, TAIL), tl.float32)
    for i in range(HEADS):
        head = tl.program_id(0) % chunks * HEADS + i
        source = x_ptr + (head // R).to(tl.int64) * x_g + head % R * HN + s * x_s + b * x_b
        n_1, n_2, n_t, rstd = _normalized(source, inside, eps, HN, INTERLEAVED, D, BLOCK, TAIL)
        gradient = dy_ptr + head.to(tl.int64) * dy_h + s * dy_s + b * dy_b
        y_1, y_2 = _load_pairs(gradient, inside, D, BLOCK, INTERLEAVED)
        y_1, y_2 = y_1.to(tl.float32), y_2.to(tl.float32)
        z_1, z_2 = y_1 * cos_1 + y_2 * sin_2, y_2 * cos_2 - y_1 * sin_1
        dw_1 += z_1 * n_1
        dw_2 += z_2 * n_2
        g_1, g_2 = z_1 * gain_1, z_2 * gain_2
        along = tl.sum(g_1 * n_1 + g_2 * n_2, 1)
        if D < HN:
            z_t = _tail(gradient, inside, D, HN, TAIL)
            dw_t += z_t * n_t
            g_t = z_t * gain_t
            along += tl.sum(g_t * n_t, 1)
        along = (along / HN)[:, None]
        target = dx_ptr + rows * heads * HN + head * HN
        dx_1 = ((g_1 - n_1 * along) * rstd).to(dx_ptr.dtype.element_ty)
        dx_2 = ((g_2 - n_2 * along) * rstd).to(dx_ptr.dtype.element_ty)
        _store_pairs(target, dx_1, dx_2, inside, D, BLOCK, INTERLEAVED)
        if D < HN:
            _store_tail(target, (g_t - n_t * along) * rstd, inside, D, HN, TAIL)
    place, alone = _one_row(sums_ptr + tl.program_id(0).to(tl.int64) * HN)
    _store_pairs(place, tl.sum(dw_1, 0)[None, :], tl.sum(dw_2, 0)[None, :], alone, D, BLOCK, INTERLEAVED)
    if D < HN:
        _store_tail(place, tl.sum(dw_t, 0)[None, :], alone, D, HN, TAIL)


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    zero_centered: bool,
    interleaved: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference_qk_norm.norm_rotate. One pass."""
    s, b, groups, r, hn = x.shape
    heads = groups * r
    if out is None:
        out = x.new_empty(s, b, heads, hn)
    cut = _cut(heads, cos.shape[-1], hn - cos.shape[-1])
    _norm_rotate_kernel[(cdiv(s * b, cut["ROWS"]) * heads // cut["HEADS"],)](
        x, *x.stride()[:3], weight, eps, cos, sin, b, s * b, heads, out,
        R=r, HN=hn, OUT=out.stride(2), ZERO_CENTERED=zero_centered, INTERLEAVED=interleaved, **cut,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def norm_rotate_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    zero_centered: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference_qk_norm.norm_rotate_backward. One pass, and a small one over the programs' sums."""
    s, b, groups, r, hn = x.shape
    heads = groups * r
    dx = torch.empty(s, b, heads, hn, dtype=dy.dtype, device=dy.device)
    cut = _cut(heads, cos.shape[-1], hn - cos.shape[-1])
    programs = cdiv(s * b, cut["ROWS"]) * heads // cut["HEADS"]
    parts = torch.empty(1, programs, hn, dtype=torch.float32, device=dy.device)
    _norm_rotate_backward_kernel[(programs,)](
        *_strided(dy), x, *x.stride()[:3], weight, eps, cos, sin, b, s * b, heads, dx, parts,
        R=r, HN=hn, ZERO_CENTERED=zero_centered, INTERLEAVED=interleaved, **cut, enable_fp_fusion=False,
    )  # fmt: skip
    return dx, summed(parts, weight.dtype)
