"""Emulation of a low-precision format: x rounded to the format's values, and kept in x's own type.

    e(x) = round(x * 2^-k) * 2^k                  to a value of ExMy, x and y being exponent and mantissa bits

The values of ExMy, with bias b = 2^(x-1) - 1 and formats.py's definition of normals and subnormals:

    E4M3, E3M2, E2M3, E2M1     as OCP defines them: finite to the top, maxima 448, 28, 7.5, 6; no infinity
    every other                IEEE 754's pattern: the top exponent is infinity's, so the maximum is
                               2^b * (2 - 2^-y). E8M7 is BF16, E5M10 FP16, E8M10 TF32, E8M23 float32

Rounding, to the neighbours that x has where the exponent is not bounded above (numerics/rounding.py's three modes):

    nearest      ties to the even multiple of the ulp       error <= ulp/2
    truncate     toward zero                                error <  ulp
    stochastic   up where noise < fraction of the ulp       error <  ulp, E[result] = x

What then exceeds the maximum is an infinity in IEEE's formats, but the maximum when truncating, and the maximum always
in OCP's. An infinity stays one in IEEE's and is NaN in OCP's, whichever code NaN has there; NaN stays NaN; zero and
what becomes zero keep their sign. So E8M7 is torch's cast to bfloat16 and E5M2 that to float8_e5m2, bit for bit, and
E4M3 the one to float8_e4m3fn, but that what torch makes NaN, |x| > 464, saturates here as in ops.quantize.

Noise is that of noise.py for the element's index in x (contiguous), but at least 2^-25: what is less than 2^-25 of the
smallest step becomes zero. The bias is below 2^-24 of a step.

Scaling. One k for the tensor, for each row (the last dimension), or for every n consecutive elements of a row (its last
block may be shorter): the smallest k with max|x| <= max * 2^k, so that nothing saturates. As 2^k is a power of two it
costs no rounding: the error is the format's alone, and e(e(x)) = e(x) when rounding to nearest or truncating. k is
at least b - 127: the scaled format's smallest normal is never below float32's. 8 exponent bits therefore leave nothing
to scale, k = 0. An infinity or a NaN counts as float32's maximum.

The result is exact in bfloat16 for a bfloat16 x, whatever the format, and in float32 for a float32 x: the step is
finer than x's own, and x unchanged, or its multiples up to the next power of two fit. (Infinite at 2^128. And a
maximum of more than 8 bits, which only truncation beyond it gives, is rounded to bfloat16.) So BF16 GEMMs with an FP32
sum are the emulated machine's, up to the order of the sum:

    forward   y = e(x) e(W)^T          dgrad   dx = e(dy) e(W)          wgrad   dW = e(dy)^T e(x)

Each operand is rounded once, and both GEMMs that read it read the same e(.). A machine with scales by row or block
would round again for the GEMM that sums over the other dimension.

Gain. Of a product z' of rounded operands beside the exact z, as of one operand x' = e(x) beside x:

    g(z) = <z', z> / <z, z>                       z' = g z + error, the error orthogonal to z

A product of operands rounded independently has the product of their gains. Where x's magnitudes spread smoothly over
octaves, g(x) is the mean of e(m) / m over m log-uniform in [1, 2), away from subnormals. With n = 2^y:

    truncate    (1/(n+1) + ... + 1/(2n)) / ln 2
    nearest     (1/(2n+1) + 1/(4n-1) + sum over k = n+1 .. 2n-1 of k/(k^2 - 1/4)) / ln 2
    stochastic  1

Operands already in BF16, t = BF16(m), lose less to truncation: the mean is of e(t) t / m^2 over that of t^2 / m^2.
The gain of a GEMM:

            truncate: any x    BF16 x    nearest: any x    BF16 x
    E8M6    0.9888             0.9944    1.0000            0.9999
    E8M5    0.9778             0.9832    0.9999            0.9998
    E8M4    0.9561             0.9614    0.9996            0.9994
    E8M3    0.9146             0.9195    0.9986            0.9981

So truncating to E8M3 shrinks every GEMM by 8 %, rounding to nearest by 0.2 %, with much the same random error.

Source: the reduction of bits is that of "To FP8 and Back Again", arXiv 2405.18710; OCP MX v1.0 for E3M2, E2M3 and E2M1.
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
    """The format ExMy, x 2 to 8, y 0 to 23, in capitals or small letters; ValueError for another name."""
    bits = re.fullmatch(r"e([2-8])m(1?\d|2[0-3])", name.lower())
    if bits is None:
        raise ValueError(f"{name!r} is no format: use ExMy, x exponent bits 2 to 8, y mantissa bits 0 to 23")
    x, y = map(int, bits.groups())
    name, bias = f"e{x}m{y}", 2 ** (x - 1) - 1
    ieee = Format(name, x, y, bias, max=2.0**bias * (2 - 2.0**-y), has_infinity=True)
    return (FORMATS | _OCP).get(name, ieee)


@dataclass(frozen=True)
class EmulatedFormat:
    """How an operand is rounded.

    Attributes:
        format: whose values it takes.
        rounding: "nearest", "truncate" or "stochastic".
        scaling: "none", "tensor", "row" or "block:N": what shares a power of two.
    """

    format: Format
    rounding: str = "nearest"
    scaling: str = "none"

    def __post_init__(self):
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"{self.rounding!r} is no rounding: use {', '.join(ROUNDINGS)}")
        if not re.fullmatch(_SCALING, self.scaling):
            raise ValueError(f"{self.scaling!r} is no scaling: use none, tensor, row, or block:N of N elements")

    @classmethod
    def parse(cls, text: str) -> "EmulatedFormat":
        """Read FORMAT[:ROUNDING][:SCALING]: E8M3, E8M3:truncate, E5M2:tensor, E2M1:stochastic:block:32.

        ValueError for another text.
        """
        found = re.fullmatch(rf"([^:]+)(?::({'|'.join(ROUNDINGS)}))?(?::({_SCALING}))?", text)
        if found is None:
            raise ValueError(
                f"{text!r} is not FORMAT[:ROUNDING][:SCALING]: use such as E8M3, E8M3:truncate or E5M2:nearest:tensor; "
                f"ROUNDING {', '.join(ROUNDINGS)}; SCALING none, tensor, row, block:N"
            )
        name, rounding, scaling = found.groups()
        return cls(format_named(name), rounding or "nearest", scaling or "none")

    def __str__(self) -> str:
        """The text that `parse` reads, in full."""
        return f"{self.format.name.upper()}:{self.rounding}:{self.scaling}"

    @property
    def scaled(self) -> bool:
        """Whether there is a scale; not with 8 exponent bits."""
        return self.scaling != "none" and self.format.exponent_bits < 8

    def block(self, row: int) -> int:
        """How many elements of a row of `row` share a scale; of scaling "row" and "block:N" only."""
        return row if self.scaling == "row" else int(self.scaling.removeprefix("block:"))


def largest_carry(fmt: Format) -> tuple[int, int]:
    """(carry, field) so that k = (bits of max|x| + carry >> 23) - field: the addition reaches the exponent where the
    mantissa exceeds that of fmt.max."""
    bits = int(torch.tensor(fmt.max).view(torch.int32))
    return 0x7FFFFF - (bits & 0x7FFFFF), bits >> 23


def emulate(x: torch.Tensor, spec: EmulatedFormat, seed: tuple[int, int] | None = None) -> torch.Tensor:
    """e(x) as the top of the file has it: a new contiguous tensor of x's shape and type, any float type.

    seed: two unsigned 32-bit words, from `noise_seed`, of stochastic rounding; ValueError there without them. Not
    differentiable: x must not require a gradient. (float16 rounds the result once more where it is too narrow.)
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
    if spec.scaling != "tensor":  # without what fills the last block
        rounded = rounded[:, : x.shape[-1] if x.dim() else 1]
    return rounded.reshape(x.shape).to(x.dtype).contiguous()


def _grouped(x: torch.Tensor, spec: EmulatedFormat) -> torch.Tensor:
    """x as (rows, groups a row, group), each group with one scale, zeros filling a row's last."""
    if spec.scaling == "tensor":
        return x.view(1, 1, -1)
    rows = x.view(-1, x.shape[-1] if x.dim() else 1)
    block = spec.block(rows.shape[1])
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))


def _round(x: torch.Tensor, spec: EmulatedFormat, noise: torch.Tensor | None) -> torch.Tensor:
    """Float32 x rounded to spec.format, as a new tensor: round_to_format saturates, IEEE's formats do not."""
    fmt = spec.format
    rounded = round_magnitude(x, fmt, spec.rounding, noise)
    if not fmt.has_infinity:
        rounded.clamp_(max=fmt.max).add_(x, alpha=0.0)  # NaN where x is infinite
    elif spec.rounding == "truncate":
        rounded.clamp_(max=fmt.max).masked_fill_(x.isinf(), torch.inf)
    else:
        lift = 2.0 ** (127 - fmt.bias)  # brings the format's top binade to float32's: both overflow together
        rounded.mul_(lift).div_(lift)
    return rounded.copysign_(x)
