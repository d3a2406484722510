"""The LM head's three products in FP8 (`--fp8-lm-head`); its weight, gradient buffer and optimizer stay stock's.

    forward   y  = q(x)  q(W)^T      dgrad   dx = q(dy) q(W)      wgrad   dW = q(dy)^T q(x)

Formats are those of the other linears. Each operand has one scale, from its own amax. The gradient of the logits is the
softmax minus one at the target, times the same number in all rows. So its largest element does not stand out much, and
E5M2 reaches down to 2^-32 of it. No level switches this on: after the logits no layer averages their errors out, and
the effect on the loss of real text has not been measured (docs/decisions.md).

In a step of a 7B slice the head's products take 55 ms in BF16 and 21 in FP8 (docs/performance.md). If stock accumulates
a weight's gradient in its GEMM (--gradient-accumulation-fusion), so does this.
"""

import functools

import torch

from .. import gemm, ops
from ..comm import tensor
from ..comm.wire import Flight, landed
from ..errors import UserError
from ..numerics.formats import E4M3, Format
from ..numerics.scaled import ScaledTensor
from ..numerics.scaling import compute_scale
from ..ops import source
from ..rebind import Hook, When

_HEAD = Hook(
    *("megatron.core.tensor_parallel.ColumnParallelLinear", "_forward_impl", "layers.fp8_head", "self input weight"),
    When("when a model is built, with --fp8-lm-head"),
    "Multiplies the LM head's operands in FP8.",
    of_object=True,
)
HOOKS = (_HEAD,)


def head_in_fp8(head, grad_format: Format) -> None:
    """Let `head`, a stock ColumnParallelLinear, multiply in FP8."""
    _HEAD.on(head, functools.partial(_forward, grad_format=grad_format))


def _forward(
    input, weight, bias=None, gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False, *,
    grad_format, tp_group=None, grad_output_buffer=None, gtp_remat_size=1, **_,
):  # fmt: skip
    """Replaces stock's linear_with_grad_accumulation_and_async_allreduce."""
    if grad_output_buffer is not None or gtp_remat_size > 1:
        raise UserError(
            "--fp8-lm-head: does not work with deferred weight gradients or generalized tensor parallelism; remove it"
        )
    n, k = weight.shape
    if n % 16 or k % 16:
        raise UserError(
            f"--fp8-lm-head: a head of {n} x {k} elements on each tensor-parallel rank needs multiples of 16: change "
            "--make-vocab-size-divisible-by, or remove it"
        )
    sum_over = tp_group if allreduce_dgrad or sequence_parallel else None
    how = gradient_accumulation_fusion, sum_over, sequence_parallel, grad_format
    y = _HeadProduct.apply(input, weight, *how)
    return y if bias is None else y + bias


def _quantized(x: torch.Tensor, fmt: Format, columns: bool) -> ScaledTensor:
    """Quantise x (M, K) with a scale from its own amax."""
    scale = compute_scale(ops.amax(x), fmt)
    payload, payload_t = source.cast(x, fmt, scale, rows=True, columns=columns, amax_out=None)
    return ScaledTensor(payload, scale.reciprocal(), payload_t)


class _HeadProduct(torch.autograd.Function):
    """y = x W^T: x (s, ..., K), or under sequence parallelism this rank's part of it; W (N, K) in BF16."""

    @staticmethod
    def forward(ctx, x, weight, accumulates: bool, group, gathers: bool, grad_format: Format):
        whole = Flight(tensor.gather(x, group)).land() if gathers else x
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        q = _quantized(whole.reshape(-1, whole.shape[-1]), E4M3, columns=needs_dw)
        w = _quantized(weight.detach(), E4M3, columns=needs_dx)
        ctx.how = accumulates, group, gathers, grad_format
        ctx.save_for_backward(weight, q.columns, q.scale_inv, w.columns, w.scale_inv)
        y = gemm.gemm(q, w, gemm.Epilogue(dtype=x.dtype), fast_accum=True)
        return y.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        weight, x_columns, x_scale_inv, w_columns, w_scale_inv = ctx.saved_tensors
        accumulates, group, gathers, grad_format = ctx.how
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        q = _quantized(dy.reshape(-1, dy.shape[-1]), grad_format, columns=needs_dw)
        dx, dw, summed = None, None, None
        if needs_dx:
            dx = gemm.gemm(q, ScaledTensor(w_columns, w_scale_inv), gemm.Epilogue(dtype=dy.dtype))
            dx = dx.view(*dy.shape[:-1], -1)
            summed = Flight(landed(dx) if group is None else tensor.add(dx, group, scatter=gathers, fp8=False))
        if needs_dw:
            product = gemm.Product(q.T, ScaledTensor(x_columns, x_scale_inv))
            if accumulates:  # embedding.py says what autograd gets instead
                product.compute(into=weight.main_grad, accumulate=True)
            else:
                dw = product.compute(dtype=weight.dtype)
        return summed and summed.land(), dw, None, None, None, None
