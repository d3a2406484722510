"""The end of a step without a wait: stock asks the GPU for what every rank knows.

    stock   norm | wait | Adam | taken everywhere? | wait | the norm everywhere? | wait | begin the next step | forward
    here    norm | wait | Adam | forward

After the step stock reduces over the model-parallel group whether it was taken, the gradient norm and the learning
rate, since parts of a model may be frozen on some ranks. That is done on the GPU, so that the host waits for all of
Adam, and then the GPU for the host. Under a level they are the same on all ranks: a chain of ours takes a step, or not,
by the norm, and that is one number (chain.py). Whether all ranks have such a chain is asked once.

At every --log-interval steps the host waits for the GPU all the same.
"""

import functools
from collections.abc import Callable

import torch


class SameEverywhere:
    """What stands for training.logical_and_across_model_parallel_group and reduce_max_stat_across_model_parallel_group
    in a run with a level."""

    def __init__(self) -> None:
        self.here = False  # whether this rank's optimizer is a chain of ours
        self._everywhere: bool | None = None

    def logical_and(self, stock: Callable) -> Callable:
        """Of whether the step was taken."""

        @functools.wraps(stock)
        def logical_and_across_model_parallel_group(input, group=None) -> bool:
            if self._everywhere is None:
                self._everywhere = stock(self.here, group=group)
            return input if self._everywhere else stock(input, group=group)

        return logical_and_across_model_parallel_group

    def largest(self, stock: Callable) -> Callable:
        """Of the gradient norm, --log-num-zeros-in-grad and, for the log, the learning rate, which stock's aligned
        parameter groups have on every rank or on none; in FP32, as they come back from the GPU."""

        @functools.wraps(stock)
        def reduce_max_stat_across_model_parallel_group(stat, group=None):
            if not self._everywhere:
                return stock(stat, group=group)
            return None if stat is None else torch.tensor(stat, dtype=torch.float32).item()

        return reduce_max_stat_across_model_parallel_group
