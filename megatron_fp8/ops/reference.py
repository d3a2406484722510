"""Every operation of megatron_fp8.ops in plain PyTorch: the oracle for the kernels, and what runs on the CPU.

    amax               max|x|
    quantize           payload = cast(saturate(float32(x) * scale))      one scale for the tensor
    transpose          (M, K) payload -> (K, M) payload
    gemm               C = a_scale_inv * b_scale_inv * A B^T             A (M, K), B (N, K), FP32 sum
    quantize_blocks    payload and E8M0 exponents                        one power of two for 128 elements
    sum_blocks         sum over ranks of what they dequantise to         FP32, in rank order

FP8 is emulated exactly: payloads are torch.float8 tensors, rounded to nearest with ties to even, and float32
holds any product of two FP8 values (at most 8 significant bits). So a GEMM differs from a tensor core's only
in the order and the width of its sum; the error of this one is at most about K * 2^-24 * sum_k |a_k b_k|.

torch's casts to float8 do not saturate (E4M3 turns 465 into NaN), hence the clamp; and a clamp would make a
maximum of an infinity, which must stay visible, hence what `_saturate` puts back.
"""

import torch

from megatron_fp8.numerics.blocks import BLOCK, BlockScaled
from megatron_fp8.numerics.formats import E4M3, E5M2, Format, decode
from megatron_fp8.numerics.rounding import round_to_format

_FLOAT32_MAX = torch.finfo(torch.float32).max


def amax(x: torch.Tensor) -> torch.Tensor:
    """max|x| of a non-empty float tensor of any shape, as 0-d float32; NaN and infinity propagate."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def _saturate(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """x * scale within +-fmt.max where x is finite; NaN and infinities of x stay. All float32."""
    # limited - x is +0 for a finite x, and subtracting +0 changes nothing, not even the sign of a zero.
    limited = x.clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
    return (x * scale).clamp_(-fmt.max, fmt.max).sub_(limited.sub_(x))


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    transpose: bool = False,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cast x (any shape; bf16, fp16 or fp32) times `scale` (0-d float32) to `fmt`, saturating.

    Finite values beyond the maximum become +-max, also where x * scale overflows float32; NaN stays NaN; an
    infinity of x stays one in E5M2 and is NaN in E4M3. Returns the payload, contiguous, of x's shape; with
    transpose=True (payload, payload_t), payload_t being (K, M) contiguous for x seen as (M, K), K its last
    dimension. amax_out (0-d float32) becomes max(amax_out, max|x|), NaN and infinity included.
    """
    if amax_out is not None:
        torch.maximum(amax_out, amax(x), out=amax_out)
    payload = _saturate(x.float().contiguous(), scale, fmt).to(fmt.dtype)
    if not transpose:
        return payload
    return payload, payload.view(-1, x.shape[-1]).t().contiguous()


def transpose(payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """(M, K) FP8 -> (K, M), contiguous; into `out` (K, M) if given."""
    if out is None:
        return payload.t().contiguous()
    return out.copy_(payload.t())


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    fast_accum: bool = False,
) -> torch.Tensor:
    """a_scale_inv * b_scale_inv * a @ b^T: a (M, K) and b (N, K) FP8, the scales 0-d float32 -> (M, N).

    E4M3 and E5M2 mix freely, but for E5M2 x E5M2, which the hardware lacks: ValueError. The result has
    `out_dtype`, or is written to `out`, or with accumulate=True added into `out` (float32). fast_accum (fewer
    bits in the tensor core's sum) changes nothing here.
    """
    if a.dtype == b.dtype == E5M2.dtype:
        raise ValueError("gemm of E5M2 by E5M2: Hopper has no such product; one operand must be E4M3")
    product = torch.mm(decode(a), decode(b).t()).mul_(a_scale_inv * b_scale_inv)
    if accumulate:
        return out.add_(product)
    if out is not None:
        return out.copy_(product)
    return product.to(out_dtype)


def quantize_blocks(
    x: torch.Tensor,
    payload_out: torch.Tensor | None = None,
    exponents_out: torch.Tensor | None = None,
    rounding: str = "nearest",
    noise: torch.Tensor | None = None,
) -> BlockScaled:
    """Quantise x (n,), n a multiple of 128 (else ValueError), any float type, as numerics/blocks.py defines.

    rounding: "nearest", or "stochastic" with `noise` (n,) float32 uniform in [0, 1). payload_out (n,)
    float8_e4m3fn and exponents_out (n/128,) uint8 are written and returned where given.
    """
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks = x.float().view(-1, BLOCK)
    # Bits of |x| order as |x| does, NaN above infinity; all that is not finite counts as infinity.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).clamp(max=0x7F800000)
    # |x| = 1.f * 2^E: e = E - 8 where 1.f <= 1.75 (448 = 1.75 * 2^8), else E - 7: where the sum carries.
    byte = (((largest + 0x001FFFFF) >> 23) - 8).clamp_(min=0)
    inverse = ((254 - byte) << 23).view(torch.float32)  # 2^-e = 2^(127 - byte), never denormal
    scaled = (blocks * inverse[:, None]).view(-1)
    if rounding == "stochastic":
        scaled = round_to_format(scaled, E4M3, "stochastic", noise)
    elif rounding != "nearest":
        raise ValueError(f"quantize_blocks rounding {rounding!r}: use 'nearest' or 'stochastic'")
    payload = torch.empty_like(scaled, dtype=E4M3.dtype) if payload_out is None else payload_out
    exponents = torch.empty_like(byte, dtype=torch.uint8) if exponents_out is None else exponents_out
    return BlockScaled(payload.copy_(scaled), exponents.copy_(byte))


def sum_blocks(payload: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out (n,) float32 = sum over r of payload (R, n) E4M3 * 2^(exponents (R, n/128) - 127), r = 0, 1, ...
    R-1.

    The products are exact, so the float32 additions are the only roundings, and their order is fixed.
    """
    out.zero_()
    for shard in map(BlockScaled, payload, exponents):
        out.add_(shard.dequantize())
    return out
