"""Adds weight gradients of stock linears to main_grad in the GEMM: replaces apex's fused_weight_gradient_mlp_cuda.

    main_grad (N, K) += dy (M, N)^T x (M, K)

Stock Megatron needs apex's extension for this (--gradient-accumulation-fusion). Without it, the LM head's product is
rounded to BF16, written, and added to an FP32 main_grad in a pass of its own. cuBLASLt adds it in the GEMM, in FP32.
The plugin installs `MODULE` in the extension's place if apex is not installed.
"""

import types

import torch

from . import cublaslt, plans

NAME = "fused_weight_gradient_mlp_cuda"
_HALVES = (torch.bfloat16, torch.float16)


def add_weight_gradient(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad (N, K) += dy (M, N)^T x (M, K); main_grad is FP32 or of the operands' type."""
    if not x.shape[0]:
        return  # an expert without tokens
    fits = x.dtype is dy.dtype and x.dtype in _HALVES and main_grad.dtype in (x.dtype, torch.float32)
    if fits and main_grad.is_cuda and cublaslt.bound():
        plans.product(dy.contiguous().t(), x.contiguous().t(), main_grad, add=True)
    else:
        main_grad.add_(dy.t() @ x)


def stand_in(absent) -> types.ModuleType:
    """For the extension."""
    return MODULE


def available(before: bool) -> bool:
    """For what stock knows of it."""
    return True


MODULE = types.ModuleType(NAME, __doc__)
MODULE.wgrad_gemm_accum_fp32 = add_weight_gradient  # type: ignore[attr-defined]
MODULE.wgrad_gemm_accum_fp16 = add_weight_gradient  # type: ignore[attr-defined]
