"""One step of Adam over states in few bytes: gradient, averages, master and weight are read and written once.

With g = gradient * grad_scale and the step's number t, all in float32, each operation rounded by itself (on a GPU what
is taken from w in the last line is approximate, to 2^-21 of itself: triton/adam.py):

    g = g + weight_decay * w                                        only where the decay is not decoupled (L2)
    m = beta1 * m + (1 - beta1) * g                                 exp_avg
    v = beta2 * v + (1 - beta2) * g^2                               exp_avg_sq
    w = w * (1 - lr * weight_decay)                                 only where the decay is decoupled (AdamW)
    w = w - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

in the order of torch.optim.Adam and AdamW. m, v and w are then rounded to what stores them, to nearest:

    gradient     float32, bfloat16, or the PackedBlocks rows of R ranks, summed here in float32, in rank order
    exp_avg      float32, bfloat16, BlockScaled
    exp_avg_sq   float32, Block16, BlockScaled (which holds sqrt(v))
    master       float32, int16 (the remainder to the weight), Block16, bfloat16, BlockScaled
    weight       bfloat16, or a ScaledTensor of E4M3 whose scale is a power of two

An exp_avg in BlockScaled rounds what is subnormal in its block towards zero: to nearest, beta1 = 0.9 would keep four
units forever (3.6 is nearest to 4), and a weight whose gradients have stopped would drift on, by lr * m / eps in the
end, as v goes to zero and m does not. numerics/master.py says what each format holds and loses. The weight is rounded
from w itself, not from the master as stored: to nearest, ties to even (beside a remainder to BF16: ties away from
zero). The step's number, rates and bias corrections are the host's; the scale of the gradient, which holds the clip,
and those of the weight are read on the device: nothing waits for it.

Bytes read and written per element, for BlockScaled m, Block16 v, and the remainder to a BF16 weight:

    gradient 1 (R = 1)    m 1 + 1    v 2 + 2    remainder 2 + 2    weight 2 + 2    exponents 5/128    15.04 in all

(13.04 with an E4M3 weight) where FP32 states, an FP32 gradient and a BF16 weight, only written, move
4 + 8 + 8 + 8 + 2 = 30.

A NaN or an infinity is never hidden: a NaN gradient makes NaN of m, v, master and weight.
"""

import torch

from ..numerics.blocks import BLOCK, BlockScaled
from ..numerics.formats import E4M3
from ..numerics.master import Block16
from ..numerics.scaled import ScaledTensor
from . import reference_adam
from .adam_states import AdamHyper, Gradient, State

__all__ = ["AdamHyper", "adam_step"]

_KINDS = {
    "exp_avg": (torch.float32, torch.bfloat16, BlockScaled),
    "exp_avg_sq": (torch.float32, Block16, BlockScaled),
    "master": (torch.float32, torch.int16, Block16, torch.bfloat16, BlockScaled),
    "weight": (torch.bfloat16, ScaledTensor),
}


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
    """One step of Adam, in place, over n consecutive elements, n a positive multiple of 128.

    gradient: (n,) float32 or bfloat16; or (payload (R, n) float8_e4m3fn, exponents (R, n/128) uint8) as sum_blocks
    takes them, which may be strided in the first dimension. exp_avg, exp_avg_sq, master, weight: as the top of the
    file lists them, contiguous, (n,) each; an int16 master is the remainder to the weight. grad_scale: 0-d float32.
    weight_scale (0-d float32, a power of two): for a ScaledTensor, the scale to write its payload with; None keeps the
    one it has. The caller, who has the inverses of all scales, notes the new one. |w| * weight_scale is at most 448:
    beyond, it saturates. amax_out (0-d float32, not negative) becomes max(amax_out, max|w|), NaN and infinity included;
    NaN too where v is not finite.
    ValueError where a size or type is another.
    """
    n = _payload(weight).numel()
    _check(n, gradient, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master, weight=weight)
    if isinstance(weight, ScaledTensor) and weight_scale is None:
        weight_scale = weight.scale_inv.reciprocal()
    if _payload(weight).is_cuda:
        from .triton.adam import adam_step as step  # only here: see by_device.py
    else:
        step = reference_adam.adam_step
    step(gradient, exp_avg, exp_avg_sq, master, weight, hyper, grad_scale, weight_scale, amax_out)


def _payload(state: State | ScaledTensor) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else state.payload


def _check(n: int, gradient: Gradient, **states: State | ScaledTensor) -> None:
    """ValueError unless n is some whole blocks and all have n elements, of the types that adam_step takes."""
    if n % BLOCK or not n:
        raise ValueError(f"adam_step takes a positive multiple of {BLOCK} elements, not {n}")
    for name, state in states.items():
        kind, kinds = (state.dtype if isinstance(state, torch.Tensor) else type(state)), _KINDS[name]
        if kind not in kinds:
            raise ValueError(f"adam_step takes as {name} one of {', '.join(map(str, kinds))}, not {kind}")
        payload = _payload(state)
        if payload.shape != (n,) or not payload.is_contiguous():
            raise ValueError(f"adam_step takes {name} ({n},) and contiguous, not {tuple(payload.shape)}")
        if isinstance(state, (Block16, BlockScaled)) and state.exponents.shape != (n // BLOCK,):
            raise ValueError(f"adam_step takes {name} with ({n // BLOCK},) exponents: {tuple(state.exponents.shape)}")
    if isinstance(states["weight"], ScaledTensor) and _payload(states["weight"]).dtype != E4M3.dtype:
        raise ValueError(f"adam_step takes a weight of {E4M3.dtype}, not {_payload(states['weight']).dtype}")
    if isinstance(gradient, torch.Tensor):
        if gradient.shape != (n,) or gradient.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"adam_step takes a float32 or bfloat16 gradient ({n},), not {tuple(gradient.shape)}")
    else:
        payload, exponents = gradient
        if payload.shape[1:] != (n,) or exponents.shape != (len(payload), n // BLOCK):
            raise ValueError(
                f"adam_step takes gradients (R, {n}) with exponents (R, {n // BLOCK}), "
                f"not {tuple(payload.shape)} with {tuple(exponents.shape)}"
            )
