"""A linear's product y = x W^T with its two gradients, in BF16, of operands that may be emulated.

    forward   y  = r(x) r(W)^T        dgrad   dx = r(dy) r(W)        wgrad   dW = r(dy)^T r(x)

r(.) rounds an operand to an emulated format (--fp8-emulate); without one it changes nothing. While a weight is out of
FP8 its delayed scales follow x and dy, so that the way back into FP8 finds them up to date. Rows of other ranks are
gathered, and sums made, as in linear_fp8.py, in BF16.

Source: Megatron's LinearWithGradAccumulationAndAsyncCommunication.
"""

import torch

from .. import gemm, ops
from ..comm import tensor
from ..comm.wire import Flight
from ..engine.owned_weight import GRAD, INPUT, OwnedWeight
from ..flags.emulate import OPERANDS
from ..numerics.emulation import EmulatedFormat
from ..numerics.noise import noise_seed
from ..ops import source
from .function import Function, announce
from .parcel import Call

type Rounding = dict[str, tuple[EmulatedFormat, tuple[int, int] | None]]  # with a seed if it is stochastic


class Bf16Product(Function):
    """y (..., N) = x W^T of x (..., K)."""

    @staticmethod
    def forward(ctx, x, anchor, call: Call):
        rounding = _rounding(call.weight, call.keep)
        flat = call.whole(x)
        if call.training:
            call.weight.casts.follow(INPUT, flat)
        flat, w = _rounded(flat, rounding, "activation"), _rounded(call.weight.dense(), rounding, "weight")
        y = gemm.gemm(flat, w, gemm.Epilogue(dtype=x.dtype))
        if call.sum_y:
            y = Flight(tensor.add(y, call.group, call.scatter, fp8=False)).land()
        ctx.call, ctx.rounding, ctx.exact = call, rounding, x if call.seen else None
        ctx.save_for_backward(*((x if call.gather else flat,) if call.wgrad else ()))
        if call.seen:
            call.show_forward(x, flat, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        call, rounding, needs_dx = ctx.call, ctx.rounding, ctx.needs_input_grad[0]
        exact = source.rows(dy)
        if call.gather_dy:
            exact = call.start_gather(exact).land()
        (x,) = ctx.saved_tensors if call.wgrad else (None,)
        gathering = call.start_gather(source.rows(x)) if call.gather and call.wgrad else None
        if needs_dx:
            announce(ctx)
        if call.training:
            call.weight.casts.follow(GRAD, exact)
        gradient = _rounded(exact, rounding, "gradient")
        w = dx = summing = product = None
        if needs_dx:
            w = _rounded(call.weight.dense(), rounding, "weight")
            dx = gemm.gemm(gradient, w.t(), gemm.Epilogue(dtype=gradient.dtype))
            summing = call.start_sum(dx) if call.sum_dx else None
        if call.wgrad:
            x = x if gathering is None else _rounded(gathering.land(), rounding, "activation")
            product = gemm.Product(gradient.t(), x.t())
        if call.seen:
            call.show_backward(ctx.exact, exact, (gradient, w), product)
        if product is not None:
            call.weight.take_gradient(product)  # while dx is being summed
        if summing is not None:
            dx = summing.land()
        return None if dx is None else dx.view(-1, *dy.shape[1:-1], dx.shape[-1]), None, None


def _rounded(x: torch.Tensor, rounding: Rounding, operand: str) -> torch.Tensor:
    """x as the GEMM reads it: rounded if the operand is emulated."""
    how = rounding.get(operand)
    return x if how is None else ops.emulate(x.detach(), *how)


def _rounding(weight: OwnedWeight, keep: bool) -> Rounding:
    """How this call rounds its operands; counts the call."""
    # A forward pass that is computed again has the noise of the first: micro-batches come in one order.
    count = weight.count_forward(keep)
    rounding: Rounding = {}
    if weight.emulate is None:
        return rounding
    for i, operand in enumerate(OPERANDS):
        how = weight.emulate.for_operand(weight.path, weight.layer_number, operand, weight.step)
        if how:
            # The weight is one, and rounded alike, on all ranks and in all micro-batches.
            rank, at = (0, 0) if operand == "weight" else (weight.rank, count)
            noisy = how.rounding == "stochastic"
            rounding[operand] = how, noise_seed(*weight.identity, rank, weight.step, i, at) if noisy else None
    return rounding
