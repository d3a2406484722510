"""ScaledTensor: an FP8 tensor with one scale, which is what a Hopper FP8 GEMM takes.

    payload = round(x * scale),   x ~ payload * scale_inv,   scale_inv = 1 / scale,   scale ~ fmt.max / max|x|

payload float8 (x's shape), scale_inv float32 (0-d, on the payload's device). The scale sits outside the
GEMM: (A a)(B b)^T = a b (A B^T), so the product is scaled once. Error of an element: relative 2^-(M+1) as
long as x is within the format's normal range of max|x| (E4M3: 448 * 2^6 = 2^14.8 below it, E5M2: 2^29.8),
and absolute smallest_subnormal / 2 * scale_inv below that.

Hopper's FP8 tensor cores read both operands along the sum, so a GEMM that sums over x's rows needs x transposed in
memory. A ScaledTensor holds x in one layout or in both, made by one pass over x:

    payload    (..., K)   as x is                   what sums over K reads
    columns    (K, M)     transposed, x as (M, K)   what sums over M reads

`x.T` is the transposed matrix and exchanges the two, without a copy. So a GEMM is always a B^T of two payloads, and
what is passed says which layout it reads: wgrad is gemm(dy.T, x.T).
"""

from dataclasses import dataclass

import torch

from .formats import Format, by_dtype, decode


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """x ~ payload.float() * scale_inv. `scale_inv` is captured: nothing may write to it afterwards.

    payload or columns is None where a layout was not made.
    """

    payload: torch.Tensor
    scale_inv: torch.Tensor
    columns: torch.Tensor | None = None

    @property
    def T(self) -> "ScaledTensor":
        """The transposed matrix (K, M) of (M, K): the same memory."""
        return ScaledTensor(self.columns, self.scale_inv, self.payload)

    @property
    def format(self) -> Format:
        held = self.columns if self.payload is None else self.payload
        assert held is not None  # one layout or both
        return by_dtype(held.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the payload's shape: multiplied in float32, then rounded once to `dtype`."""
        return (decode(self.payload) * self.scale_inv).to(dtype)
