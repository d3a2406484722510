"""A bank: the weights of the same linear of a rank's experts, as one grouped product reads and trains them.

Each is still an owned weight of its own, with its own scales, gradient and state (owned_weight.py). The bank casts the
rows of all experts at once, each expert's with its own weight's scale, and takes all their gradients from one product.
Both give what the weights, one after the other, would have done: the same amaxes, and the same sums in the same stores.
"""

from collections.abc import Sequence

import torch

from .. import ops
from ..gemm import grouped
from ..numerics.formats import Format, decode
from ..numerics.scaling import compute_scale
from ..ops.groups import Groups, Made
from .grad_store import take_beside
from .owned_weight import INPUT, OwnedWeight, scales_of


class Bank:
    """weights: the experts', in order, all of one shape (N, K)."""

    def __init__(self, weights: Sequence[OwnedWeight]):
        self.weights = list(weights)
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None  # of INPUT and GRAD

    @property
    def ready(self) -> bool:
        """Whether the next pass may be grouped: all are trained in FP8, with delayed scales, and there is no observer,
        who would be shown one expert at a time. Raises as OwnedWeight.makes_gradient."""
        first = self.weights[0]
        scaling, events = first.casts.scaling, first.events
        if scaling is None or not first.config.wgrad:
            return False
        if events.cast or events.forward or events.backward or events.gradient or events.gradient_added:
            return False
        alike = (weight.fp8 and weight.casts.scaling is scaling for weight in self.weights)
        return all(alike) and all(weight.makes_gradient() for weight in self.weights)

    @property
    def scaled(self) -> bool:
        """Whether delayed scales are known: not in the first step, whose casts take them from their own amaxes."""
        scaling = self.weights[0].casts.scaling
        return scaling is not None and scaling.warm

    def await_gradients(self) -> None:
        """A backward pass will bring each weight one more gradient."""
        for weight in self.weights:
            weight.await_gradient()

    def quantized(self) -> grouped.GroupedWeights:
        """Each weight (N, K) in FP8, and all in one memory: those stored in FP8 lie side by side in their bucket, and
        so do their scales. They are taken together: views of each would be hundreds a layer."""
        if self.weights[0].stored is None:
            self._quantize()
            return grouped.GroupedWeights.of([weight.quantized() for weight in self.weights])
        for weight in self.weights:
            weight.arrive()
        payloads = grouped.together([weight.param.data for weight in self.weights])
        return grouped.GroupedWeights(payloads, scales_of(self.weights).contiguous())

    def _quantize(self) -> None:
        """Quantise BF16 weights, if one of them has changed: each would else have its copy in memory of its own, and a
        grouped product would first copy them all."""
        for weight in self.weights:
            weight.arrive()
        if not any(weight.outdated for weight in self.weights):
            return
        for weight in self.weights:
            weight.drop_copies()
        param, fmt = self.weights[0].param, self.weights[0].config.forward_format
        room = torch.empty(len(self.weights), *param.shape, dtype=fmt.dtype, device=param.device)
        for weight, at in zip(self.weights, room, strict=True):
            weight.quantize(at)

    def transposed(self, w: grouped.GroupedWeights) -> grouped.GroupedWeights:
        """Each W^T (K, N) of what `quantized` gave, in one memory, valid until the next call on the same stream."""
        first, (experts, n, k) = self.weights[0], w.payload.shape
        if not first.config.keep_transpose_cache:
            room = first.scratch.like(w.payload, (experts, k, n))
            ops.transpose_each(w.payload, room)
            return grouped.GroupedWeights(room, w.scale_inv)
        if not all(weight.has_transposed for weight in self.weights):
            room = w.payload.new_empty(experts, k, n)
            ops.transpose_each(w.payload, room)
            for weight, at in zip(self.weights, room, strict=True):
                weight.keep_transposed(at)
        kept = zip(self.weights, w.each, strict=True)
        return grouped.GroupedWeights.of([weight.transposed(one) for weight, one in kept])

    def cast(
        self, x: torch.Tensor | Made, role: int, groups: Groups, *, rows: bool, columns: bool, training: bool
    ) -> grouped.GroupedTensor:
        """Cast x, (R, K) as given or (R', K) padded, to the format of its role. In training its amaxes count."""
        scaling, fmt = self.weights[0].casts.scaling, self._format(role)
        assert scaling is not None
        device = groups.counts.device
        slots = self._slots_on(device)[role]
        largest = torch.zeros(len(slots), device=device)
        made = Made(ops.quantize_groups, (x,)) if isinstance(x, torch.Tensor) else x
        if scaling.warm:
            scale, scale_inv = scaling.scale[slots], scaling.scale_inv[slots]
        else:  # a cast for the sake of its amaxes
            made.cast(*made.of, groups, fmt, torch.ones_like(largest), rows=True, columns=False, amax_out=largest)
            scale = compute_scale(largest, fmt, margin=self.weights[0].config.margin)
            scale_inv = scale.reciprocal()
        how = {"rows": rows, "columns": columns, "amax_out": largest if training else None}
        payload, payload_t = made.cast(*made.of, groups, fmt, scale, **how)
        if training:
            scaling.amax[slots] = torch.maximum(scaling.amax[slots], largest)
        return grouped.GroupedTensor(groups, scale_inv, payload, payload_t, (made, scale))

    def columns_again(self, made: Made, role: int, groups: Groups, scale: torch.Tensor) -> torch.Tensor:
        """The columns (K, R') of rows that `cast` has cast before, with the scale that it had."""
        _, columns = made.cast(*made.of, groups, self._format(role), scale, rows=False, columns=True)
        return columns

    def send(
        self, x: torch.Tensor, role: int, source: torch.Tensor, expert: torch.Tensor, *, training: bool
    ) -> torch.Tensor:
        """Rows of x (T, K) in their role's format (R, K), each for an expert of any rank and with that one's scale.

        source, expert: (R,), the row of x and the expert's number among those of all ranks. In training the amaxes
        count. The first call of a step is collective over the ranks of expert parallelism.
        """
        first = self.weights[0]
        assert first.casts.dispatch is not None
        scale, largest = first.casts.dispatch.of(first.casts.slots, role)
        amax_out = largest if training else None
        return ops.quantize_routed(x, source, expert, self._format(role), scale, amax_out=amax_out)

    def received(
        self, codes: torch.Tensor, role: int, groups: Groups, *, rows: bool, columns: bool
    ) -> grouped.GroupedTensor:
        """As `cast`, of rows (R, K) that some ranks' `send` has made for these experts in this step."""
        payload, payload_t = ops.spread_groups(codes, groups, rows=rows, columns=columns)
        return grouped.GroupedTensor(groups, self._scale_inv(codes.device, role), payload, payload_t)

    def decoded(self, codes: torch.Tensor, role: int, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values (R, K) of such rows, counts (E,) of each expert. With the same scales they are cast to the same
        codes again."""
        expert = torch.repeat_interleave(torch.arange(len(counts)), counts.cpu()).to(codes.device)
        return (decode(codes) * self._scale_inv(codes.device, role)[expert][:, None]).to(dtype)

    def _format(self, role: int) -> Format:
        config = self.weights[0].config
        return config.forward_format if role == INPUT else config.grad_format

    def _scale_inv(self, device: torch.device, role: int) -> torch.Tensor:
        scaling = self.weights[0].casts.scaling
        assert scaling is not None
        return scaling.scale_inv[self._slots_on(device)[role]]

    def _slots_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._slots is None:
            pairs = torch.tensor([weight.casts.slots for weight in self.weights], device=device)
            self._slots = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        return self._slots

    def take_gradients(self, dy: grouped.GroupedTensor, x: grouped.GroupedTensor) -> None:
        """Take every weight's gradient of one backward pass, dW_e = dy_e^T x_e."""
        sinks = [weight.open_sink() for weight in self.weights]
        shape = self.weights[0].param.shape
        places = [sink.room() for sink in sinks]
        dense = [place for place in places if place is not None]
        added = {sink.adds > 0 for sink in sinks}
        if len(dense) == len(sinks) and len(added) == 1:
            grouped.sums(dy, x, dense, accumulate=added.pop())
            for sink in sinks:
                sink.adds += 1
        else:
            made = torch.empty(len(sinks), *shape, dtype=torch.bfloat16, device=x.scale_inv.device)
            grouped.sums(dy, x, made)
            take_beside(sinks, made)
        for look in self.weights[0].events.launched:
            look()
        for weight in self.weights:
            weight.gradient_taken()
