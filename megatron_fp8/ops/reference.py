"""Casts, transposes, GEMM and block sums in plain PyTorch: the reference for the kernels, and the CPU's implementation.

    amax               max|x|
    quantize           payload = encode(x, scale)                        one scale for the tensor
    quantize_bias_grad the same, and the sum of the rows                 FP32
    transpose          (M, K) payload -> (K, M) payload
    gemm               C = a_scale_inv * b_scale_inv * A B^T             A (M, K), B (N, K), FP32 sum
    quantize_blocks    payload and E8M0 exponents                        one power of two for 128 elements
    add_blocks         blocks <- stochastic round(blocks + x)            one FP32 addition, noise from a hash
    sum_blocks         sum over ranks of the dequantised blocks          FP32, in rank order, rounded once
    square_sum_blocks  sum over elements of that sum's square            FP32
    ring_sum           sum over ranks of one-scale payloads              each hop rounded to E4M3

FP8 is emulated exactly: payloads are torch.float8 tensors, rounded to nearest with ties to even, and float32
holds any product of two FP8 values (at most 8 significant bits). So a GEMM differs from a tensor core's only
in the order and the width of its sum; its error is at most about K * 2^-24 * sum_k |a_k b_k|.

Beyond a format's range (numerics/formats.py), finite values saturate; infinities and NaNs stay visible.
"""

import torch

from ..numerics.blocks import BLOCK, BlockScaled, PackedBlocks
from ..numerics.formats import E4M3, Format, decode, encode
from ..numerics.noise import Seed, uniform_noise
from ..numerics.rounding import round_to_format


def amax(x: torch.Tensor) -> torch.Tensor:
    """max|x| of a non-empty float tensor of any shape, as 0-d float32; NaN and infinity propagate."""
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float()


def quantize(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    transpose: bool = False,
    rows: bool = True,
    amax_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor]:
    """`encode` x (any shape; bf16, fp16 or fp32) with `scale` (0-d float32).

    Returns the payload, contiguous, of x's shape; it is written to `out` if that is given. With transpose=True returns
    (payload, payload_t): payload_t is (K, M) contiguous, for x viewed as (M, K) with K its last dimension. With
    rows=False as well, the payload is not written: (None, payload_t). amax_out (0-d float32) becomes max(amax_out,
    max|x|), NaN and infinity included.
    """
    if amax_out is not None:
        torch.maximum(amax_out, amax(x), out=amax_out)
    payload = encode(x.contiguous(), fmt, scale)
    if out is not None:
        payload = out.copy_(payload)
    if not transpose:
        return payload
    return (payload if rows else None), payload.view(-1, x.shape[-1]).t().contiguous()


