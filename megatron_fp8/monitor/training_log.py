"""Megatron's log for programs: each iteration that it logs, and each evaluation, as a line of metrics.py's file.

    loss, mtp_1_loss, ...              Megatron's "lm loss" and others: the mean over the iterations since the last
                                       line, without skipped ones; NaN if all were skipped
    grad_norm, params_norm, num_zeros, learning_rate, loss_scale
                                       the iteration's own, if Megatron has them
    number_of_skipped_iterations       among those since the last line
    elapsed_time_per_iteration_ms      their mean, by Megatron's own timer
    validation_loss, test_loss         of an evaluation; validation_loss_NAME if there are several sets
    device                             once a start: the GPU's name, or "cpu"

With --log-interval 1 a loss is its iteration's own. (Megatron prints the mean of the first two iterations as the
second's, because it logs the first without starting a new mean.) All values pass through Megatron's own functions, so
the run and its log do not change. The losses that experts and multi-token prediction add exist only in Megatron's
running sums. For these its own means are taken, with that second one.
"""

import functools
import inspect
import math
from collections.abc import Container
from typing import Any

import torch
from megatron.training.global_vars import get_args, get_timers

from ..metrics import DEVICE, LOSS, SKIPPED, STEP_MS, record

_LOSS = "lm loss"  # Megatron's name for LOSS
_MADE, _COUNTS = "advanced iterations", ("advanced iterations", "skipped iterations", "nan iterations")
_OWN = {  # arguments of training_log, and their names in the file
    **{name: name for name in ("learning_rate", "loss_scale", "grad_norm", "params_norm")},
    "num_zeros_in_grad": "num_zeros",
}


class Logged:
    """Wraps Megatron's training_log, evaluate and evaluate_and_print_results, and records their values."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # since the last line
        self._made = self._skipped = 0
        self._seconds = 0.0  # the timer's reading at the last line
        self._evaluations: list[dict[str, torch.Tensor]] = []  # of the call in progress

    def training_log(self, stock):
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def training_log(*args, **kwargs):
            call = signature.bind(*args, **kwargs)
            given, first = call.arguments, call.arguments.get("is_first_iteration", False)
            losses, totals = given["loss_dict"], given["total_loss_dict"]
            if first and losses:
                record({DEVICE: _device_of(next(iter(losses.values())))})
            given["total_loss_dict"] = seen = _Totals(totals)
            result = stock(*call.args, **call.kwargs)
            totals.update(seen)
            self._add(losses, given["skipped_iter"])
            if given["iteration"] % get_args().log_interval == 0 or first:
                own = {name: float(given[key]) for key, name in _OWN.items() if given[key] is not None}
                record({**self._means(), **seen.means(first, losses), **own}, given["iteration"])
            return result

        return training_log

    def _add(self, losses: dict[str, torch.Tensor], skipped: int) -> None:
        self._skipped += int(skipped)
        self._made += not skipped
        for name, loss in losses.items() if not skipped else ():
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss

    def _means(self) -> dict[str, float]:
        """Means over the iterations since the last line; starts the next line."""
        seconds = get_timers()("interval-time").active_time()  # Megatron has just stopped the timer, on all ranks
        found = {_renamed(name): float(total) / self._made for name, total in self._sums.items()}
        found = {LOSS: math.nan, SKIPPED: self._skipped, **found}
        found[STEP_MS] = 1000 * (seconds - self._seconds) / max(1, self._made + self._skipped)
        self._sums, self._made, self._skipped, self._seconds = {}, 0, 0, seconds
        return found

    def evaluate(self, stock):
        @functools.wraps(stock)
        def evaluate(*args, **kwargs):
            result = stock(*args, **kwargs)
            self._evaluations.append(result[0] or {})
            return result

        return evaluate

    def evaluate_and_print_results(self, stock):
        @functools.wraps(stock)
        def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
            self._evaluations.clear()
            stock(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)
            which = "test" if prefix.endswith("on test set") else "validation"
            several = get_args().multiple_validation_sets
            names = get_args().validation_set_names or range(len(self._evaluations))
            for name, losses in zip(names, self._evaluations, strict=False):  # a time limit may leave some out
                suffix = f"_{name}" if several else ""
                if losses:
                    record({f"{which}_{_renamed(key)}{suffix}": float(x) for key, x in losses.items()}, iteration)

        return evaluate_and_print_results


class _Totals(dict[str, Any]):
    """Megatron's running sums and counts. It resets them to zero after printing them; this keeps the values before."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self._before: dict[str, Any] = {}  # the values that the last assignments replaced

    def __setitem__(self, name: str, value: Any) -> None:
        self._before[name] = self.get(name)
        super().__setitem__(name, value)

    def means(self, still_there: bool, known: Container[str]) -> dict[str, float]:
        """Megatron's printed means, except those in `known`. still_there: Megatron has not reset the sums."""
        totals = self if still_there else self._before
        made = max(1, totals[_MADE])
        return {_renamed(k): float(x) / made for k, x in totals.items() if k not in known and k not in _COUNTS}


def _device_of(loss: torch.Tensor) -> str:
    return torch.cuda.get_device_name() if loss.is_cuda else loss.device.type


def _renamed(name: str) -> str:
    return LOSS if name == _LOSS else name
