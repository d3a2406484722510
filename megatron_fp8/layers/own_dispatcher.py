"""What our dispatchers of tokens to experts share: how they take over from stock's, and for two of them stock's
all-to-all, whose permutation need not move x.

dispatch.py sends FP8 to other ranks; local_dispatch.py serves a rank that has all experts; gathered_dispatch.py gets
all tokens.
"""

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher

from .experts import Fp8Experts


def made_of(stock: MoETokenDispatcher) -> tuple:
    """What `stock`, a layer's dispatcher, was made of: the arguments for another one in its place."""
    groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
    return stock.num_local_experts, stock.local_expert_indices, stock.config, groups


class OwnDispatcher(MoEAlltoAllTokenDispatcher):
    """In the place of `stock`, a layer's dispatcher, for owned experts."""

    def __init__(self, stock: MoEAlltoAllTokenDispatcher, experts: Fp8Experts):
        super().__init__(*made_of(stock))
        self.experts = experts

    def permuted(
        self, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock's dispatch_preprocess without x's rows: (of each row, sorted by expert, its token (R,) int64; the rows'
        probabilities (R,)). x (..., h), map and probabilities (T, E)."""
        _, probs = super().dispatch_preprocess(x.new_empty(*x.shape[:-1], 1), routing_map, probs)
        self.hidden_shape = x.shape
        self.hidden_shape_before_permute = torch.Size((x.numel() // x.shape[-1], x.shape[-1]))
        return self.reversed_local_input_permutation_mapping, probs
