"""--log-params-norm over weights that stock cannot read: stored in E4M3, or still on their way from other ranks.

Stock sums the squares of each parameter's `main_param`, its FP32 master; if it has none, those of its data. A weight of
ours has a main_param if its master is FP32 (bucket.py). Any other lends stock one number in place of its master: the
norm of the weight as the model has it. The square of that is the sum that stock wants. One weight at a time is in BF16.
"""

import functools
from collections.abc import Callable

import torch

from .owned_weight import owned_weights


def readable(stock: Callable) -> Callable:
    """Replaces Megatron's calc_params_l2_norm in a run with a level; collective, because gathers are finished."""

    @functools.wraps(stock)
    @torch.no_grad()
    def calc_params_l2_norm(model, *args, **kwargs):
        chunks = model if isinstance(model, list) else [model]
        lent = [weight for weight in owned_weights(chunks) if not hasattr(weight.param, "main_param")]
        for weight in lent:
            norm = torch.linalg.vector_norm(weight.dense(), dtype=torch.float32)
            weight.param.main_param = norm.view(1)  # type: ignore[attr-defined]
        try:
            return stock(model, *args, **kwargs)
        finally:
            for weight in lent:
                del weight.param.main_param  # type: ignore[attr-defined]

    return calc_params_l2_norm
