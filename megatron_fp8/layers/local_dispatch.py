"""A dispatcher for a rank that has all experts of a layer, and all of each: no host waits for counts of tokens.

Stock's all-to-all dispatcher counts tokens on the GPU and copies the counts to the host, which waits for them in each
layer: to know what it sends, to sort what arrives, and to cut the rows expert by expert. A rank that sends nothing
needs none of it. The permutation has sorted its rows by expert already, and without capacity there are top-k rows a
token, whatever the router says. Experts together read the counts on the GPU (grouped_experts.py). So the host does the
same in each step, and a step can be recorded as a graph (engine/step_graph.py).

The results are stock's, bit for bit: stock only copies the rows, as it sorts them once more
(tests/cpu/test_local_dispatch.py).
"""

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from .experts import Fp8Experts


class LocalDispatcher(MoEAlltoAllTokenDispatcher):
    """In the place of stock's; see the top of the file. stock: a layer's dispatcher."""

    def __init__(self, stock: MoEAlltoAllTokenDispatcher):
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        super().__init__(stock.num_local_experts, stock.local_expert_indices, stock.config, groups)

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        """(Rows (R, h), probabilities (R,)) -> (the same rows, the number of each expert's, the same probabilities)."""
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states):
        """The experts' rows, as they are."""
        return hidden_states


def keep_counts_here(model: torch.nn.Module) -> None:
    """Exchange the dispatchers of a model's layers whose owned experts may run together and are all here."""
    for layer in model.modules():
        if not isinstance(layer, BaseMoELayer) or type(layer.token_dispatcher) is not MoEAlltoAllTokenDispatcher:
            continue
        stock, experts = layer.token_dispatcher, layer.experts
        owned = isinstance(experts, Fp8Experts) and experts.grouped
        if owned and stock.tp_size == stock.ep_size == 1 and stock.config.moe_expert_capacity_factor is None:
            layer.token_dispatcher = LocalDispatcher(stock)
