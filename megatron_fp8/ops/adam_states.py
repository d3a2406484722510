"""Adam's states: their types, and their conversion to and from float32, in plain PyTorch on any device.

Checkpoints and the reference step use the conversions. The GPU's step does not: its kernel converts each format in
registers (triton/adam.py).
"""

import functools
import math
from dataclasses import dataclass
from typing import TypeGuard

import torch

from ..numerics.blocks import BlockScaled
from ..numerics.formats import E4M3, encode
from ..numerics.master import Block16, join_bf16, join_e4m3, quantize_block16, split_bf16, split_e4m3
from ..numerics.noise import noise_seed
from ..numerics.scaled import ScaledTensor
from .reference import quantize_blocks

type State = torch.Tensor | Block16 | BlockScaled
type Gradient = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_SLOW = 2.0**-7  # a second moment that changes by less of itself a step is rounded by a draw, if it is a Block16


@dataclass(frozen=True)
class AdamHyper:
    """The scalar arguments of one step, named as in torch.optim.Adam.

    step: 1 for the first. decoupled: weight decay as in AdamW; else as in Adam, added to the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True

    @property
    def step_size(self) -> float:
        """lr divided by the bias correction of exp_avg."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """The factor that corrects the bias of sqrt(exp_avg_sq)."""
        return 1 / math.sqrt(1 - self.beta2**self.step)

    @functools.cached_property
    def draw(self) -> tuple[int, int] | None:
        """The 32-bit words a and b of the draw that rounds a Block16 exp_avg_sq (adam.py); None: to nearest."""
        if 1 - self.beta2 >= _SLOW:
            return None
        a, b = noise_seed(self.step)
        return a | 1, b


def is_remainder(master: State) -> TypeGuard[torch.Tensor]:
    """Whether the master is stored as its remainder to the weight (int16), not as a number of its own."""
    return isinstance(master, torch.Tensor) and master.dtype == torch.int16


def read_state(state: State) -> torch.Tensor:
    """A state's values, (n,) float32."""
    return state.float() if isinstance(state, torch.Tensor) else state.dequantize()


def write_state(state: State, values: torch.Tensor) -> None:
    """Round `values` (n,) float32 to the state's format, in place."""
    if isinstance(state, torch.Tensor):
        state.copy_(values)
        return
    new = quantize_block16(values) if isinstance(state, Block16) else quantize_blocks(values)
    state.payload.copy_(new.payload)
    state.exponents.copy_(new.exponents)


def read_master(master: State, weight: torch.Tensor | ScaledTensor) -> torch.Tensor:
    """The master's values (n,) float32; a remainder is joined with its weight. If that is E weights side by side, its
    scale_inv is (E,)."""
    if not is_remainder(master):
        return read_state(master)
    if isinstance(weight, ScaledTensor):
        return join_e4m3(weight.payload, master, _each(weight.scale_inv, master))
    return join_bf16(weight, master)


def write_master(
    master: State, weight: torch.Tensor | ScaledTensor, w: torch.Tensor, weight_scale: torch.Tensor | None
) -> None:
    """Write master and weight, in place, from w (n,) float32. weight_scale: of an E4M3 weight, or (E,) of E."""
    if weight_scale is not None:
        weight_scale = _each(weight_scale, w)
    if is_remainder(master):
        scaled = isinstance(weight, ScaledTensor)
        new, remainder = split_e4m3(w, weight_scale) if scaled else split_bf16(w)
        master.copy_(remainder)
    else:
        new = encode(w * weight_scale, E4M3) if isinstance(weight, ScaledTensor) else w
        write_state(master, w)
    (weight.payload if isinstance(weight, ScaledTensor) else weight).copy_(new)


def _each(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One weight's scale, 0-d, as it is; of E weights (E,) the scale of each of `values`, which are theirs in turn."""
    return scale.repeat_interleave(len(values) // len(scale)) if scale.dim() else scale
