"""Cast to FP8, transpose, and max|x|: one read of the input, whatever is wanted of it.

    payload   = cast(x * scale)      (M, K) FP8, saturating
    payload_t = payload^T            (K, M) FP8, contiguous: the K-major operand that a backward GEMM reads
    amax      = max(amax, max|x|)    0-d float32

All three come from one pass, so quantise + transpose of BF16 moves 2 + 1 + 1 bytes an element and is bound
by memory.

Cast. Hopper's conversion instruction rounds to nearest even and saturates, infinities too, so these are put
back: NaN in E4M3, infinity in E5M2. NaN stays NaN.

A compiler bug shapes the conversion. The ptxas of CUDA 12.8, which Triton 3.6 brings along, miscompiles kernels
that take the bytes of a cvt.e4m3x2 or .e5m2x2 apart: in 8192 x 4096 BF16, 37 % of the transposed payload was
wrong, or a neighbour's, and some variants crash ptxas (H200, 2026-11-21; right with the ptxas of CUDA 13.0). So
the two codes leave the instruction through an exclusive or with a `zero` that only the launch knows: nothing
can be folded into the instruction then. tests/gpu compares every variant with the reference.

Transpose. Triton turns the tile of bytes through shared memory; both outputs are written in whole 64-byte runs.

Amax. The bits of |x| as an int32 order as |x| does, with infinity above all numbers and NaN above infinity.
An integer maximum, and one atomic a tile, therefore lose nothing and do not depend on the order.

The scale is read from device memory: nothing here waits for the GPU. Offsets are 64-bit.
Agreement with reference.py: bit for bit, but for the sign and payload of NaN.
Source: PTX ISA, cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32.
"""

import torch
import triton
import triton.language as tl

from megatron_fp8.numerics.formats import E4M3, Format

BLOCK, FLAT_WARPS = 8192, 8
TILE_M, TILE_K, TILE_WARPS = 32, 128, 4
# two float32 $2, $3 -> their two codes $0, $1 as int32; $4 is zero
_ASM = (
    "{{.reg .b16 pair; .reg .b32 word; cvt.rn.satfinite.{}x2.f32 pair, $3, $2; cvt.u32.u16 word, pair; "
    "xor.b32 word, word, $4; and.b32 $0, word, 255; shr.u32 $1, word, 8;}}"
)
_E4M3_ASM, _E5M2_ASM = tl.constexpr(_ASM.format("e4m3")), tl.constexpr(_ASM.format("e5m2"))


@triton.jit
def convert(y, zero, E4M3: tl.constexpr):
    """float32 y -> its E4M3 (else E5M2) code as int32: nearest even, saturating infinities too."""
    asm: tl.constexpr = _E4M3_ASM if E4M3 else _E5M2_ASM
    return tl.inline_asm_elementwise(asm, "=r,=r,r,r,r,r", [y, zero], dtype=tl.int32, is_pure=True, pack=2)


@triton.jit
def fp8_code(x, y, zero, E4M3: tl.constexpr):
    """The FP8 code, uint8, of float32 y, saturating; not finite where x (y, or y before its scaling) is not."""
    if E4M3:
        code = convert(tl.fma(x, 0.0, y), zero, E4M3)  # x * 0 is NaN for an infinity, else a zero
    else:
        code = convert(y, zero, E4M3)
        code = tl.where(tl.abs(x) == float("inf"), code + 1, code)  # the code after E5M2's largest is infinity
    return code.to(tl.uint8)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, float32: an int32 that orders as |x| does, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["zero"])
def _flat_kernel(x_ptr, n, scale_ptr, out_ptr, amax_ptr, zero, E4M3: tl.constexpr, BLOCK: tl.constexpr):
    """Cast, if there is an out_ptr, and amax, if there is an amax_ptr, of n contiguous elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if out_ptr is not None:
        tl.store(out_ptr + offsets, fp8_code(x, x * tl.load(scale_ptr), zero, E4M3), mask=mask)
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x)), sem="relaxed")


@triton.jit(do_not_specialize=["zero"])
def _tile_kernel(
    x_ptr, M, K, scale_ptr, out_ptr, out_t_ptr, amax_ptr, zero,
    E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """out_t = x^T of a tile of bytes; with a scale_ptr x is cast first, into out if there is one, and amax as above."""
    tiles_k = tl.cdiv(K, TILE_K)
    rows = tl.program_id(0) // tiles_k * TILE_M + tl.arange(0, TILE_M)
    cols = tl.program_id(0) % tiles_k * TILE_K + tl.arange(0, TILE_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
    tile = tl.load(x_ptr + offsets, mask=mask, other=0)
    if scale_ptr is not None:
        x = tile.to(tl.float32)
        tile = fp8_code(x, x * tl.load(scale_ptr), zero, E4M3)
        if out_ptr is not None:
            tl.store(out_ptr + offsets, tile, mask=mask)
        if amax_ptr is not None:
            tl.atomic_max(amax_ptr, tl.max(magnitude_bits(x)), sem="relaxed")
    mask_t = (cols < K)[:, None] & (rows < M)[None, :]
    tl.store(out_t_ptr + cols.to(tl.int64)[:, None] * M + rows[None, :], tl.trans(tile), mask=mask_t)


def _bits(amax_out: torch.Tensor | None) -> torch.Tensor | None:
    return None if amax_out is None else amax_out.view(torch.int32)


def _launch_flat(x, scale=None, out=None, amax_out=None, fmt=None):
    grid = (triton.cdiv(x.numel(), BLOCK),)
    codes = None if out is None else out.view(torch.uint8)
    _flat_kernel[grid](
        x, x.numel(), scale, codes, _bits(amax_out), 0, E4M3=fmt == E4M3, BLOCK=BLOCK, num_warps=FLAT_WARPS
    )


def _launch_tiles(x, out_t, scale=None, out=None, amax_out=None, fmt=None):
    M, K = x.shape
    grid = (triton.cdiv(M, TILE_M) * triton.cdiv(K, TILE_K),)
    codes = None if out is None else out.view(torch.uint8)
    _tile_kernel[grid](
        x, M, K, scale, codes, out_t.view(torch.uint8), _bits(amax_out), 0,
        E4M3=fmt == E4M3, TILE_M=TILE_M, TILE_K=TILE_K, num_warps=TILE_WARPS,
    )  # fmt: skip


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
    rows: bool = True,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor]:
    """reference.quantize in one pass. amax_out must not hold a negative number."""
    x = x.contiguous()
    payload = torch.empty_like(x, dtype=fmt.dtype) if rows else None
    if not transpose:
        _launch_flat(x, scale, payload, amax_out, fmt)
        return payload
    x = x.view(-1, x.shape[-1])
    payload_t = torch.empty_like(x.t(), dtype=fmt.dtype, memory_format=torch.contiguous_format)
    _launch_tiles(x, payload_t, scale, payload, amax_out, fmt)
    return payload, payload_t


def transpose(payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """reference.transpose; `out` must be contiguous."""
    if out is None:
        out = payload.new_empty(payload.shape[::-1])
    _launch_tiles(payload.contiguous().view(torch.uint8), out)
    return out
