"""Writes E4M3 weights as BF16 in the files of --save-params-interval."""

import functools
from collections.abc import Callable

from megatron.core.utils import unwrap_model

from ..engine.owned_weight import owners


def only_types(kinds: tuple) -> tuple[type, ...]:
    """Of LINEAR_TYPES: without Transformer Engine some are mock objects."""
    return tuple(kind for kind in kinds if isinstance(kind, type))


def readable_of(chunks) -> Callable[[Callable], Callable]:
    """Makes a wrapper of Megatron's save_grads that writes the E4M3 weights of `chunks` as BF16."""

    def make(stock):
        @functools.wraps(stock)
        def save_grads(save_dir, state_dict, iteration, grad_label):
            for i, chunk in enumerate(chunks if grad_label == "params" else ()):
                for name, module in owners(unwrap_model(chunk)):
                    if module.owned.stored is not None:
                        state_dict[f"model_chunk{i}"][f"{name}.weight"] = module.owned.dense().cpu()
            return stock(save_dir, state_dict, iteration, grad_label)

        return save_grads

    return make
