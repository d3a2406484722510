"""`--fp8-log-update-norm`: how far a step moved the weights, with a level or without one.

    [fp8] iteration 3: update norm 0.0241938; update ratio 0.000871225

    update norm     |w_t - w_(t-1)|_2 over all trained weights, with all that moves them: clipped gradient, Adam,
                    learning rate, weight decay, rounding
    update ratio    the same over |w_(t-1)|_2

The weights are the optimizer's: its FP32 masters, if it has them (a step of 1e-5 is lost in a BF16 weight of 0.02,
whose ulp is 1.2e-4), and under a level the masters as stored. A gradient norm does not show this: Adam divides it out,
except while its second moment lags behind.

Measured on every --log-interval-th iteration. During the step stock's parts hold a copy of their weights, 4 bytes a
parameter, divided by data parallelism with --use-distributed-optimizer. A level's part holds two copies of one bucket
at a time; with --fp8-partition greedy that bucket is all its weights. Then one sum of two numbers a part. A skipped
step moves nothing and is not logged.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import param_is_not_shared
from megatron.training.global_vars import get_args
from megatron.training.utils import is_last_rank

from ..engine.bucket import Bucket
from ..engine.events import Observer
from ..engine.optimizer import EngineOptimizer
from .writers import current_iteration, say, write_scalars


class UpdateNorm(Observer):
    """Measures the steps of a run's optimizer; `around` wraps each training step."""

    def __init__(self) -> None:
        self._parts: Sequence[MegatronOptimizer] = ()
        self._engine: EngineOptimizer | None = None
        self._before: torch.Tensor | None = None  # masters of the bucket that is being updated
        self._squares: dict[MegatronOptimizer, torch.Tensor] = {}  # of the step in progress, if it is measured:
        # this rank's |w_t - w_(t-1)|^2 and |w_(t-1)|^2, FP64

    def around(self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, step: Callable[[], Any]) -> Any:
        """Run Megatron's train_step and return its result. Measure and log the step if Megatron logs it."""
        if not self._parts:
            self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
            for part in self._parts:
                self._attach(part)
        iteration = current_iteration()
        if iteration % get_args().log_interval:
            return step()
        device = torch.device("cuda", torch.cuda.current_device())
        self._squares = {part: torch.zeros(2, dtype=torch.float64, device=device) for part in self._parts}
        try:
            result = step()
        finally:
            squares, self._squares = self._squares, {}
        _, skipped, *_ = result
        if not skipped:
            for part, sums in squares.items():
                torch.distributed.all_reduce(sums, group=part.get_grad_stats_parallel_group())
            log(torch.stack(list(squares.values())).sum(0), iteration)
        return result

    def _attach(self, part: MegatronOptimizer) -> None:
        if isinstance(part, EngineOptimizer):
            self._engine = part
            part.events.subscribe(self)
        elif part.optimizer is not None:  # None if this rank has none of the part's weights
            before: list[torch.Tensor] = []

            def keep(*_) -> None:
                before.clear()  # left by a step that failed
                if self._squares:
                    before.extend(weight.detach().clone() for weight in _own_weights(part))

            def compare(*_) -> None:
                if self._squares:
                    self._add(part, before, _own_weights(part))
                    before.clear()

            part.optimizer.register_step_pre_hook(keep)
            part.optimizer.register_step_post_hook(compare)

    def updating(self, bucket: Bucket) -> None:
        """Keep the masters of a bucket before its update."""
        self._before = bucket.masters() if self._squares else None

    def updated(self, bucket: Bucket) -> None:
        """Compare them with the updated masters."""
        if self._before is not None:
            self._add(self._engine, [self._before], [bucket.masters()])
            self._before = None

    @torch.no_grad()
    def _add(self, part: MegatronOptimizer, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        if before:
            weights = torch._foreach_norm(before)
            torch._foreach_sub_(before, after)
            norms = torch.stack([torch.stack(torch._foreach_norm(before)), torch.stack(weights)])
            self._squares[part] += norms.double().square().sum(1)


def _own_weights(part: MegatronOptimizer) -> list[torch.Tensor]:
    """The weights that a stock part updates on this rank, without replicas, as in Megatron's gradient norm."""
    groups = {"tp_group": getattr(part, "tp_group", None), "expert_tp_group": getattr(part, "expert_tp_group", None)}
    return [
        weight
        for weight in part.get_parameters()
        if param_is_not_shared(weight)
        and tensor_parallel.param_is_not_tensor_parallel_duplicate(weight, **groups)
        and tensor_parallel.param_is_not_gtp_duplicate(weight)
    ]


def log(squares: torch.Tensor, iteration: int) -> None:
    """Log a step on the rank that logs. squares: (2,) FP64 of the update and of the weights, summed over all ranks."""
    if is_last_rank():
        update, weights = (math.sqrt(square) for square in squares.tolist())
        ratio = update / weights if weights else math.nan
        say(iteration, f"update norm {update:.6g}; update ratio {ratio:.6g}")
        write_scalars({"update-norm": update, "update-ratio": ratio}, iteration)
