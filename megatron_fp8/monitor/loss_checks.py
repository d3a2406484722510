"""Stock's checks of each micro-batch's loss for NaN and infinity, without making the host wait for the GPU.

    stock   forward | wait: is it NaN? | wait: is it infinite? | backward     the GPU idles while the host begins again
    here    forward | backward | ... | all micro-batches | were they?         the host stays ahead

With --check-for-nan-in-loss-and-grad, Megatron's default, the host asks the GPU twice in each micro-batch before it may
launch the backward pass, into an empty queue. Nothing depends on the answer before the optimizer's step. So here the
answer is copied to the host asynchronously, and read after all forward and backward passes of the step have been
launched. The GPU then still runs the last micro-batch's backward pass, so this wait costs nothing either.

Whether any rank asks for a rerun is then reduced on the GPU, and the host waits for it; a single rank needs no
reduction.

Stock handles a bad loss (rerun, exit, or continue: RerunStateMachine.validate_result), in the same pass, with the same
messages and in the same order. The only difference is the time: before the optimizer's step, instead of before the
micro-batch's backward pass. All other checks are stock's own and run at once, after the waiting checks: checks of other
kinds, of CPU tensors, in an evaluation, in a rerun, or in a backward pass (of gradients, with --overlap-grad-reduce).

While a step is recorded as a CUDA graph (engine/step_graph.py) no check runs. Its inputs stay in the graph's memory and
are checked after each replay, as late as above.
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
    """A call of validate_result. If `rejection_func(result)` is true, `machine` must act."""

    stock: Callable[..., None]
    machine: Any
    result: Any
    rejection_func: Callable[[Any], Any]
    args: tuple
    kwargs: dict[str, Any]

    def later(self) -> Callable[[], None]:
        """Return a function that hands the call to stock. If possible, the answer's copy to the host starts now."""
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
    """Replaces RerunStateMachine.validate_result, should_run_forward_backward and _reduce_any in a run with a level.

    asked: whether the run asks for stock's checks; Megatron's validation of its flags refuses them together with a
        graph.
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
                self.look()  # a NaN in the loss also gives one in the gradients: report the loss first
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
        """Hand the waiting checks to stock, in their order, each with its answer."""
        waiting, self._waiting = self._waiting, []
        for hand in waiting:
            hand()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Asked]]:
        """Inside, no check runs; the list collects the calls."""
        asked: list[Asked] = []
        self._recorded = asked
        try:
            yield asked
        finally:
            self._recorded = None

    def repeat(self, recorded: list[Asked]) -> None:
        """Repeat a recorded step's checks on the values that its replay has computed."""
        self._waiting += [asked.later() for asked in recorded]


def _can_wait(machine, result: Any, rejection_func: Callable) -> bool:
    first_run = machine.state == RerunState.INITIAL_RUN and torch.is_grad_enabled()
    return first_run and rejection_func in LATER and _on_gpu(result)


def _on_gpu(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_cuda
