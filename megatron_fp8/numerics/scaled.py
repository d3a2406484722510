"""ScaledTensor: an FP8 tensor with one scale, which is what a Hopper FP8 GEMM takes.

    payload = round(x * scale),   x ~ payload * scale_inv,   scale_inv = 1 / scale,   scale ~ fmt.max / max|x|

payload float8 (x's shape), scale_inv float32 (0-d, on the payload's device). The scale sits outside the
GEMM: (A a)(B b)^T = a b (A B^T), so the product is scaled once. Error of an element: relative 2^-(M+1) as
long as x is within the format's normal range of max|x| (E4M3: 448 * 2^6 = 2^14.8 below it, E5M2: 2^29.8),
and absolute smallest_subnormal / 2 * scale_inv below that.
"""

from dataclasses import dataclass

import torch

from megatron_fp8.numerics.formats import Format, by_dtype, decode


@dataclass
class ScaledTensor:
    """x ~ payload.float() * scale_inv. `scale_inv` is captured: nothing may write to it afterwards."""

    payload: torch.Tensor
    scale_inv: torch.Tensor

    @property
    def format(self) -> Format:
        return by_dtype(self.payload.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the payload's shape: multiplied in float32, then rounded once to `dtype`."""
        return (decode(self.payload) * self.scale_inv).to(dtype)