def quantize_bias_grad(
    dy: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Quantise dy (M, N) and sum its rows in float32: (payload, payload_t (N, M), dbias (N,) in dy's type).

    rows, columns: whether to return payload and payload_t; None stands for one that is not wanted.
    """
    payload, payload_t = quantize(dy, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return payload, (payload_t if columns else None), dy.float().sum(0).to(dy.dtype)


def transpose(payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """(M, K) FP8 -> (K, M), contiguous, written to `out` (K, M) if given."""
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
) -> torch.Tensor:
    """a_scale_inv * b_scale_inv * a @ b^T (M, N), for a (M, K) and b (N, K) in FP8 and 0-d float32 scales.

    Returns the result in `out_dtype`, or writes it to `out` if given.
    """
    product = torch.mm(decode(a), decode(b).t()).mul_(a_scale_inv * b_scale_inv)
    return product.to(out_dtype) if out is None else out.copy_(product)


def quantize_blocks(
    x: torch.Tensor,
    rounding: str = "nearest",
    noise: torch.Tensor | None = None,
    out: PackedBlocks | None = None,
    first: int = 0,
) -> BlockScaled | PackedBlocks:
    """Quantise x (n,), n a multiple of 128 (else ValueError), of any float type, as numerics/blocks.py defines.

    rounding: "nearest", or "stochastic" with `noise` (n,) float32 uniform in [0, 1). Returns a new BlockScaled. With
    `out`, writes out's elements first .. first + n - 1 instead (first a multiple of 128) and returns `out`.
    """
    if x.dim() != 1 or x.numel() % BLOCK:
        raise ValueError(f"quantize_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    blocks = x.float().view(-1, BLOCK)
    # The bits of |x| are ordered like |x|, with NaN above infinity; the clamp makes NaN count as infinity.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1).clamp(max=0x7F800000)
    # |x| = 1.f * 2^E: e = E - 8 if 1.f <= 1.75 (448 = 1.75 * 2^8); else the sum carries, and e = E - 7.
    byte = (((largest + 0x001FFFFF) >> 23) - 8).clamp_(min=0)
    inverse = ((254 - byte) << 23).view(torch.float32)  # 2^-e = 2^(127 - byte), never denormal
    scaled = (blocks * inverse[:, None]).view(-1)
    if rounding == "stochastic":
        scaled = round_to_format(scaled, E4M3, "stochastic", noise)
    elif rounding != "nearest":
        raise ValueError(f"quantize_blocks rounding {rounding!r}: use 'nearest' or 'stochastic'")
    quantized = BlockScaled(encode(scaled, E4M3), byte.to(torch.uint8))
    if out is None:
        return quantized
    out.write(first, quantized)
    return out


def add_blocks(x: torch.Tensor, blocks: PackedBlocks, seed: Seed, first: int = 0) -> None:
    """Add x (n,), bf16, fp16 or fp32, into the elements first .. first + n - 1 of `blocks`, rounding stochastically.

    blocks <- quantize_blocks(dequantise(blocks) + float32(x)) with the noise uniform_noise(n, seed), whose index 0 is
    x's first element. This is one float32 addition, then one stochastic rounding, so the mean over seeds is the
    float32 sum. A NaN or an infinity in x or `blocks`, or a sum beyond float32, becomes a NaN payload. ValueError if n
    or `first` is no multiple of 128, or if `blocks` is too small.

    Seeds (E, 2): x is E tensors of one size, a multiple of 128, side by side; each is added with its own noise.
    """
    if x.dim() != 1:
        raise ValueError(f"add_blocks takes (n,), n a multiple of {BLOCK}, not {tuple(x.shape)}")
    total = blocks.read(first, x.numel()).dequantize().add_(x)
    seeds = list(seed) if isinstance(seed, torch.Tensor) and seed.dim() == 2 else [seed]
    noise = torch.cat([uniform_noise(x.numel() // len(seeds), one, x.device) for one in seeds])
    quantize_blocks(total, "stochastic", noise, blocks, first)


def sum_blocks(
    payload: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """out (n,) = start + sum over r of payload (R, n) E4M3 * 2^(exponents (R, n/128) - 127), r = 0, 1, ... R-1.

    start: (n,), or None for zeros. scale: 0-d float32, a factor of the finished sum, or None. Payload and exponents may
    be strided in the first dimension, as in a PackedBlocks. The products are exact: only the float32 additions, the
    multiplication by `scale`, and the cast to out's type round, in a fixed order.
    """
    total = torch.zeros_like(out, dtype=torch.float32) if start is None else start.float()
    for shard in map(BlockScaled, payload, exponents):
        total = total + shard.dequantize()
    return out.copy_(total if scale is None else total * scale)


def square_sum_blocks(payload: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The squared norm of sum_blocks' result, as 0-d float32.

    payload (R, n), exponents (R, n/128): as for sum_blocks. NaN and infinity propagate. The squares are float32, so
    values from 1.8e19 on give infinity. The order of the sum is not defined, but is the same in every call.
    """
    out = payload.new_empty(payload.shape[1], dtype=torch.float32)
    return sum_blocks(payload, exponents, out).square_().sum()


def ring_sum(payload: torch.Tensor) -> torch.Tensor:
    """The sum over r = 0, 1, ... R-1 of payload (R, n) E4M3 as a ring all-reduce in FP8 computes it: (n,) E4M3.

    Each hop adds one rank's payload in FP16 and rounds to E4M3, to nearest even, saturating at 448. (The FP16 addition
    rounds too, but this never changes the E4M3 result.) NaN stays NaN. All ranks must share one scale. NCCL's FP8 sum
    on Hopper differs only in the order of the ranks: a real ring starts each chunk at another rank.
    """
    total = payload[0].clone()
    for shard in payload[1:]:
        total = encode(decode(total).half() + decode(shard).half(), E4M3)
    return total
