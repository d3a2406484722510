"""The weight engine: flat buffers for the weights, gradients and optimizer state of the FP8 linears.

A `Bucket` holds some linears of a model chunk, in backward order. All belong to one Megatron parameter group (the same
weight decay and learning-rate rules):

    weight      BF16 or E4M3   |  W0  |   W1   | W2 | ... | pad |     each linear's parameter is a view of it
    gradients   1 to 4 bytes   the same layout (grad_store.py)
    rows                       | rank 0 | rank 1 | ... | rank R-1 |   partition.py says where each weight starts
    master, m, v               this rank's row only (everything, without the distributed optimizer): bucket_states.py

A step: micro-batches add to the gradients. The gradients are summed over data parallelism, each row for its owner
(`launch` starts the sum, `advance` its next stage, `land` waits). One pass of Adam reads the sum and updates states and
weights (`step`). Then the other ranks' rows are gathered (`gather`, `land_weights`). All of this goes bucket by bucket.

A parameter's gradient has the same meaning as in Megatron's own buffers: the mean over data-parallel (and
context-parallel) ranks, or, with --calculate-per-token-loss, the sum divided by the number of tokens.

A weight in E4M3 has one scale, a power of two (numerics/scaling.py, `WeightScaling`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from ..comm import wire
from ..comm.reduce import BlockShards, DenseShard, GatheredShards
from ..comm.shared import ScaledShard
from ..errors import UserError
from ..numerics.blocks import BLOCK, SHARD_UNIT
from ..numerics.dither import dithered, dithered_in_bf16
from ..numerics.formats import E4M3
from ..numerics.scaled import ScaledTensor
from ..ops.adam import AdamHyper, adam_step
from ..ops.adam_states import State, read_master, write_master, write_state
from . import bucket_states
from .grad_store import GradSink, grad_store
from .owned_weight import OwnedWeight, whole_banks
from .partition import place
from .set_parts import SetParts

# Elements of a master that are made at once. A linear of 175B took seven copies of itself in FP32, more than its step.
_AT_ONCE = 1 << 24
# Elements of small weights that one call of Adam steps. Some reductions copy their sum for it: in FP32 256 MiB.
_TOGETHER = 1 << 26

Reduced = DenseShard | BlockShards | GatheredShards | ScaledShard


class Bucket:
    """The flat buffers of some linears, all with BF16 or all with E4M3 weights.

    Args:
        weights: in backward order, with BF16 parameters, which the bucket takes over. If they are stored in E4M3, they
            have consecutive places in their set's scales.
        parts: what their set shares; its data-parallel group, of R ranks, is `group`.
        on_gradient: called with a weight after each of its gradients, or None.

    Attributes:
        of: the set's process groups.
        sharded: whether each rank owns one row; else it owns all.
        scaling: the scales of E4M3 weights, or None.
        spans: (OwnedWeight, start, end) of each weight in the flat buffers, in elements.
        shard: this rank's part of the flat buffers, padding included.
        exp_avg, exp_avg_sq, master: states of the shard.
        largest: 0-d FP32, for BF16 weights: the largest magnitude that any step wrote here; not finite if a weight or
            a second moment was not. (For E4M3 weights `scaling` has it.)
    """

    def __init__(
        self, weights: list[OwnedWeight], parts: SetParts, on_gradient: Callable[[OwnedWeight], None] | None = None
    ):
        of, fp8, in_fp8 = parts.of, parts.fp8, weights[0] in parts.places
        self.weights, self.parts, self.of, self.group = weights, parts, of, of.data
        group = of.data
        self.sharded = parts.sharded and group.size() > 1
        self.scaling = scaling = parts.weight_scaling if in_fp8 else None
        self._first = parts.places[weights[0]] if in_fp8 else 0
        self._scale_inv: torch.Tensor | None = None  # of the set's E4M3 weights, as these were written last
        units = [[w.param.numel() for w in unit] for unit in whole_banks(weights)]
        assert all(w.param.numel() % BLOCK == 0 for w in weights)  # both sides are multiples of 16, by the GEMM's rules
        placed = place([sum(unit) for unit in units], group.size(), fp8.partition).cut_into(units)
        self.gaps, self.numel = placed.gaps, placed.numel
        device = weights[0].param.device
        self.grads = grad_store(group.size(), placed.row, fp8.grad_accum, device)
        self._reduced: Reduced | None = None
        self._flight: wire.Flight | None = None
        self._arrival: Any = None

        ranks, rank = (group.size(), group.rank()) if self.sharded else (1, 0)
        owned = self.numel // ranks
        self.shard = slice(rank * owned, (rank + 1) * owned)
        self.exp_avg = bucket_states.zeros(fp8.exp_avg, owned, device)
        self.exp_avg_sq = bucket_states.zeros(fp8.exp_avg_sq, owned, device)
        self.master = bucket_states.zeros(fp8.master, owned, device)
        dtype = weights[0].param.dtype if scaling is None else E4M3.dtype
        self.weight = torch.zeros(self.numel, dtype=dtype, device=device)
        self.largest = torch.zeros((), device=device)
        self.spans: list[tuple[OwnedWeight, int, int]] = []
        self._sinks: list[GradSink] = []
        if scaling is not None:
            scaling.load(self._first, [weight.param.detach() for weight in weights])
        for i, (weight, (start, stop)) in enumerate(zip(weights, placed.spans, strict=True)):
            self.spans.append((weight, start, stop))
            values = weight.param.detach()
            weight.move_to(self.weight[start:stop])
            sink = GradSink(self.grads, start, weight.param.shape, (group.rank(), *of.identity(weight, fp8.seed)))
            self._sinks.append(sink)
            load = None if scaling is None else functools.partial(self.load, i)
            weight.attach(parts, load=load, sink=sink, on_gradient=on_gradient)
            self._fill(i, values)
            if fp8.master == "fp32":  # --log-params-norm looks at it
                lo, hi = self._owned(start, stop)
                weight.param.main_param_sharded = self.sharded
                weight.param.main_param = self.part("master", lo, hi) if lo < hi else None
        self._changed()

    def _owned(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the flat buffers' start .. stop that lies in the shard, counted from the shard's start."""
        lo, hi = max(start, self.shard.start), min(stop, self.shard.stop)
        return lo - self.shard.start, hi - self.shard.start

    def pieces(self) -> list[tuple[int, int, int]]:
        """(index of a weight, start, stop) of each weight's part in the shard, counted from the shard's start."""
        cuts = [(i, *self._owned(start, stop)) for i, (_, start, stop) in enumerate(self.spans)]
        return [(i, lo, hi) for i, lo, hi in cuts if lo < hi]

    def begin_step(self, step: int) -> None:
        """The next gradient of each weight overwrites what is stored."""
        self._reduced = self._flight = None
        for weight, sink in zip(self.weights, self._sinks, strict=True):
            sink.begin_step(step)
            weight.begin_step(step + 1)

    def launch(self) -> None:
        """Start to sum the gradients over data parallelism."""
        for sink in self._sinks:
            sink.close()
        for start, stop in self.gaps:  # the padding may hold bytes that a reduction received
            self.grads.clear(start, stop - start)
        stages = self.parts.reduction.start(self)
        for look in self.parts.events.reducing:
            stages = look(self, stages)
        self._flight = wire.Flight(stages)

    def advance(self) -> None:
        """Start the next stage of the sum, if it has several."""
        if self._flight is not None:
            self._flight.advance()

    def land(self) -> None:
        """Let the current stream wait for the sum, `reduced`."""
        if self._flight is not None:
            self._reduced, self._flight = self._flight.land(), None

    def remember(self) -> Callable[[], None]:
        """As WeightSet.remember."""
        reduced, store = self._reduced, self.grads.remember()
        adds = [(sink, sink.adds) for sink in self._sinks]

        def restore() -> None:
            self._reduced = reduced
            store()
            for sink, count in adds:
                sink.adds = count

        return restore

    @property
    def is_reduced(self) -> bool:
        return self._reduced is not None

    @property
    def reduced(self) -> Reduced:
        """The sum of the gradients over data parallelism, for this rank's shard, from `land` to `step`."""
        if self._reduced is None:
            raise UserError(
                "the optimizer steps before the gradients are summed: call the model's "
                "config.finalize_model_grads_func([model]) after the backward pass, as Megatron's schedules do"
            )
        return self._reduced

    @torch.no_grad()
    def step(self, hyper: AdamHyper, grad_scale: torch.Tensor) -> None:
        """One step of Adam on the shard; `grad_scale` (0-d FP32): from the reduced sum to the clipped gradient."""
        for mine, lo, hi, (m, v, master), flat, amax in self._steps:
            weight: torch.Tensor | ScaledTensor = flat
            scale = None
            if self.scaling is not None:
                assert self._scale_inv is not None
                weight, scale = ScaledTensor(flat, self._scale_inv[mine]), self.scaling.scale[mine]
            gradient = self.reduced.gradient(lo, hi)
            adam_step(gradient, m, v, master, weight, hyper, grad_scale, scale, amax)
        self._reduced = None
        self._changed()

    @functools.cached_property
    def _steps(self) -> list[tuple[slice, int, int, tuple[State, State, State], torch.Tensor, torch.Tensor]]:
        """The calls of Adam in a step, with views that are made once: (places in the scales, start, stop, the averages
        and the master, the weights, their amax). Without scales, one call for the whole shard."""

        def parts(lo: int, hi: int) -> tuple[State, State, State]:
            return self.part("exp_avg", lo, hi), self.part("exp_avg_sq", lo, hi), self.part("master", lo, hi)

        flat = self.weight[self.shard]
        if self.scaling is None:
            return [(slice(0), 0, len(flat), parts(0, len(flat)), flat, self.largest)]
        places = ((slice(self._first + i, self._first + j), lo, hi) for i, j, lo, hi in self._runs())
        return [(mine, lo, hi, parts(lo, hi), flat[lo:hi], self.scaling.amax[mine]) for mine, lo, hi in places]

    def _runs(self) -> list[tuple[int, int, int, int]]:
        """The pieces of E4M3 weights that Adam steps together, as it demands them: (first weight, the one after the
        last, start, stop). Neighbours of one size, as a bank's experts are; each other piece alone."""
        runs: list[tuple[int, int, int, int]] = []
        for i, lo, hi in self.pieces():
            first, after, start, stop = runs[-1] if runs else (i, i, lo, lo)
            alike = (hi - lo) * (i - first) == lo - start and (hi - lo) % SHARD_UNIT == 0
            if alike and (after, stop) == (i, lo) and hi - start <= _TOGETHER:
                runs[-1:] = [(first, i + 1, start, hi)]
            else:
                runs.append((i, i + 1, lo, hi))
        return runs

    def gather(self) -> None:
        """Start to gather the other ranks' rows of the weights."""
        if self.sharded:
            self._arrival = wire.all_gather_weights(self.weight, self.group)

    def land_weights(self) -> None:
        """Let the current stream wait for `gather`."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        for weight in self.weights:
            weight.gathered()

    def _changed(self) -> None:
        """Tell the weights that their values or scales have changed."""
        if self.scaling is not None:
            self._scale_inv = self.scaling.scale_inv
        for at, weight in enumerate(self.weights, self._first):
            weight.changed(self._scale_inv, at)

    @torch.no_grad()
    def load(self, i: int, values: torch.Tensor) -> None:
        """Set weight i, and this rank's part of its master, to `values` (N, K) of any float type.

        If the weight is E4M3, it is collective over the scaling's group.
        """
        if self.scaling is not None:
            self.scaling.load(self._first + i, [values.to(self.weight.device)])
        self._fill(i, values)
        self._changed()

    @torch.no_grad()
    def _fill(self, i: int, values: torch.Tensor) -> None:
        """`load`, but an E4M3 weight has its scale, and the weights are not told."""
        weight, start, stop = self.spans[i]
        flat = values.to(self.weight.device).flatten()
        if self.scaling is None:
            self.weight[start:stop] = flat
        else:
            scale = self.scaling.scale[self._first + i]
            if weight.config.draws_masters:
                flat = dithered(flat, weight.identity, scale)
            self.weight[start:stop] = ops.quantize(flat, E4M3, scale)
        lo, hi = self._owned(start, stop)
        if lo < hi:
            mine = flat[lo + self.shard.start - start : hi + self.shard.start - start]
            self.encode(i, lo, hi, mine.float())

    def part(self, name: str, lo: int, hi: int):
        """Views of the state `name`, exp_avg, exp_avg_sq or master, in the shard's lo .. hi."""
        return bucket_states.part(getattr(self, name), lo, hi)

    def _stored(self, i: int, lo: int, hi: int) -> torch.Tensor | ScaledTensor:
        """Weight i in the shard's lo .. hi, with the scale that it was written with."""
        weight, stored = self.weight[self.shard][lo:hi], self.weights[i].stored
        return weight if stored is None else ScaledTensor(weight, stored.scale_inv)

    def read(self, name: str) -> torch.Tensor:
        """The values (n,) FP32 of a state of the shard: `name` is master, exp_avg or exp_avg_sq."""
        if name == "master":
            return self.masters()
        return bucket_states.read_average(getattr(self, name), is_square=name == "exp_avg_sq")

    def write(self, name: str, i: int, lo: int, hi: int, values: torch.Tensor) -> None:
        """Set weight i's part of a state, in the shard's lo .. hi, to `values` FP32 of a checkpoint.

        The weight is loaded already. A master in FP32 or with a remainder sets the weight too. A coarser one leaves it:
        weights are rounded from the values that Adam computed, not from those that it stored.
        """
        part = self.part(name, lo, hi)
        if name != "master":
            bucket_states.write_average(part, values, is_square=name == "exp_avg_sq")
        elif self.parts.fp8.master in ("fp32", "remainder"):
            self.encode(i, lo, hi, values)
        else:
            write_state(part, values)

    def scale_and_amax(self, i: int) -> torch.Tensor:
        """(2,): scale and amax of the E4M3 weight i between two steps."""
        assert self.scaling is not None
        self.scaling.wait()
        return torch.stack([self.scaling.scale[self._first + i], self.scaling.amax[self._first + i]])

    def rescale(self, i: int, scale: torch.Tensor, amax: torch.Tensor) -> None:
        """Give the E4M3 weight i the scale and amax that it had when it was saved. Its values stay the same."""
        weight, start, stop = self.spans[i]
        assert self.scaling is not None and weight.stored is not None
        values = weight.stored.dequantize().flatten()
        self.scaling.amax[self._first + i] = amax
        self.scaling.set_scales(self._first + i, scale.view(1))
        self.weight[start:stop] = ops.quantize(values, E4M3, scale)
        self._changed()

    def encode(self, i: int, lo: int, hi: int, values: torch.Tensor) -> None:
        """Round `values` FP32 to both the master and the weight, of weight i in the shard's lo .. hi."""
        scale = None if self.scaling is None else self.scaling.scale[self._first + i]
        for at in range(lo, hi, _AT_ONCE):
            stop = min(at + _AT_ONCE, hi)
            piece = self.weight[self.shard][at:stop]
            weight = piece if scale is None else ScaledTensor(piece, scale.reciprocal())
            write_master(self.part("master", at, stop), weight, values[at - lo : stop - lo], scale)

    def masters(self) -> torch.Tensor:
        """The shard's master weights in FP32, a new tensor; zeros in the padding."""
        values = torch.zeros(self.shard.stop - self.shard.start, device=self.weight.device)
        for i, lo, hi in self.pieces():
            values[lo:hi] = read_master(self.part("master", lo, hi), self._stored(i, lo, hi))
        return values

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Make masters from BF16 weights that a checkpoint has set (`load` makes those of E4M3 weights). All weights
        are here, and none changes."""
        if self.scaling is None:
            for i, lo, hi in self.pieces():
                weight, start, stop = self.spans[i]
                whole, first, last = self.weight[start:stop], *(at + self.shard.start - start for at in (lo, hi))
                drawn = weight.config.draws_masters
                mine = dithered_in_bf16(whole, weight.identity, first, last) if drawn else whole[first:last].float()
                self.encode(i, lo, hi, mine)
            self._changed()

    @torch.no_grad()
    def unsharded(self, values: torch.Tensor) -> torch.Tensor:
        """A shard's FP32 values -> the whole flat buffer's, on every rank (for checkpoints)."""
        if not self.sharded:
            return values
        full = values.new_empty(self.numel)
        torch.distributed.all_gather_into_tensor(full, values.contiguous(), group=self.group)
        return full

    def buffers(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor this bucket holds, by kind."""
        copies = [t for w in self.weights for t in w.cached_tensors()]
        held = {"weight": [self.weight], "weight fp8 copy": copies, "grad": self.grads.tensors}
        for name in ("master", "exp_avg", "exp_avg_sq"):
            held[name] = list(bucket_states.tensors(getattr(self, name)).values())
        return held
