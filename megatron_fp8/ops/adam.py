"""One step of Adam on low-precision states, in one pass that reads and writes each state once.

g = gradient * grad_scale, and t is the step's number. All is float32, and each operation is rounded by itself (on a GPU
the update in the last line is approximate, to 2^-21 of itself: see triton/adam.py). The order is that of
torch.optim.Adam and AdamW:

    g = g + weight_decay * w                                        only if the decay is not decoupled (L2)
    m = beta1 * m + (1 - beta1) * g                                 exp_avg
    v = beta2 * v + (1 - beta2) * g^2                               exp_avg_sq
    w = w * (1 - lr * weight_decay)                                 only if the decay is decoupled (AdamW)
    w = w - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

m, v and w are then rounded to their stored formats, to nearest unless said otherwise below:

    gradient     float32, bfloat16, or the PackedBlocks rows of R ranks, summed here in float32, in rank order
    exp_avg      float32, bfloat16, BlockScaled
    exp_avg_sq   float32, Block16, BlockScaled (which holds sqrt(v))
    master       float32, int16 (the remainder to the weight), Block16, bfloat16, BlockScaled
    weight       bfloat16, or a ScaledTensor of E4M3 whose scale is a power of two

A BlockScaled exp_avg rounds the subnormals of its block towards zero. Rounded to nearest with beta1 = 0.9, a value of
four units would stay forever (3.6 rounds to 4): a weight without gradients would keep drifting, in the end by
lr * m / eps, because v goes to zero and m does not.

A Block16 exp_avg_sq is rounded by a draw if 1 - beta2 < 2^-7. At 0.999 v changes by 0.001 of itself a step, one or two
of FP16's last bits. To nearest, a part of that is lost, in every step on the same side. The draw makes v a number of 11
bits, up or down:

    noise = (a * bits(v) + b mod 2^32) >> 19        13 bits, as many as v loses
    v     = bits(v) + noise, with 13 zeros at the end

The words a (odd) and b are a hash of the step's number. b is uniform, so noise is uniform for each v. So v goes up with
a probability that is its distance from the number below, in ulps, and the mean of the stored v is v, after any history.
With a, unequal v draw unequal noise; equal v go the same way. The draw takes nothing but v and the step's number: it is
the same in every layout, and after a resume. All steps' errors add up to a standard deviation of 2^-11 to 2^-10 of
v / sqrt(12 (1 - beta2)), 0.6 % at 0.999. The v of normal gradients varies by 3 % there. Below 2^-29 of its block's
maximum FP16 has fewer bits. To these it is rounded to nearest still.

numerics/master.py says what each format holds and loses. The weight is rounded from w itself, not from the stored
master: to nearest, ties to even (with a remainder to BF16: ties away from zero). The step's number, the rates and the
bias corrections are host values. The gradient's scale, which includes the clip, and the weight's scales are read on the
device, so the host does not wait.

Bytes read and written per element, for BlockScaled m, Block16 v, and the remainder to a BF16 weight:

    gradient 1 (R = 1)    m 1 + 1    v 2 + 2    remainder 2 + 2    weight 2 + 2    exponents 5/128    15.04 in all

An E4M3 weight makes it 13.04. FP32 states, an FP32 gradient and a BF16 weight that is only written move
4 + 8 + 8 + 8 + 2 = 30.

A NaN or an infinity is never hidden: a NaN gradient makes m, v, master and weight NaN.

Weights in E4M3 that lie side by side, and have one size, are stepped by one call, each with its own scale. A layer of
128 experts has 256 of them: one by one, the host would launch them more slowly than a GPU steps them.

On a GPU the kernel in triton/adam.py makes the step. Elsewhere it is plain PyTorch, which is also the kernel's
reference. There each float32 operation in the code is rounded by itself. addcmul, or add with alpha, would round only
once on some machines, but the kernel rounds twice. The square root is computed in float64, to be correctly rounded:
torch's float32 root may be an ulp wrong if it comes from MKL.
"""

import torch

