"""Stock's checks of each micro-batch's loss for NaN and infinity, without a wait of the host for the GPU.

    stock   forward | wait: is it NaN? | wait: is it infinite? | backward     the GPU idles while the host begins again
    here    forward | backward | ... | all micro-batches | were they?         the host stays ahead

With --check-for-nan-in-loss-and-grad, Megatron's default, the host asks the GPU twice in each micro-batch before it may
launch the backward pass, to an empty queue. Nothing depends on the answer before the step: so it is copied to the host
as the GPU gets there, and looked at when all forward and backward passes of the step have been launched. The last
micro-batch's backward pass is on the GPU then, so that this wait costs nothing either.

Whether any rank asks for a rerun is then reduced on the GPU, and waited for; a rank that is alone knows.

What becomes of a bad loss is stock's to do, in the same pass, with the same messages and in the same order: run again,
end, or go on (RerunStateMachine.validate_result). The only difference is that it does so before the step, and not
before the micro-batch's backward pass. Checks of other kinds, of what is on the CPU, in an evaluation, in a rerun or in
a backward pass (of gradients, with --overlap-grad-reduce) are stock's own, at once, after all that wait.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunState

LATER = (torch.isnan, torch.isinf)


@dataclass(frozen=True)
class Check:
    """One call of validate_result, and its answer on the way to the host: `is_bad` may be read after `copied`."""

    call: Callable[..., None]  # without its rejection_func
    is_bad: torch.Tensor
    copied: torch.cuda.Event


class LateChecks:
    """What stands for RerunStateMachine.validate_result, should_run_forward_backward and _reduce_any in a run with a
    level."""

    def __init__(self) -> None:
        self._waiting: list[Check] = []

    def validate_result(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def validate_result(machine, result, rejection_func, *args: Any, **kwargs: Any) -> None:
            if not _can_wait(machine, result, rejection_func):
                self.look()  # of a NaN in the loss there is one in the gradients: the first is what is told
                return stock(machine, result, rejection_func, *args, **kwargs)
            is_bad = rejection_func(result.detach()).to("cpu", non_blocking=True)  # pinned
            copied = torch.cuda.Event()
            copied.record()
            call = functools.partial(_replay, stock, machine, result.detach(), args, kwargs)
            self._waiting.append(Check(call, is_bad, copied))

        return validate_result

    def should_run_forward_backward(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def should_run_forward_backward(machine, data_iterator) -> bool:
            self.look()
            return stock(machine, data_iterator)

        return should_run_forward_backward

    def reduce_any(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def _reduce_any(machine, value: bool | list[bool]) -> bool | tuple[bool, ...]:
            if torch.distributed.get_world_size() > 1:
                return stock(machine, value)
            return tuple(value) if isinstance(value, list) else value

        return _reduce_any

    def look(self) -> None:
        """Hand stock the checks that wait, in their order, each with its answer."""
        waiting, self._waiting = self._waiting, []
        for check in waiting:
            check.copied.synchronize()
            check.call(bool(check.is_bad))


def _can_wait(machine, result: Any, rejection_func: Callable) -> bool:
    first_run = machine.state == RerunState.INITIAL_RUN and torch.is_grad_enabled()
    return first_run and rejection_func in LATER and _on_gpu(result)


def _on_gpu(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_cuda


def _replay(stock: Callable, machine, result: torch.Tensor, args: tuple, kwargs: dict, is_bad: bool) -> None:
    stock(machine, result, lambda _: is_bad, *args, **kwargs)
