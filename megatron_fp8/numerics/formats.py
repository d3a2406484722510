"""The FP8 formats E4M3 and E5M2 as data, and the exact casts to and from them.

A format with E exponent bits, M mantissa bits and bias b has the finite values

    normal     (-1)^s * 2^(e-b) * (1 + m/2^M)      e = 1 .. e_max,  m = 0 .. 2^M - 1
    subnormal  (-1)^s * 2^(1-b) * (m/2^M)          e = 0

so the gap between neighbours (the ulp) is 2^(floor(log2|x|) - M), and 2^(1-b-M) below the smallest normal.
Rounding to nearest errs by at most half an ulp: relative 2^-(M+1), that is 6.25 % for E4M3, 12.5 % for E5M2.

            E  M  bias   max     smallest normal   smallest subnormal   infinity   NaN codes
    E4M3    4  3    7      448   2^-6              2^-9                 none       0x7f, 0xff
    E5M2    5  2   15    57344   2^-14             2^-16                yes        0x7d..0x7f, 0xfd..0xff

E5M2 follows IEEE 754 (it is the top byte of an FP16). E4M3 uses every code of its top binade except the last for finite
values, so its maximum is 2^8 * 1.75 and it has no infinity (torch calls it float8_e4m3fn).
Source: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A float format. `max` is given and not computed: formats reserve different codes at the top.

    `dtype` is torch's type for the payload, or None if torch has no such format. float32 must contain the format
    (mantissa_bits <= 23, exponent range within float32's). smallest_subnormal is at most 1.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_infinity: bool
    dtype: torch.dtype | None = None

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3 = Format("e4m3", 4, 3, bias=7, max=448.0, has_infinity=False, dtype=torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, bias=15, max=57344.0, has_infinity=True, dtype=torch.float8_e5m2)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
_FEW = 8192  # up to so many elements, torch's own conversion is faster than the table's three calls
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values()}


def by_dtype(dtype: torch.dtype) -> Format:
    """The format whose payloads have torch type `dtype`; ValueError for any other type."""
    if dtype not in _BY_DTYPE:
        raise ValueError(f"{dtype} is not an FP8 format: use torch.float8_e4m3fn or torch.float8_e5m2")
    return _BY_DTYPE[dtype]


def encode(x: torch.Tensor, fmt: Format, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The FP8 payload of x * scale: x of any shape and float type, `scale` 0-d float32, positive and finite, or None.

    Rounds to nearest, ties to even. A finite x beyond the maximum becomes +-max, even if x * scale overflows. NaN stays
    NaN; an infinity of x stays one in E5M2 and becomes NaN in E4M3. Every float8 cast in torch goes through this
    function, because torch's own treatment of an infinity depends on the release (E4M3: NaN in 2.11, 448 in 2.15) and
    on the device.
    """
    y = x.clamp(-fmt.max, fmt.max) if scale is None else (x.float() * scale).clamp_(-fmt.max, fmt.max)
    payload = y.to(fmt.dtype)
    # The code after the largest number's is infinity in E5M2 and NaN in E4M3.
    payload.view(torch.uint8).add_((x.abs() == torch.inf).view(torch.uint8))
    return payload


def decode(payload: torch.Tensor) -> torch.Tensor:
    """The float32 values of an FP8 payload of any shape, exactly.

    On the CPU, torch converts E4M3 one element at a time; for a large payload a table of the 256 values is faster.
    """
    if payload.device.type != "cpu":
        return payload.float()
    if payload.dtype != E4M3.dtype or payload.numel() <= _FEW:
        return payload.contiguous().float()
    values = torch.arange(256, dtype=torch.uint8).view(payload.dtype).float()
    codes = payload.contiguous().view(torch.uint8).flatten().int()
    return values.index_select(0, codes).view(payload.shape)
