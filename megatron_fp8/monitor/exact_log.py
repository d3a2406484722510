"""Loss and gradient norm of a step with all their digits: `--fp8-log-exact`, to tell a bug from rounding.

    [fp8] iteration 3: exact lm loss 5.4892449378967285; exact grad norm 3.1622776601683795

Printed by the rank that prints Megatron's own line. It has the losses of its log; they cost a wait for the device.
"""

from typing import Any

from megatron.training.utils import is_last_rank

from .writers import current_iteration, say


def log_exact(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Log what Megatron's train_step returned of the step that just ended, losses and gradient norm; returns it."""
    if is_last_rank():
        losses, _, _, _, _, norm, *_ = result
        values = {name: float(loss.float().sum()) for name, loss in losses.items()}
        if norm is not None:
            values["grad norm"] = float(norm)
        text = "; ".join(f"exact {name} {value!r}" for name, value in values.items())
        say(current_iteration(), text)
    return result
