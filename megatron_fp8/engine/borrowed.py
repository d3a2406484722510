"""Other weights for a while, and then the same bytes again: for a reference in the policy's place, an average, a check.

    with engine.borrowed(chunk, reference.state_dict()):
        ...                                             # evaluations, under torch.no_grad()

load_state_dict cannot do this if weights are stored in E4M3: it also sets their scales, and their masters, which have
16 bits more than a BF16 value. Here the masters and moments are left alone. The weights' own bytes wait on the
host, and go back with the scales that they had. So later steps are the same as if nothing had been borrowed.

E4M3 values, as state_dict() gives them at O3, come in without rounding; others are rounded to nearest.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .frozen_set import nearest
from .owned_weight import OwnedWeight, owned_weights

if TYPE_CHECKING:
    from .optimizer import EngineOptimizer


@contextlib.contextmanager
def borrowed(engine: "EngineOptimizer", chunk: torch.nn.Module, state: dict[str, Any]) -> Iterator[None]:
    """Inside, a model chunk of the engine has the weights of `state`, as its state_dict() gives them: BF16 or FP32.

    All ranks that share weights come here together, between two steps, and train nothing inside. Delayed scaling
    forgets the amaxes of casts made inside. Raises what load_state_dict raises for a state of another model, UserError
    for codes; the weights are then as they were.
    """
    engine.prepare_model_params_for_param_sync()
    parts = [part for owned in engine.sets for part in (owned.scaling, owned.parts.dispatch) if part is not None]
    seen = [part.amax.clone() for part in parts]
    tensors = [*chunk.parameters(), *(buffer for _, buffer in chunk.named_buffers())]  # DDP has its own `buffers`
    own = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    lent = contextlib.ExitStack()
    for weight in owned_weights([chunk]):
        if weight.stored is not None:
            lent.enter_context(weight.lent(functools.partial(_lend, weight)))
    try:
        chunk.load_state_dict(state)
        yield
    finally:
        with torch.no_grad():
            for tensor, values in own:
                tensor.copy_(values)
        lent.close()
        for part, amax in zip(parts, seen, strict=True):
            part.amax.copy_(amax)


@torch.no_grad()
def _lend(weight: OwnedWeight, values: torch.Tensor) -> None:
    """Replace an E4M3 weight's values by `values` (N, K), with a scale of their own."""
    assert weight.of is not None
    lent = nearest(values.to(weight.param.device), weight.config.margin, weight.of.sharing)
    weight.param.copy_(lent.payload)
    weight.changed(lent.scale_inv)
