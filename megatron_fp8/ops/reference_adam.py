"""adam_step in plain PyTorch: the oracle for the kernel, and what runs on the CPU. ops/adam.py defines it.

Every line of arithmetic is as many float32 operations as it shows, each rounded by itself: no addcmul and no
add with alpha, which on some machines round once where the kernel rounds twice. The square root is taken in float64,
and so rounded correctly: torch's in float32, where it comes from MKL, is at times an ulp off.
"""

import torch

from ..numerics.blocks import BLOCK, BlockScaled, block_scales
from ..numerics.scaled import ScaledTensor
from .adam_states import AdamHyper, Gradient, State, read_master, read_state, write_master, write_state
from .reference import amax, quantize_blocks, sum_blocks


def _towards_zero(m: torch.Tensor) -> torch.Tensor:
    """m (n,) with what E4M3 would hold as subnormals of its block cut to multiples of their unit, 2^-9 * 2^e."""
    exponents = quantize_blocks(m).exponents
    unit = (block_scales(exponents) * 2.0**-9).repeat_interleave(BLOCK)
    steps = m / unit
    return torch.where(steps.abs() < 8, steps.trunc() * unit + 0.0, m)  # + 0: a zero is positive


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
    """ops.adam.adam_step, without its checks; a ScaledTensor needs its weight_scale and keeps its scale_inv."""
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
