"""Emulation of low-precision formats: round x to a format's values, but keep it in x's own type.

    e(x) = round(x * 2^-k) * 2^k                  to a value of ExMy: x exponent bits, y mantissa bits

The values of ExMy, with bias b = 2^(x-1) - 1, and normals and subnormals as formats.py defines them:

    E4M3, E3M2, E2M3, E2M1     as OCP defines them: the top exponent is finite, maxima 448, 28, 7.5, 6; no infinity
    all others                 IEEE 754's pattern: the top exponent is infinity's, so the maximum is
                               2^b * (2 - 2^-y). E8M7 is BF16, E5M10 FP16, E8M10 TF32, E8M23 float32

Rounding chooses between x's neighbours in the format with an unbounded exponent (the three modes of rounding.py):

    nearest      ties to the even multiple of the ulp       error <= ulp/2
    truncate     toward zero                                error <  ulp
    stochastic   up if noise < fraction of the ulp          error <  ulp, E[result] = x

If the result exceeds the maximum, IEEE's formats give infinity (the maximum if truncating), and OCP's the maximum. An
infinity stays one in IEEE's formats and becomes NaN in OCP's. NaN stays NaN, and a zero result keeps x's sign. So E8M7
is torch's cast to bfloat16 and E5M2 its cast to float8_e5m2, bit for bit. E4M3 is its cast to float8_e4m3fn, except
that |x| > 464, which torch may turn into NaN, saturates here as in ops.quantize.

Noise is noise.py's, for the element's index in the contiguous x, but at least 2^-25: a value below 2^-25 of the
smallest step becomes zero. The bias is below 2^-24 of a step.

Scaling. There is one k for the tensor, for each row (the last dimension), or for every n consecutive elements of a row
(the last block of a row may be shorter): the smallest k with max|x| <= max * 2^k, so that nothing saturates. 2^k is a
power of two and costs no rounding: the format's rounding is the only error, and e(e(x)) = e(x) for nearest and
truncate. k is at least b - 127, so that the scaled format's smallest normal is never below float32's. With 8 exponent
bits there is nothing to scale: k = 0. An infinity or a NaN counts as float32's maximum.

The result is exact in bfloat16 for a bfloat16 x, whatever the format, and in float32 for a float32 x: a format with a
finer step than x's returns x, and the multiples of a coarser one have no more bits than x's type. There are two
exceptions: a result of 2^128 is infinite, and a maximum of more than 8 bits, which only truncation can give, is rounded
to bfloat16. So BF16 GEMMs with an FP32 sum compute what the emulated machine would, except for the order of the sum:

    forward   y = e(x) e(W)^T          dgrad   dx = e(dy) e(W)          wgrad   dW = e(dy)^T e(x)

Each operand is rounded once, and both GEMMs that read it read the same e(.). A machine with scales by row or block
would round again for the GEMM that sums over the other dimension.

Gain. It compares a product z' of rounded operands with the exact z, or one operand x' = e(x) with x:

    g(z) = <z', z> / <z, z>                       z' = g z + error, the error orthogonal to z

If the operands are rounded independently, their product has the product of their gains. If x's magnitudes spread
smoothly over octaves, g(x) is the mean of e(m) / m over m log-uniform in [1, 2), away from subnormals. With n = 2^y:

    truncate    (1/(n+1) + ... + 1/(2n)) / ln 2
    nearest     (1/(2n+1) + 1/(4n-1) + sum over k = n+1 .. 2n-1 of k/(k^2 - 1/4)) / ln 2
    stochastic  1

Operands that are already in BF16, t = BF16(m), lose less to truncation: their gain is the mean of e(t) t / m^2 divided
by the mean of t^2 / m^2. The gain of a GEMM:

            truncate: any x    BF16 x    nearest: any x    BF16 x
    E8M6    0.9888             0.9944    1.0000            0.9999
    E8M5    0.9778             0.9832    0.9999            0.9998
    E8M4    0.9561             0.9614    0.9996            0.9994
    E8M3    0.9146             0.9195    0.9986            0.9981

So truncating to E8M3 shrinks every GEMM by 8 %, rounding to nearest by 0.2 %, with much the same random error.

Source: arXiv 2405.18710, "To FP8 and Back Again", for the reduction of bits; OCP MX v1.0 for E3M2, E2M3 and E2M1.
"""

import re
from dataclasses import dataclass

import torch

from .blocks import block_scales
from .formats import FORMATS, Format
from .noise import uniform_noise
from .rounding import ROUNDINGS, round_magnitude

_SCALING = r"none|tensor|row|block:[1-9]\d*"
_OCP = {
    "e3m2": Format("e3m2", 3, 2, bias=3, max=28.0, has_infinity=False),
    "e2m3": Format("e2m3", 2, 3, bias=1, max=7.5, has_infinity=False),
    "e2m1": Format("e2m1", 2, 1, bias=1, max=6.0, has_infinity=False),
}
_LARGEST_BITS = 0x7F7FFFFF
SMALLEST_NOISE = 2.0**-25


def format_named(name: str) -> Format:
    """The format ExMy, x in 2 .. 8, y in 0 .. 23, in upper or lower case; ValueError for any other name."""
    bits = re.fullmatch(r"e([2-8])m(1?\d|2[0-3])", name.lower())
    if bits is None:
        raise ValueError(f"{name!r} is not a format: use ExMy, with 2 to 8 exponent bits x and 0 to 23 mantissa bits y")
    x, y = map(int, bits.groups())
    name, bias = f"e{x}m{y}", 2 ** (x - 1) - 1
    ieee = Format(name, x, y, bias, max=2.0**bias * (2 - 2.0**-y), has_infinity=True)
    return (FORMATS | _OCP).get(name, ieee)