from ..numerics.blocks import BLOCK, SHARD_UNIT, BlockScaled, block_scales
from ..numerics.formats import E4M3
from ..numerics.master import Block16
from ..numerics.scaled import ScaledTensor
from .adam_states import AdamHyper, Gradient, State, read_master, read_state, write_master, write_state
from .reference import quantize_blocks, sum_blocks

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

    Args:
        gradient: (n,) float32 or bfloat16; or (payload (R, n) float8_e4m3fn, exponents (R, n/128) uint8) as for
            sum_blocks, which may be strided in the first dimension.
        exp_avg, exp_avg_sq, master, weight: (n,) each, contiguous, of the types listed at the top of the file. An int16
            master is the remainder to the weight.
        grad_scale: 0-d float32.
        weight_scale: for a ScaledTensor, the scale of the payload to write, 0-d float32, a power of two; None keeps the
            current one. |w| * weight_scale beyond 448 saturates. The step does not write scale_inv: the caller keeps
            the inverses of all scales.
        amax_out: 0-d float32, not negative; becomes max(amax_out, max|w|), NaN and infinity included, and NaN if v is
            not finite.

    If the ScaledTensor is E weights of n / E elements, a multiple of 2,048, its scale_inv, weight_scale and amax_out
    are (E,) each; of them only scale_inv may be strided.

    ValueError if a size or type is not one of these.
    """
    n = _payload(weight).numel()
    _check(n, gradient, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master, weight=weight)
    if isinstance(weight, ScaledTensor) and weight_scale is None:
        weight_scale = weight.scale_inv.reciprocal()
    if _payload(weight).is_cuda:
        from .triton.adam import adam_step as step  # a machine without a GPU needs no Triton

        step(gradient, exp_avg, exp_avg_sq, master, weight, hyper, grad_scale, weight_scale, amax_out)
        return
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
    if isinstance(exp_avg_sq, Block16) and hyper.draw:
        v = _drawn(v, *hyper.draw)
    write_state(exp_avg_sq, root if isinstance(exp_avg_sq, BlockScaled) else v)
    write_master(master, weight, w, weight_scale)
    if amax_out is not None:
        magnitude = torch.where(v < torch.inf, w, torch.nan).abs()
        torch.maximum(amax_out, magnitude.view(*amax_out.shape, -1).amax(-1), out=amax_out)


def _towards_zero(m: torch.Tensor) -> torch.Tensor:
    """m (n,), with elements that are subnormal in their E4M3 block truncated to multiples of 2^-9 * 2^e."""
    exponents = quantize_blocks(m).exponents
    unit = (block_scales(exponents) * 2.0**-9).repeat_interleave(BLOCK)
    steps = m / unit
    return torch.where(steps.abs() < 8, steps.trunc() * unit + 0.0, m)  # + 0.0 makes -0 positive


def _drawn(v: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """v (n,) rounded up or down to 11 significant bits; see the top of the file. An infinity or a NaN stays."""
    bits = v.view(torch.int32)
    noise = ((bits.long() * a + b) >> 19) & 0x1FFF
    return torch.where(v < torch.inf, ((bits + noise.int()) & ~0x1FFF).view(torch.float32), v)


def _read_gradient(gradient: Gradient, grad_scale: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        return gradient.float() * grad_scale
    payload, exponents = gradient
    return sum_blocks(payload, exponents, grad_scale.new_empty(payload.shape[1]), grad_scale)


def _payload(state: State | ScaledTensor) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else state.payload


def _check(n: int, gradient: Gradient, **states: State | ScaledTensor) -> None:
    """ValueError unless n is a positive multiple of 128, and every state has n elements and an allowed type."""
    if n % BLOCK or not n:
        raise ValueError(f"adam_step takes a positive multiple of {BLOCK} elements, not {n}")
    for name, state in states.items():
        kind, kinds = (state.dtype if isinstance(state, torch.Tensor) else type(state)), _KINDS[name]
        if kind not in kinds:
            raise ValueError(f"adam_step takes a {name} of type {' or '.join(map(str, kinds))}, not {kind}")
        payload = _payload(state)
        if payload.shape != (n,) or not payload.is_contiguous():
            raise ValueError(f"adam_step takes {name} ({n},), contiguous, not {tuple(payload.shape)}")
        if isinstance(state, (Block16, BlockScaled)) and state.exponents.shape != (n // BLOCK,):
            raise ValueError(f"adam_step takes {name} exponents ({n // BLOCK},), not {tuple(state.exponents.shape)}")
    if isinstance(weight := states["weight"], ScaledTensor):
        if weight.payload.dtype != E4M3.dtype:
            raise ValueError(f"adam_step takes a weight of {E4M3.dtype}, not {weight.payload.dtype}")
        count = weight.scale_inv.numel()
        if count > 1 and n % (count * SHARD_UNIT):
            raise ValueError(f"adam_step takes weights of a multiple of {SHARD_UNIT} elements each, not {count} in {n}")
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
