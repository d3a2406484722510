"""The FP8 GEMM: C (M, N) = a_scale_inv * b_scale_inv * A B^T, with A (M, K) and B (N, K) contiguous.

Hopper's FP8 tensor cores read both operands K-major (contiguous along the sum), hence the transposed payloads
of a backward pass:

    forward   Y  (tokens, out)   = X  (tokens, in)   W   (out, in)^T       E4M3 x E4M3
    dgrad     dX (tokens, in)    = dY (tokens, out)  W^T (in, out)^T       E5M2 x E4M3
    wgrad     dW (out, in)       = dY^T (out, tokens) X^T (in, tokens)^T   E5M2 x E4M3

On CUDA this is torch._scaled_mm (cuBLASLt), elsewhere reference.py. The tensor core itself sums with about 14
bits; `fast_accum` leaves the whole sum over K to it (forward: the error is well below E4M3's own rounding),
without it partial sums are added in float32 at a cost of some 7 % (backward: sums are long and gradients
small).

Source: PyTorch's torch._scaled_mm; DeepSeek-V3, arXiv 2412.19437, section 3.3, for the accumulator's width.
"""

import torch

from megatron_fp8.numerics.formats import E5M2
from megatron_fp8.ops import reference


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
    """a_scale_inv * b_scale_inv * a @ b^T; a (M, K), b (N, K) contiguous FP8; scales 0-d float32 -> (M, N).

    On CUDA, M, N and K are multiples of 16. The result has `out_dtype`; or is written to `out`, contiguous,
    in out's dtype; or, with accumulate=True, is added into `out` (float32). E4M3 and E5M2 mix freely, but for
    E5M2 x E5M2, which Hopper lacks: ValueError.
    """
    if not a.is_cuda:
        return reference.gemm(
            a, b, a_scale_inv, b_scale_inv,
            out_dtype=out_dtype, out=out, accumulate=accumulate, fast_accum=fast_accum,
        )  # fmt: skip
    if a.dtype == b.dtype == E5M2.dtype:
        raise ValueError("gemm of E5M2 by E5M2: Hopper has no such product; one operand must be E4M3")
    scales = {"scale_a": a_scale_inv, "scale_b": b_scale_inv, "use_fast_accum": fast_accum}
    if out is None:
        return torch._scaled_mm(a, b.t(), **scales, out_dtype=out_dtype)
    if not accumulate:
        return torch._scaled_mm(a, b.t(), **scales, out_dtype=out.dtype, out=out)
    # _scaled_mm has no beta, so the sum costs a float32 product of its own and a pass of 12 bytes an element.
    return out.add_(torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.float32))
