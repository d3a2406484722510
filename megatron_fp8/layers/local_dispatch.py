"""A dispatcher for a rank that has all experts of a layer, and all of each: no host waits for counts of tokens.

Stock's all-to-all dispatcher counts tokens on the GPU and copies the counts to the host, which waits for them in each
layer: to know what it sends, to sort what arrives, and to cut the rows expert by expert. A rank that sends nothing
needs none of it. The permutation has sorted its rows by expert already, and without capacity there are top-k rows a
token, whatever the router says. Experts together read the counts on the GPU (grouped_experts.py). So the host does the
same in each step, and a step can be recorded as a graph (engine/step_graph.py).

    x (T, h) ──gather, cast, pad──► q (R', h) ──fc1, ..., fc2──► y (R, h) ──add up──► (T, h)

Nor is x gathered in BF16, if the experts run together: their cast reads it row by row. Stock gathers it, sorts the
sorted rows once more, which copies them, and does the same on the way back. Of each element of (R, h) this spares 12
bytes of memory traffic in a forward pass, and 8 in a backward pass. On the CPU the results are stock's, bit for bit
(tests/cpu/test_grouped_experts.py). With --moe-permute-fusion Transformer Engine's kernels gather the rows, as in
stock: its permutation does not say from which token a row comes.

On a GPU such experts also add up each token's results, and the gradients of x's rows (grouped_experts.py). Each sum is
rounded once. Stock's atomics round it k times, in an order that changes from run to run.
"""

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ..ops import source
from .function import Function
from .grouped_experts import Box, adds_up
from .own_dispatcher import OwnDispatcher
from .parcel import ticket


class Gathered(Function):
    """x (..., h) -> the ticket of its rows x[tokens] (R, h)."""

    @staticmethod
    def forward(ctx, x, tokens: torch.Tensor):
        flat = source.rows(x)
        ctx.tokens, ctx.shape, ctx.box = tokens, x.shape, Box()
        return ctx.box.on(ticket((tokens.numel(), flat.shape[1]), x, torch.nan), flat, tokens)

    @staticmethod
    def backward(ctx, dx):
        added, _ = ctx.box.take(dx)
        if added is not None:
            return added.view(ctx.shape), None
        into = dx.new_zeros(ctx.shape).view(-1, dx.shape[1])
        return into.index_add_(0, ctx.tokens, dx).view(ctx.shape), None  # as autograd does of stock's gather


class LocalDispatcher(OwnDispatcher):
    """See the top of the file."""

    _added = False  # whether the experts add up the results of the pass

    @staticmethod
    def serves(stock: MoEAlltoAllTokenDispatcher) -> bool:
        """Whether the rank has all experts of the layer whole, and drops no token."""
        return stock.tp_size == stock.ep_size == 1 and stock.config.moe_expert_capacity_factor is None

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        return tokens_per_expert

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """(x (..., h), map (T, E), probabilities (T, E)) -> (rows (R, h) or their ticket, probabilities (R,))."""
        config, self._added = self.config, False
        if config.moe_permute_fusion or config.moe_apply_probs_on_input or not self.experts.takes_tickets():
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        tokens, probs = self.permuted(hidden_states, routing_map, probs)
        self._added = adds_up(hidden_states)
        return Gathered.apply(hidden_states, tokens), probs

    def token_dispatch(self, permutated_local_input_tokens, permuted_probs):
        """Rows and probabilities, as they are."""
        return permutated_local_input_tokens, permuted_probs

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        """(Rows (R, h), probabilities (R,)) -> (the same rows, the number of each expert's, the same probabilities)."""
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states):
        """The experts' rows, as they are."""
        return hidden_states

    def token_combine(self, hidden_states, *args, **kwargs):
        """The experts' rows, as they are."""
        return hidden_states

    def combine_postprocess(self, hidden_states):
        """The experts' rows (R, h), or their sums (T, h) -> (..., h)."""
        return hidden_states.view(self.hidden_shape) if self._added else super().combine_postprocess(hidden_states)
