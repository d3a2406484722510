"""Which dispatchers move tokens to owned experts without a count on any host, by the stock class that they replace."""

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from .experts import Fp8Experts
from .gathered_dispatch import GatheredDispatcher
from .local_dispatch import LocalDispatcher

OURS: dict[type, type[LocalDispatcher | GatheredDispatcher]] = {
    MoEAlltoAllTokenDispatcher: LocalDispatcher,
    MoEAllGatherTokenDispatcher: GatheredDispatcher,
}


def count_on_device(model: torch.nn.Module) -> None:
    """Exchange the dispatchers of a model's layers whose owned experts may run together, if ours serves the run."""
    for layer in model.modules():
        if not isinstance(layer, BaseMoELayer):
            continue
        stock, experts = layer.token_dispatcher, layer.experts
        ours = OURS.get(type(stock))
        if ours is not None and isinstance(experts, Fp8Experts) and experts.grouped and ours.serves(stock):
            layer.token_dispatcher = ours(stock, experts)
