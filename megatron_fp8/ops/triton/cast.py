"""Cast to FP8, transpose, and max|x|: one read of the input, whatever is wanted of it.

    payload   = cast(x * scale)      (M, K) FP8, saturating
    payload_t = payload^T            (K, M) FP8, contiguous: the K-major operand that a backward GEMM reads
    amax      = max(amax, max|x|)    0-d float32

All three come from one pass, so quantise + transpose of BF16 moves 2 + 1 + 1 bytes an element and is bound
by memory. What makes it so:

Transpose. A byte at a time through shared memory would cost more than the memory traffic. Each thread holds
the same 16 columns of four neighbouring rows instead, joins the four bytes of a column (they are neighbours
in a row of payload_t) in registers, and moves 4-byte words. Tiles are TILE_M x TILE_K, so that both outputs
are written in runs of at least 64 contiguous bytes.

Cast. Hopper's conversion instruction rounds to nearest even and saturates, infinities too, so these are put
back: NaN in E4M3, infinity in E5M2. NaN stays NaN.

Amax. The bits of |x| as an int32 order as |x| does, with infinity above all numbers and NaN above infinity.
An integer maximum, and one atomic a tile, therefore lose nothing and do not depend on the order.

The scale is read from device memory: nothing here waits for the GPU. Offsets are 64-bit.
Agreement with reference.py: bit for bit, but for the sign and payload of NaN.
Source: PTX ISA, cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32.
"""

import torch
import triton
import triton.language as tl

from megatron_fp8.numerics.formats import Format

BLOCK, FLAT_WARPS = 8192, 8
TILE_M, TILE_K, TILE_WARPS = 128, 64, 4


@triton.jit
def cast_fp8(x, y, fp8: tl.constexpr):
    """float32 y as `fp8`, saturating; not finite where x (y, or y before its scaling) is not."""
    if fp8 == tl.float8e4nv:
        q = tl.fma(x, 0.0, y).to(fp8)  # x * 0 is NaN for an infinity, else a zero
    else:
        code = y.to(fp8).to(tl.uint8, bitcast=True)
        # The code after E5M2's largest is infinity.
        q = tl.where(tl.abs(x) == float("inf"), code + 1, code).to(fp8, bitcast=True)
    return q


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, float32: an int32 that orders as |x| does, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _flat_kernel(x_ptr, n, scale_ptr, out_ptr, amax_ptr, BLOCK: tl.constexpr):
    """Cast, if there is an out_ptr, and amax, if there is an amax_ptr, of n contiguous elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if out_ptr is not None:
        tl.store(out_ptr + offsets, cast_fp8(x, x * tl.load(scale_ptr), out_ptr.dtype.element_ty), mask=mask)
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x)), sem="relaxed")


@triton.jit
def _tile_kernel(
    x_ptr, M, K, scale_ptr, out_ptr, out_t_ptr, amax_ptr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """out_t = x^T of a tile; with an out_ptr, cast first, stored in out, and amax as above."""
    tiles_k = tl.cdiv(K, TILE_K)
    first_row = tl.program_id(0) // tiles_k * TILE_M
    rows = first_row + tl.arange(0, TILE_M // 4) * 4
    cols = tl.program_id(0) % tiles_k * TILE_K + tl.arange(0, TILE_K)
    rows64 = rows.to(tl.int64)[:, None]
    # All loads come before any store: the compiler cannot know that x and out do not overlap.
    tile = ()
    for r in tl.static_range(4):
        mask = (rows + r < M)[:, None] & (cols < K)[None, :]
        tile += (tl.load(x_ptr + (rows64 + r) * K + cols[None, :], mask=mask, other=0),)

    if out_ptr is not None:
        scale = tl.load(scale_ptr)
        largest = tl.zeros((TILE_M // 4, TILE_K), tl.int32)
        payload = ()
        for r in tl.static_range(4):
            x = tile[r].to(tl.float32)
            largest = tl.maximum(largest, magnitude_bits(x))
            payload += (cast_fp8(x, x * scale, out_ptr.dtype.element_ty),)
            mask = (rows + r < M)[:, None] & (cols < K)[None, :]
            tl.store(out_ptr + (rows64 + r) * K + cols[None, :], payload[r], mask=mask)
        tile = payload
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")

    # (row / 4, column, row % 4) -> (column, row)
    joined = tl.join(tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3]))
    tile_t = tl.reshape(tl.permute(joined, (1, 0, 2, 3)), (TILE_K, TILE_M))
    rows_t = first_row + tl.arange(0, TILE_M)
    offsets_t = cols.to(tl.int64)[:, None] * M + rows_t[None, :]
    tl.store(out_t_ptr + offsets_t, tile_t, mask=(cols < K)[:, None] & (rows_t < M)[None, :])


def _launch_flat(x, scale=None, out=None, amax_out=None):
    bits = None if amax_out is None else amax_out.view(torch.int32)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _flat_kernel[grid](x, x.numel(), scale, out, bits, BLOCK=BLOCK, num_warps=FLAT_WARPS)


def _launch_tiles(x, out_t, scale=None, out=None, amax_out=None):
    M, K = x.shape
    bits = None if amax_out is None else amax_out.view(torch.int32)
    grid = (triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)
    _tile_kernel[grid](x, M, K, scale, out, out_t, bits, TILE_M=TILE_M, TILE_K=TILE_K, num_warps=TILE_WARPS)


def amax(x: torch.Tensor) -> torch.Tensor:
    """reference.amax in one pass. (An empty x gives 0.)"""
    out = x.new_zeros((), dtype=torch.float32)
    _launch_flat(x.contiguous(), amax_out=out)
    return out


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    transpose: bool = False,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """reference.quantize in one pass. amax_out must not hold a negative number."""
    x = x.contiguous()
    payload = torch.empty_like(x, dtype=fmt.dtype)
    if not transpose:
        _launch_flat(x, scale, payload, amax_out)
        return payload
    x = x.view(-1, x.shape[-1])
    payload_t = torch.empty_like(x.t(), dtype=fmt.dtype, memory_format=torch.contiguous_format)
    # Always with amax, wanted or not: without it Triton 3.6's ptxas crashes on some variants of the kernel and
    # miscompiles others (seen on an H200, 2026-11-21), and the kernel waits for memory either way.
    amax_out = x.new_zeros((), dtype=torch.float32) if amax_out is None else amax_out
    _launch_tiles(x, payload_t, scale, payload, amax_out)
    return payload, payload_t


def transpose(payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """reference.transpose; `out` must be contiguous."""
    if out is None:
        out = payload.new_empty(payload.shape[::-1])
    _launch_tiles(payload.contiguous().view(torch.uint8), out.view(torch.uint8))
    return out
