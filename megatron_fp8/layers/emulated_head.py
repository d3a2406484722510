"""The LM head with emulated operands (`--fp8-emulate-lm-head`); its weight, gradient and optimizer stay stock's.

    forward   y = e(x) e(W)^T          dgrad   dx = e(dy) e(W)          wgrad   dW = e(dy)^T e(x)

The roundings are around stock's own linear: its input and weight are rounded on the way in, and the gradient of its
output on the way back.  Gradients pass through the roundings of input and weight unchanged (straight through).
"""

from collections.abc import Callable

import torch

from .. import ops
from ..flags.emulate import LM_HEAD, OPERANDS, EmulationPlan
from ..numerics.emulation import EmulatedFormat
from ..numerics.noise import noise_seed
from ..rebind import Hook, When

_HEAD = Hook(
    *("megatron.core.tensor_parallel.ColumnParallelLinear", "forward", "layers.emulated_head", "self input_ weight"),
    When("when a model is built, with --fp8-emulate-lm-head"),
    "Rounds the LM head's operands on their way in, and its gradient on its way back.",
    of_object=True,
)
HOOKS = (_HEAD,)


class _Rounded(torch.autograd.Function):
    """e(x) forward, dy backward."""

    @staticmethod
    def forward(ctx, x, how: EmulatedFormat, seed):
        return ops.emulate(x.detach(), how, seed)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


class _RoundedGradient(torch.autograd.Function):
    """x forward, e(dy) backward."""

    @staticmethod
    def forward(ctx, x, how: EmulatedFormat, seed):
        ctx.how, ctx.seed = how, seed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ops.emulate(dy, ctx.how, ctx.seed), None, None


def emulate_head(head, plan: EmulationPlan, seed: int, rank: int) -> None:
    """Let `head`, a stock ColumnParallelLinear, read operands rounded as the plan says.

    seed, rank: of the run and of this process, for stochastic rounding.
    """
    stock = head.forward
    head.gradient_accumulation_fusion = False  # a rounded weight has no main_grad to add to
    head.fp8_update = lambda: 1  # see `count_updates`
    # For the noise: the update under way, how many of its forward passes kept nothing for a backward pass, how many
    # did.
    step, forwards = 0, [0, 0]

    def rounded(by: type[torch.autograd.Function], operand: str, x: torch.Tensor, count: int) -> torch.Tensor:
        how = plan.for_operand(LM_HEAD, 1, operand, step)
        if how is None:
            return x
        noise = None
        if how.rounding == "stochastic":  # all ranks and all micro-batches round the weight alike
            at = (step, 0, 0) if operand == "weight" else (step, 1 + rank, count)
            noise = noise_seed(seed, OPERANDS.index(operand), *at, *LM_HEAD.encode())
        return by.apply(x, how, noise)

    def forward(input_, weight=None, **kwargs):
        nonlocal step
        keep = torch.is_grad_enabled()
        if step != head.fp8_update():
            step, forwards[:] = head.fp8_update(), [0, 0]
        count = forwards[keep]
        forwards[keep] += 1
        input_ = rounded(_Rounded, "activation", input_, count)
        weight = rounded(_Rounded, "weight", head.weight if weight is None else weight, count)
        output, bias = stock(input_, weight=weight, **kwargs)
        return rounded(_RoundedGradient, "gradient", output, count), bias

    _HEAD.on(head, forward)


def count_updates(chunks, update: Callable[[], int]) -> None:
    """Let emulated heads in the model chunks ask `update` for the number of the update, from 1."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fp8_update"):
            module.fp8_update = update
