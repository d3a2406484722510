"""Low-precision numbers: formats, rounding, tensors with one scale or one a block, and how scales are chosen."""

from .blocks import BLOCK, BlockScaled, block_scales
from .formats import E4M3, E5M2, FORMATS, Format, by_dtype, decode, encode
from .rounding import round_to_format
from .scaled import ScaledTensor
from .scaling import DelayedScaling, compute_scale

__all__ = [
    "BLOCK",
    "E4M3",
    "E5M2",
    "FORMATS",
    "BlockScaled",
    "DelayedScaling",
    "Format",
    "ScaledTensor",
    "block_scales",
    "by_dtype",
    "compute_scale",
    "decode",
    "encode",
    "round_to_format",
]
