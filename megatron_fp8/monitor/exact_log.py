"""`--fp8-log-exact`: loss and gradient norm of a step with all digits, to tell a bug from rounding.

    [fp8] iteration 3: exact lm loss 5.4892449378967285; exact grad norm 3.1622776601683795

The rank that prints Megatron's line prints this one too, for the losses of that line. The host waits for the device.
"""

from typing import Any

from megatron.training.utils import is_last_rank

from .writers import current_iteration, say


def log_exact(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Log losses and gradient norm of the step that just ended, from the result of Megatron's train_step; return it."""
    if is_last_rank():
        losses, _, _, _, _, norm, *_ = result
        values = {name: float(loss.float().sum()) for name, loss in losses.items()}
        if norm is not None:
            values["grad norm"] = float(norm)
        text = "; ".join(f"exact {name} {value!r}" for name, value in values.items())
        say(current_iteration(), text)
    return result
