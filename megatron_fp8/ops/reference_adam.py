"""adam_step in plain PyTorch: the reference for the kernel, and the CPU's implementation. ops/adam.py defines the step.

Each float32 operation in the code is rounded by itself. addcmul, or add with alpha, would round only once on some
machines, but the kernel rounds twice. The square root is computed in float64, to be correctly rounded: torch's float32
root may be an ulp wrong if it comes from MKL.
"""

import torch

from ..numerics.blocks import BLOCK, BlockScaled, block_scales
from ..numerics.scaled import ScaledTensor
from .adam_states import AdamHyper, Gradient, State, read_master, read_state, write_master, write_state
from .reference import amax, quantize_blocks, sum_blocks


def _towards_zero(m: torch.Tensor) -> torch.Tensor:
    """m (n,), with elements that are subnormal in their E4M3 block truncated to multiples of 2^-9 * 2^e."""
    exponents = quantize_blocks(m).exponents
    unit = (block_scales(exponents) * 2.0**-9).repeat_interleave(BLOCK)
    steps = m / unit
    return torch.where(steps.abs() < 8, steps.trunc() * unit + 0.0, m)  # + 0.0 makes -0 positive


def _read_gradient(gradient: Gradient, grad_scale: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        return gradient.float() * grad_scale
    payload, exponents = gradient
    return sum_blocks(payload, exponents, grad_scale.new_empty(payload.shape[1]), grad_scale)


def adam_step(
    gradient: Gradient,
    exp_avg: State,
    exp_avg_sq: State,
    master: State,
    weight: torch.Tensor | ScaledTensor,
    hyper: AdamHyper,
    grad_scale: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> None:
    """See ops.adam.adam_step. No checks here; a ScaledTensor needs a weight_scale."""
    g, w = _read_gradient(gradient, grad_scale), read_master(master, weight)
    m, v = read_state(exp_avg), read_state(exp_avg_sq)
    if isinstance(exp_avg_sq, BlockScaled):
        v = v * v
    if not hyper.decoupled:
        g = g + w * hyper.weight_decay
    m = m * hyper.beta1 + g * (1 - hyper.beta1)
    v = v * hyper.beta2 + g * g * (1 - hyper.beta2)
    root = v.double().sqrt().float()
    if hyper.decoupled:
        w = w * (1 - hyper.lr * hyper.weight_decay)
    w = w - m / (root * hyper.root_correction + hyper.eps) * hyper.step_size
    write_state(exp_avg, _towards_zero(m) if isinstance(exp_avg, BlockScaled) else m)
    write_state(exp_avg_sq, root if isinstance(exp_avg_sq, BlockScaled) else v)
    write_master(master, weight, w, weight_scale)
    if amax_out is not None:
        torch.maximum(amax_out, amax(torch.where(v < torch.inf, w, torch.nan)), out=amax_out)
