"""The end of a step without a wait: stock asks the GPU for numbers that every rank knows.

    stock   norm | wait | Adam | taken everywhere? | wait | the norm everywhere? | wait | begin the next step | forward
    here    norm | wait | Adam | forward

After a step stock reduces three things over the model-parallel group: whether the step was taken, the gradient norm and
the learning rate. Parts of a model may be frozen on some ranks. Stock reduces on the GPU, so the host waits for all of
Adam, and then the GPU waits for the host. Under a level the three are the same on all ranks: our chain decides by the
norm whether it takes a step, and the norm is one number (chain.py). Whether all ranks have such a chain is asked once.

Every --log-interval steps the host still waits for the GPU.
"""

import functools
from collections.abc import Callable

import torch


class SameEverywhere:
    """Replaces training.logical_and_across_model_parallel_group and reduce_max_stat_across_model_parallel_group in a
    run with a level."""

    def __init__(self) -> None:
        self.here = False  # whether this rank's optimizer is a chain of ours
        self._everywhere: bool | None = None

    def logical_and(self, stock: Callable) -> Callable:
        """Whether the step was taken."""

        @functools.wraps(stock)
        def logical_and_across_model_parallel_group(input, group=None) -> bool:
            if self._everywhere is None:
                self._everywhere = stock(self.here, group=group)
            return input if self._everywhere else stock(input, group=group)

        return logical_and_across_model_parallel_group

    def largest(self, stock: Callable) -> Callable:
        """The gradient norm, --log-num-zeros-in-grad and, for the log, the learning rate; in FP32, as they come back
        from the GPU. Stock aligns its parameter groups, so either every rank has a learning rate or none has."""

        @functools.wraps(stock)
        def reduce_max_stat_across_model_parallel_group(stat, group=None):
            if not self._everywhere:
                return stock(stat, group=group)
            return None if stat is None else torch.tensor(stat, dtype=torch.float32).item()

        return reduce_max_stat_across_model_parallel_group
