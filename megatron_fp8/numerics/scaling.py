"""How the scales of ScaledTensors are chosen: from the tensor's own amax, or delayed, from the amax of earlier steps.

    scale = fmt.max / amax / 2^margin            amax = max|x|, all float32

This is one division, correctly rounded (max * 2^-margin is exact). The result is held within 2^-126 .. 2^126, so that
neither it nor its reciprocal is infinite or denormal. If amax is zero it says nothing about the scale, and if it is not
finite the step is lost: in both cases the previous scale stays, or 1. Quantising with a finite scale keeps an infinity
or a NaN visible. A delayed slot that had no amax in the first step, as that of an expert without a token, has no scale
before. It takes the smallest scale of its kind, on all ranks that have experts of the same layers: with 1 a gradient
below 2^-17 would be cast to zero.

Delayed scaling saves the pass over x that would compute amax before the cast: it casts with an earlier scale, and the
cast computes amax on the way. During a step every slot (one tensor of one layer) collects its maximum over the
micro-batches. `update` then takes the maximum over the ranks that share the tensor, in one reduction for all slots, and
computes the next scales from the newest amax or the largest of the history. A value beyond its scale's range saturates.

A stored weight's scale is chosen before the step that writes the weight, because the optimizer updates and encodes its
shards in one pass (`WeightScaling`). It is a power of two, so that a new scale changes no significand:

    scale = 2^floor(log2(fmt.max / 2^margin / (amax + growth)))

amax is the weight's after the last step, the maximum over all ranks that hold a shard of it. growth bounds the amount
that one step of Adam can add to any element. With r = beta1^2 / beta2 < 1, the Cauchy-Schwarz inequality gives

    |m_t| / sqrt(v_t) <= (1 - beta1) / sqrt(1 - beta2) * sqrt((1 - r^t) / (1 - r))

growth is lr times this bound with Adam's bias corrections, times 1.1 (1 + 2^-4 / (1 - beta1)), because an m in E4M3 may
be wrong by 2^-4 of itself in each of about 1 / (1 - beta1) steps. So a growing weight does not saturate, unless v is
stored so coarsely that it becomes zero while m does not. amax * scale lies in (fmt.max / 4, fmt.max] for
growth <= amax.
Source: Micikevicius et al., arXiv 2209.05433, and the recipe of NVIDIA's Transformer Engine documentation.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import all_reduce_largest, gathered
from .formats import Format

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


def _scale(target: torch.Tensor, amax: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    scale = (target / amax).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    known = (amax > 0) & (amax < torch.inf)  # false for NaN
    return torch.where(known, scale, 1.0 if previous is None else previous)


def compute_scale(
    amax: torch.Tensor, fmt: Format, margin: int = 0, previous: torch.Tensor | None = None
) -> torch.Tensor:
    """The scale that maps `amax` (float32, any shape) to fmt.max / 2^margin, as a new float32 tensor.

    If amax is zero or not finite, the scale is `previous` (amax's shape), or 1. Computed on the device, without
    synchronising. margin: an integer within -100 .. 100, so that fmt.max / 2^margin is within float32.
    """
    return _scale(torch.full_like(amax, fmt.max * 2.0**-margin), amax, previous)


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy with each element at a multiple of 16 bytes; cuBLASLt refuses scale pointers that are not aligned so."""
    return torch.nn.functional.pad(values[:, None], (0, 3))[:, 0]


class Slots:
    """The scales of n tensors on one device, one slot each.

    A slot's 0-d views are made once for each set of vectors, to save host time at each use.

    amax (n,): the step's running maximum; kernels write it in place. scale (n,): replaced and never written, so that a
    scale taken earlier keeps its value. scale_inv (n,): the inverse.
    """

    def __init__(self, count: int, device: torch.device | str):
        self.amax = torch.zeros(count, device=device)
        self._set(torch.ones(count, device=device))
        self._viewed: tuple[torch.Tensor | None, ...] = (None, None, None)
        self._views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def _set(self, scale: torch.Tensor) -> None:
        self.scale, self.scale_inv = scale, _aligned(scale.reciprocal())

    def slot(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slot i, three 0-d tensors: its current scale, which keeps its value when the next one is set; the inverse,
        aligned for a GEMM; the step's maximum, for kernels to write."""
        scale, inverse, amax = self._viewed
        if self.scale is not scale or self.scale_inv is not inverse or self.amax is not amax:
            self._viewed = vectors = self.scale, self.scale_inv, self.amax
            self._views = list(zip(*(vector.unbind() for vector in vectors), strict=True))
        return self._views[i]

    def slot_scale(self, i: int) -> torch.Tensor:
        """The first of `slot`."""
        return self.slot(i)[0]

    def slot_amax(self, i: int) -> torch.Tensor:
        """The third of `slot`."""
        return self.slot(i)[2]


class DelayedScaling(Slots):
    """The amax history and the scales of n tensors with the given Formats.

    amax_history (history_len, n), newest row first; history_len is 1 or more. algo: "most_recent" or "max". Until the
    first update (`warm` is False) the scales are 1 and must not be used: callers compute them from the tensor's amax.

    kinds: slots i and i + kinds are of one kind (inputs of two linears) and of like magnitude; 0: no two are.
    others: ranks that have other slots of these kinds, or None. The first update is collective over them.
    """

    def __init__(
        self,
        formats: list[Format],
        history_len: int,
        algo: str,
        margin: int,
        device: torch.device | str,
        kinds: int = 0,
        others: dist.ProcessGroup | None = None,
    ):
        assert algo in ("most_recent", "max") and history_len >= 1  # the flags' checks see to it
        super().__init__(len(formats), device)
        self.algo, self._kinds, self._others = algo, kinds or len(formats), others
        self.warm = False
        self.amax_history = torch.zeros(history_len, len(formats), device=device)
        self._largest = torch.tensor([fmt.max for fmt in formats], device=device)
        self._target = self._largest * 2.0**-margin

    def record(self, i: int, amax: torch.Tensor) -> None:
        """Include `amax` (0-d float32) in slot i's maximum of this step; NaN and infinity stay until update."""
        mine = self.slot_amax(i)
        torch.maximum(mine, amax, out=mine)

    def clipped(self, factor: float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Which tensors of this step have a value beyond `factor` times the range of their scale, or not finite.

        Returns (n,) bool, combined over `group` (None: this rank alone). Call it before `update`.
        """
        fits = self.amax * self.scale <= self._largest * factor
        found = (~fits).to(torch.uint8)  # true for NaN
        if group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return found.bool()

    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """End the step: reduce amax over `group` (None: this rank alone), add it to the history, set new scales.

        One all_reduce for all slots, without host synchronisation; in the first step a second one, over the `others`.
        An amax that is not finite enters the history as zero, so that the lost step affects neither the next scale nor
        the maximum of the history.
        """
        if group is not None:
            all_reduce_largest(self.amax, group)
        newest = self.amax.nan_to_num(nan=0.0, posinf=0.0)
        self.amax_history = torch.cat([newest[None], self.amax_history[:-1]])
        amax = newest if self.algo == "most_recent" else self.amax_history.amax(0)
        self._set(_scale(self._target, amax, self.scale if self.warm else self._of_others(amax)))
        self.amax.zero_()
        self.warm = True

    def _of_others(self, amax: torch.Tensor) -> torch.Tensor:
        """(n,): the smallest scale of those slots of the same kind whose `amax` is known; 1 if there is none."""
        known = torch.where(amax > 0, self._target / amax, torch.inf).view(-1, self._kinds).amin(0)
        if self._others is not None:
            dist.all_reduce(known, op=dist.ReduceOp.MIN, group=self._others)
        smallest = known.clamp(SMALLEST_SCALE, LARGEST_SCALE)
        return torch.where(known < torch.inf, smallest, 1.0).repeat(len(amax) // self._kinds)

    def load(self, amax_history: torch.Tensor, scale: torch.Tensor, warm: bool) -> None:
        """Begin a step with this history and these scales, without copying them. warm: whether they may be used.

        Collective over the `others`: if one of them has a slot that is new, all begin with a first step.
        """
        self.amax_history = amax_history
        self.warm = warm if self._others is None else all(gathered(warm, self._others))
        self.amax.zero_()
        self._set(scale)


def power_of_two_scale(
    amax: torch.Tensor, fmt: Format, margin: int = 0, previous: torch.Tensor | None = None
) -> torch.Tensor:
    """compute_scale's result, rounded down to a power of two."""
    scale = compute_scale(amax, fmt, margin, previous)
    return torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)


def adam_growth(lr: float, beta1: float, beta2: float, step: int) -> float:
    """The most that step number `step` (from 1) of Adam can add to a weight's magnitude (bound at the top of the file).

    Needs beta1^2 < beta2.
    """
    r = beta1**2 / beta2
    first = (1 - beta1) / (1 - beta1**step)
    second = math.sqrt((1 - beta2**step) / (1 - beta2))
    rounding = 1.1 * (1 + 2.0**-4 / (1 - beta1))
    return lr * rounding * first * second * math.sqrt((1 - r**step) / (1 - r))


class WeightScaling(Slots):
    """Power-of-two scales of stored weights, one slot each, chosen before the step that encodes with them.

    amax: max|w| of the last step. group: the ranks that hold shards of the weights.
    """

    def __init__(self, weights: int, fmt: Format, margin: int, group, device: torch.device | str):
        super().__init__(weights, device)
        self.fmt, self.margin, self.group = fmt, margin, group
        self._handle: Any = None

    def begin_step(self, growth: float) -> None:
        """Choose the scales of a step that may add `growth` to any |w|, and zero `amax` for the step."""
        self.wait()
        self._set(power_of_two_scale(self.amax + growth, self.fmt, self.margin, self.scale))
        self.amax.zero_()

    def end_step(self) -> None:
        """Start to reduce the step's amax over the group; the next step waits for it."""
        self._handle = all_reduce_largest(self.amax, self.group, async_op=True)

    def wait(self) -> None:
        """Make the current stream wait until `amax` is reduced."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def load(self, first: int, each: Sequence[torch.Tensor]) -> None:
        """Set the amaxes of the weights from `first` on to those of `each`, reduced over the group, and their scales to
        the largest that fit."""
        amax = torch.stack([torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32) for values in each])
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        self.amax[first : first + len(each)] = amax
        self.set_scales(first, power_of_two_scale(amax, self.fmt, self.margin))

    def set_scales(self, first: int, scales: torch.Tensor) -> None:
        """Give the weights from `first` on other scales (n,), powers of two."""
        new = self.scale.clone()
        new[first : first + len(scales)] = scales
        self._set(new)
