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

A step that is recorded as a CUDA graph (engine/step_graph.py) makes no check while it is recorded, of any kind: what
would be checked is kept, in the graph's memory, and looked at after each replay, as late.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunState

LATER = (torch.isnan, torch.isinf)


@dataclass(frozen=True)
class Asked:
    """A call of validate_result: whether `rejection_func` says True of `result` is for `machine` to act on."""

    stock: Callable[..., None]
    machine: Any
    result: Any
    rejection_func: Callable[[Any], Any]
    args: tuple
    kwargs: dict[str, Any]

    def later(self) -> Callable[[], None]:
        """What hands it to stock, with its answer, which is on the way to the host from now on if it can be."""
        if self.rejection_func not in LATER or not _on_gpu(self.result):
            return functools.partial(self._hand, self.rejection_func)
        is_bad = self.rejection_func(self.result).to("cpu", non_blocking=True)  # pinned
        copied = torch.cuda.Event()
        copied.record()

        def hand() -> None:
            copied.synchronize()
            self._hand(lambda _: bool(is_bad))

        return hand

    def _hand(self, rejection_func: Callable[[Any], Any]) -> None:
        self.stock(self.machine, self.result, rejection_func, *self.args, **self.kwargs)


class LateChecks:
    """What stands for RerunStateMachine.validate_result, should_run_forward_backward and _reduce_any in a run with a
    level.

    asked: whether the run asks for stock's checks; Megatron's validation of its flags takes them, and a graph, for
        impossible.
    reruns: whether Megatron runs the present step a second time.
    """

    def __init__(self, asked: bool = True) -> None:
        self.asked = asked
        self._waiting: list[Callable[[], None]] = []
        self._recorded: list[Asked] | None = None
        self.reruns = False

    def validate_result(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def validate_result(machine, result, rejection_func, *args: Any, **kwargs: Any) -> None:
            if self._recorded is not None:
                held = result.detach() if isinstance(result, torch.Tensor) else result
                self._recorded.append(Asked(stock, machine, held, rejection_func, args, kwargs))
            elif _can_wait(machine, result, rejection_func):
                self._waiting.append(Asked(stock, machine, result.detach(), rejection_func, args, kwargs).later())
            else:
                self.look()  # of a NaN in the loss there is one in the gradients: the first is what is told
                stock(machine, result, rejection_func, *args, **kwargs)

        return validate_result

    def should_run_forward_backward(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def should_run_forward_backward(machine, data_iterator) -> bool:
            self.look()
            runs = stock(machine, data_iterator)
            self.reruns = machine.state not in (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)
            return runs

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
        for hand in waiting:
            hand()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Asked]]:
        """Inside, no check is made; what was asked is in the list."""
        asked: list[Asked] = []
        self._recorded = asked
        try:
            yield asked
        finally:
            self._recorded = None

    def repeat(self, recorded: list[Asked]) -> None:
        """Make the checks of a recorded step on what its replay has computed."""
        self._waiting += [asked.later() for asked in recorded]


def _can_wait(machine, result: Any, rejection_func: Callable) -> bool:
    first_run = machine.state == RerunState.INITIAL_RUN and torch.is_grad_enabled()
    return first_run and rejection_func in LATER and _on_gpu(result)


def _on_gpu(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_cuda