@dataclass(frozen=True)
class EmulatedFormat:
    """How an operand is rounded.

    Attributes:
        format: the format to round to.
        rounding: "nearest", "truncate" or "stochastic".
        scaling: which elements share a power-of-two scale: "none", "tensor", "row" or "block:N".
    """

    format: Format
    rounding: str = "nearest"
    scaling: str = "none"

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"{self.rounding!r} is not a rounding: use {', '.join(ROUNDINGS)}")
        if not re.fullmatch(_SCALING, self.scaling):
            raise ValueError(f"{self.scaling!r} is not a scaling: use none, tensor, row, or block:N for N elements")

    @classmethod
    def parse(cls, text: str) -> "EmulatedFormat":
        """Parse FORMAT[:ROUNDING][:SCALING], such as E8M3, E8M3:truncate, E5M2:tensor, E2M1:stochastic:block:32.

        ValueError for any other text.
        """
        found = re.fullmatch(rf"([^:]+)(?::({'|'.join(ROUNDINGS)}))?(?::({_SCALING}))?", text)
        if found is None:
            raise ValueError(
                f"{text!r} is not FORMAT[:ROUNDING][:SCALING]: use, say, E8M3, E8M3:truncate or E5M2:nearest:tensor; "
                f"ROUNDING {', '.join(ROUNDINGS)}; SCALING none, tensor, row, block:N"
            )
        name, rounding, scaling = found.groups()
        return cls(format_named(name), rounding or "nearest", scaling or "none")

    def __str__(self) -> str:
        """The text that `parse` reads, with all three parts."""
        return f"{self.format.name.upper()}:{self.rounding}:{self.scaling}"

    @property
    def scaled(self) -> bool:
        """Whether there is a scale. A format with 8 exponent bits has none."""
        return self.scaling != "none" and self.format.exponent_bits < 8

    def block(self, row: int) -> int:
        """How many elements of a row of length `row` share a scale; only for scaling "row" and "block:N"."""
        return row if self.scaling == "row" else int(self.scaling.removeprefix("block:"))


def largest_carry(fmt: Format) -> tuple[int, int]:
    """(carry, field) with which k = (bits of max|x| + carry >> 23) - field.

    The addition carries into the exponent if the mantissa exceeds that of fmt.max.
    """
    bits = int(torch.tensor(fmt.max).view(torch.int32))
    return 0x7FFFFF - (bits & 0x7FFFFF), bits >> 23


def emulate(x: torch.Tensor, spec: EmulatedFormat, seed: tuple[int, int] | None = None) -> torch.Tensor:
    """e(x), defined at the top of the file: a new contiguous tensor of x's shape and type, which is any float type.

    seed: two unsigned 32-bit words from `noise_seed`; stochastic rounding needs them (else ValueError). Not
    differentiable: x must not require a gradient. For float16, a result that does not fit is rounded once more.
    """
    noise = None
    if spec.rounding == "stochastic":
        if seed is None:
            raise ValueError("stochastic rounding needs a seed: pass noise_seed(...)")
        noise = uniform_noise(x.numel(), seed, x.device).clamp_(min=SMALLEST_NOISE).view(x.shape)
    values = x.float().contiguous()
    if not spec.scaled or not x.numel():
        return _round(values, spec, noise).to(x.dtype)
    groups, noise = _grouped(values, spec), None if noise is None else _grouped(noise, spec)
    carry, field = largest_carry(spec.format)
    largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(2, keepdim=True).clamp_(max=_LARGEST_BITS)
    k = (((largest + carry) >> 23) - field).clamp_(min=spec.format.bias - 127)
    rounded = _round(groups * block_scales(127 - k), spec, noise).mul_(block_scales(127 + k)).flatten(1)
    if spec.scaling != "tensor":  # cut off the zeros that fill a row's last block
        rounded = rounded[:, : x.shape[-1] if x.dim() else 1]
    return rounded.reshape(x.shape).to(x.dtype).contiguous()


def _grouped(x: torch.Tensor, spec: EmulatedFormat) -> torch.Tensor:
    """x as (rows, groups per row, elements per group), one scale a group. Zeros fill the last group of a row."""
    if spec.scaling == "tensor":
        return x.view(1, 1, -1)
    rows = x.view(-1, x.shape[-1] if x.dim() else 1)
    block = spec.block(rows.shape[1])
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))


def _round(x: torch.Tensor, spec: EmulatedFormat, noise: torch.Tensor | None) -> torch.Tensor:
    """Float32 x rounded to spec.format, as a new tensor. Unlike round_to_format, IEEE's formats do not saturate."""
    fmt = spec.format
    rounded = round_magnitude(x, fmt, spec.rounding, noise)
    if not fmt.has_infinity:
        rounded.clamp_(max=fmt.max).add_(x, alpha=0.0)  # makes an infinity NaN
    elif spec.rounding == "truncate":
        rounded.clamp_(max=fmt.max).masked_fill_(x.isinf(), torch.inf)
    else:
        lift = 2.0 ** (127 - fmt.bias)  # moves the format's top binade to float32's, so that both overflow together
        rounded.mul_(lift).div_(lift)
    return rounded.copysign_(x)
