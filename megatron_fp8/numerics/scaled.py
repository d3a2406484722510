"""ScaledTensor: an FP8 tensor with one scale, the operand of a Hopper FP8 GEMM.

    payload = round(x * scale),   x ~ payload * scale_inv,   scale_inv = 1 / scale,   scale ~ fmt.max / max|x|

payload float8 (x's shape), scale_inv float32 (0-d, on the payload's device). The GEMM reads payloads alone and scales
the product once: (A a)(B b)^T = a b (A B^T). The error of an element is relative 2^-(M+1) if |x| >= smallest_normal *
scale_inv (E4M3: down to 448 * 2^6 = 2^14.8 below max|x|, E5M2: 2^29.8), and absolute
smallest_subnormal / 2 * scale_inv below that.

Hopper's FP8 tensor cores need the summed dimension contiguous in both operands, so a GEMM that sums over x's rows needs
x transposed in memory. A ScaledTensor holds x in one layout or both; one pass over x writes them:

    payload    (..., K)   like x                    for GEMMs that sum over K
    columns    (K, M)     transposed, x as (M, K)   for GEMMs that sum over M

`x.T` is the transposed matrix: it exchanges the two, without a copy. So a GEMM is always A B^T of two payloads, and its
arguments say which layouts it reads: wgrad is gemm(dy.T, x.T).
"""

from dataclasses import dataclass

import torch

from .formats import Format, by_dtype, decode


@dataclass(slots=True, eq=False)
class ScaledTensor:
    """x ~ payload.float() * scale_inv. The object keeps `scale_inv` itself: do not write to it afterwards.

    A layer makes two dozen. A frozen one would take three times as long to make.

    payload or columns is None if that layout was not made.
    """

    payload: torch.Tensor
    scale_inv: torch.Tensor
    columns: torch.Tensor | None = None

    @property
    def T(self) -> "ScaledTensor":
        """The transposed matrix (K, M) of (M, K), in the same memory."""
        return ScaledTensor(self.columns, self.scale_inv, self.payload)

    @property
    def format(self) -> Format:
        held = self.columns if self.payload is None else self.payload
        assert held is not None  # there is at least one layout
        return by_dtype(held.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the payload's shape, multiplied in float32 and rounded once to `dtype`."""
        return (decode(self.payload) * self.scale_inv).to(dtype)
