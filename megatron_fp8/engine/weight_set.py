"""One set of weights in a run: its buckets, their sums and gathers, and the scales that its ranks agree on.

A step, as EngineOptimizer drives every set through it:

    begin_step      forget gradients                      micro-batches; buckets go out
    sum_gradients   what has not gone out; wait           norm, clip
                                                          scales of E4M3 weights; Adam, bucket by bucket
    end_update      gather weights; agree on amaxes
"""

import math
from collections.abc import Callable

import torch

from .gatherer import ChunkGather
from .owned_weight import OwnedWeight
from .reducer import ChunkReducer
from .set_parts import SetParts


class WeightSet:
    """See the top of the file.

    Args:
        parts: what its weights share.
        reducers, gathers: of each model chunk.
        frozen: its weights that are not trained.

    Attributes:
        of: the set's process groups and names.
        scaling: delayed-scaling state of its linears' operands, or None.
        weight_scaling: the scales of its E4M3 weights, or None.
        reduction: how its gradients are summed.
        grad_scale: 0-d FP32: from the reduced sum to the gradient.
    """

    def __init__(
        self, parts: SetParts, reducers: list[ChunkReducer], gathers: list[ChunkGather], frozen: list[OwnedWeight]
    ):
        self.parts, self.reducers, self.gathers, self.frozen = parts, reducers, gathers, frozen
        self.of, self.reduction = parts.of, parts.reduction
        self.scaling, self.weight_scaling = parts.scaling, parts.weight_scaling
        self.buckets = [bucket for reducer in reducers for bucket in reducer.buckets]
        self._mean = torch.full((), parts.of.mean, device=parts.device)
        self.grad_scale = self._mean

    @property
    def weights(self) -> list[OwnedWeight]:
        """Those that are trained, in the order of the buckets."""
        return [weight for bucket in self.buckets for weight in bucket.weights]

    @property
    def linears(self) -> list[OwnedWeight]:
        """All, those that are frozen last."""
        return [*self.weights, *self.frozen]

    def begin_step(self, steps: int) -> None:
        """Forget the gradients; `steps` updates were made before."""
        for reducer in self.reducers:
            reducer.begin_step(steps)
        for weight in self.frozen:
            weight.begin_step(steps + 1)
        if self.scaling is not None:
            self.scaling.amax.zero_()  # of a step that was skipped
        if self.parts.dispatch is not None:
            self.parts.dispatch.begin_step()
        self.reduction.begin_step()

    def sum_gradients(self, num_tokens: torch.Tensor | None) -> None:
        """Reduce the remaining buckets; `num_tokens` (global, on the device) divides the gradients if given.

        The first call of a step counts: a trainer's own function may call Megatron's, and both end here.
        """
        if self.buckets and all(bucket.is_reduced for bucket in self.buckets):
            return
        for reducer in self.reducers:
            reducer.launch_rest()
        for reducer in self.reducers:
            reducer.land()
        self.grad_scale = self._mean if num_tokens is None else 1.0 / num_tokens.clamp(min=1).float()

    def power_sum(self, p: float) -> torch.Tensor:
        """Sum of |g|^p over this rank's gradients, or max |g| for p infinite, as 0-d FP32."""
        if not self.buckets:
            return self._mean.new_zeros(())
        if p == 2.0:
            return torch.stack([b.reduced.square_sum() for b in self.buckets]).sum() * self.grad_scale**2
        norms = torch.stack([torch.linalg.vector_norm(b.reduced.look(), p) for b in self.buckets]) * self.grad_scale
        return norms.max() if p == math.inf else norms.pow(p).sum()

    def damage(self) -> torch.Tensor:
        """0-d FP32: 0, or NaN if the last step wrote a weight or a second moment that is not finite.

        The step's gradients were finite, or it would have been skipped. So a moment or a master was damaged before. A
        weight of 2^64 counts too: BF16's infinity and a negative remainder make 3.4e38.
        """
        written = [bucket.largest.view(1) for bucket in self.buckets if bucket.scaling is None]
        if self.weight_scaling is not None:
            self.weight_scaling.wait()
            written.append(self.weight_scaling.amax)
        return (torch.cat(written) * 2.0**64 * 0.0).sum() if written else self._mean.new_zeros(())

    def zeros(self) -> torch.Tensor:
        """How many of this rank's gradients are zero, 0-d int64."""
        counts = [self._mean.new_zeros((), dtype=torch.int64)]
        for bucket in self.buckets:
            gradient = bucket.reduced.look()
            counts += [(gradient[lo:hi] == 0).sum() for _, lo, hi in bucket.pieces()]
        return torch.stack(counts).sum()

    def end_update(self, steps: int) -> None:
        """Update number `steps` is made on all buckets: gather the weights, agree on amaxes."""
        for gather in self.gathers:
            gather.begin()
        if self.weight_scaling is not None:
            self.weight_scaling.end_step()
        if self.parts.dispatch is not None:
            self.parts.dispatch.settle()
        if self.scaling is not None:
            self.scaling.update(self.of.amax)
        self.reduction.end_step(steps)

    def finish_gathers(self) -> None:
        """Get all weights."""
        for gather in self.gathers:
            gather.finish()

    def remember(self) -> Callable[[], None]:
        """A function that puts back what is known now, after the gradients are summed, when a graph runs the step
        again."""
        grad_scale = self.grad_scale
        parts = [bucket.remember() for bucket in self.buckets] + [gather.remember() for gather in self.gathers]

        def restore() -> None:
            self.grad_scale = grad_scale
            for part in parts:
                part()

        return restore
