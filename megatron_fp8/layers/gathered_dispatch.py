"""Experts on several ranks without a count on any host: all tokens come to all ranks, and the GPU picks its rows.

To record a step as a graph (engine/step_graph.py), no host may wait for counts of tokens. With the all-to-all
dispatcher it must know how many rows it sends. Stock's all-gather dispatcher sends sizes that do not change:

    x (T, h) ──gather──► (N, h) ──pick, cast, pad──► q (R', h) ──fc1, ..., fc2──► y (R', h) ──add up──► (N, h)
                                                                     (T, h) ◄──sum over ranks, cut──────┘

Then it copies counts to the host, to cut its experts' rows to their number. Here the tables of rows are made on the GPU
(`groups_of_chosen`), and the experts' cast gathers the rows of x, as in local_dispatch.py. R' is the bound for what can
come: each of the N tokens of all ranks has min(k, E) rows at most for this rank's E experts. If all experts of all
ranks get as many rows as the others, that is as many times too large as there are ranks. Kernels end at the last row
that came: they neither read nor write what lies behind it. What is kept for the backward pass, for a layer and
micro-batch: x (N, h) and fc1's output (R', 2F) in BF16. Both are cast again for weight gradients (grouped_experts.py).

A token's results, and the gradients of its rows, are added up by one operation, on the CPU too: in float32, in the
order of experts, and rounded once. Stock rounds each addition. So bits are stock's if a token has at most two rows on a
rank (tests/cpu/test_gathered_runs.py).

It serves runs that ask for a graph, because the bound costs memory. A pass in which experts do not run together
(experts.py), or whose probabilities are applied on the input, goes stock's way.
"""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from ..flags.graphs import WHOLE
from ..ops.groups import Groups, groups_of_chosen
from .experts import Fp8Experts
from .function import Function
from .grouped_experts import Box
from .own_dispatcher import made_of
from .parcel import ticket


class Picked(Function):
    """x (N, h) -> the ticket of this rank's experts' rows of it (R', h), of the tables of groups_of_chosen."""

    @staticmethod
    def forward(ctx, x, tables: tuple[Groups, Groups]):
        ctx.box, (_, read) = Box(), tables
        ctx.box.tables = tables
        return ctx.box.on(ticket((read.rows, x.shape[1]), x, torch.nan), x.detach(), read.source)

    @staticmethod
    def backward(ctx, dx):
        added, _ = ctx.box.take(dx)
        return added, None


class GatheredDispatcher(MoEAllGatherTokenDispatcher):
    """In the place of `stock`, a layer's dispatcher, for owned experts. See the top of the file."""

    _picks = False  # whether the experts run together in the pass, so that rows need no count

    def __init__(self, stock: MoEAllGatherTokenDispatcher, experts: Fp8Experts):
        super().__init__(*made_of(stock))
        self.experts = experts

    @staticmethod
    def serves(stock: MoEAllGatherTokenDispatcher) -> bool:
        """Whether the run asks for whole steps as graphs: without them the room for all rows is not worth it."""
        return stock.config.cuda_graph_impl == WHOLE

    def token_dispatch(self, hidden_states, probs):
        """(x (T, h), probabilities (T, E of all ranks)) -> those of all tokens, (N, h) and (N, E of all ranks)."""
        self._picks = not self.config.moe_apply_probs_on_input and self.experts.takes_tickets()
        if not self._picks or self.tp_ep_group.size() == 1:
            return super().token_dispatch(hidden_states, probs)
        self.routing_map = gather_from_sequence_parallel_region(self.routing_map, group=self.tp_ep_group)
        probs = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)
        # Stock gathers x into memory that other gathers share. Here it is kept for the backward pass.
        return gather_from_sequence_parallel_region(hidden_states, group=self.tp_ep_group), probs

    def dispatch_postprocess(self, hidden_states, probs):
        """(x (N, h), probabilities) -> (the ticket of rows, how many each expert has, probabilities (N E,))."""
        if not self._picks:
            return super().dispatch_postprocess(hidden_states, probs)
        mine = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        tables = groups_of_chosen(self.routing_map[:, mine], self.router_topk)
        self.routing_map, self.local_probs = None, probs[:, mine].reshape(-1)
        return Picked.apply(hidden_states, tables), tables[0].counts, self.local_probs

    def combine_preprocess(self, hidden_states):
        """The experts' rows, or their sums (N, h) -> sums (N, h)."""
        return hidden_states if self._picks else super().combine_preprocess(hidden_states)
