"""--fp8-dispatch: rows travel to their experts in FP8, as the experts' first GEMM reads them.

Megatron's all-to-all dispatcher moves rows in BF16: x of each token to its k experts, and y back; in the backward pass
dy to the experts, and dx back. The two that go to the experts are cast on arrival. Here they are cast before they
leave, and half as many bytes travel, are gathered over the parts of an expert, and are sorted:

    x (T, h) ──gather, cast──► q (R, h) ──all-to-all, gather, sort──► q of this rank's experts ──pad──► fc1     E4M3
    y (T, h) ◄──add up──────── (R, h)   ◄──sort, add, all-to-all──── y                         ◄─────── fc2     BF16
    dy          as x, from y's rows                                                                             E5M2
    dx          as y, to x's rows                                                                               BF16

Sums are made in BF16, as in stock. Each row is cast with the scale that its expert would have used
(engine/dispatch_scales.py): so all bits of a run are those of a run that sends BF16 (tests/cpu/test_fp8_dispatch.py).
`forward` does so with x only, and leaves the way back to stock.

**With stock.** Stock's dispatcher still counts, permutes probabilities, and moves rows: of bytes in place of BF16. Its
permutation gets one column for x, which is not read (own_dispatcher.py). What autograd needs is in `Dispatched` and
`Combined`.

**Not in FP8** are a pass before the scales are known, one that observers look at, and layers with experts in BF16. All
ranks know it alike. A rank that got no row, or has a hook on an expert, decodes what arrived and goes on in BF16; the
experts' own casts then find the same codes again. With a hook their amaxes are of the decoded values too, and may be
larger by a rounding.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ..engine.bank import Bank
from ..engine.owned_weight import GRAD, INPUT, told_of_all
from ..errors import UserError
from ..flags.config import Fp8Config
from ..flags.dispatch import DISPATCH, OFF
from ..ops import source
from .experts import Banks, Fp8Experts
from .function import Function
from .grouped_experts import Box, box_on
from .own_dispatcher import OwnDispatcher
from .parcel import ticket


@dataclass(frozen=True, eq=False)
class Route:
    """The way of one pass's rows to their experts, and back.

    Attributes:
        token, expert: (R,) int64, of each row sent: its token, and the expert's number among those of all ranks.
        tokens: T.
        ranks, parts: of expert parallelism; those that have parts of an expert.
        sent, received: rows to and from each of `ranks`; None: as many for each.
        gathered: rows of each of `parts`; None: as many.
        chunks: (parts x ranks x experts), the rows of each chunk that arrives; order: in which they are sorted by
            expert; back: in which the sorted ones are brought back.
        counts: (E,) rows of each expert of this rank, on the host.
    """

    token: torch.Tensor
    expert: torch.Tensor
    tokens: int
    ranks: torch.distributed.ProcessGroup
    parts: torch.distributed.ProcessGroup
    sent: list[int] | None
    received: list[int] | None
    gathered: list[int] | None
    chunks: torch.Tensor | None
    order: torch.Tensor
    back: torch.Tensor
    counts: torch.Tensor

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes (R, K) of tokens, sorted by expert -> those of this rank's experts, as stock's dispatcher has them."""
        rows = all_to_all(self.ranks, rows, self.received, self.sent)
        if self.parts.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, group=self.parts, output_split_sizes=self.gathered)
        if self.chunks is not None:
            rows, _ = sort_chunks_by_idxs(rows, self.chunks.ravel(), self.order)
        return rows

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        """The transpose of `there`, for rows of any type: what several ranks have of a row is added up."""
        if self.chunks is not None:
            rows, _ = sort_chunks_by_idxs(rows, self.chunks.T.ravel(), self.back)
        if self.parts.size() > 1:
            how = {"group": self.parts, "input_split_sizes": self.gathered}
            rows = reduce_scatter_to_sequence_parallel_region(rows, **how)
        return all_to_all(self.ranks, rows, self.sent, self.received)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """The transpose of gathering x's rows: (T, K), as autograd adds them up in stock."""
        return rows.new_zeros(self.tokens, rows.shape[1]).index_add_(0, self.token, rows)


class Dispatched(Function):
    """x (..., h) -> this rank's experts' rows (R', h): the ticket of codes that have arrived, or if not `stay` their
    values."""

    @staticmethod
    def forward(ctx, x, codes: torch.Tensor, route: Route, fc1: Bank, stay: bool):
        ctx.route, ctx.shape = route, x.shape
        if not stay:
            return fc1.decoded(codes, INPUT, route.counts, x.dtype)
        return Box().on(ticket(tuple(codes.shape), x, torch.nan), codes)

    @staticmethod
    def backward(ctx, dx):
        return ctx.route.to_tokens(ctx.route.again(dx)).view(ctx.shape), None, None, None, None


class Combined(Function):
    """y (R', h) of this rank's experts -> (..., h): stock's way back, whose gradient comes in FP8.

    combine: stock's.  box: for the gradient's codes; None: fc2 wants them decoded.
    """

    @staticmethod
    def forward(ctx, y, combine, route: Route, fc2: Bank, box: Box | None, training: bool):
        ctx.how = route, fc2, box, training
        return combine(y)

    @staticmethod
    def backward(ctx, dy):
        route, fc2, box, training = ctx.how
        sent = fc2.send(dy.reshape(route.tokens, -1), GRAD, route.token, route.expert, training=training)
        codes = route.there(sent.view(torch.uint8)).view(sent.dtype)
        if box is None:
            rows = fc2.decoded(codes, GRAD, route.counts, dy.dtype)
        else:
            rows = box.put(ticket(tuple(codes.shape), dy, 0.0), codes)
        return rows, None, None, None, None, None


class Fp8Dispatcher(OwnDispatcher):
    """See the top of the file. both: whether dy travels in FP8 too."""

    def __init__(self, stock: MoEAlltoAllTokenDispatcher, experts: Fp8Experts, both: bool):
        super().__init__(stock, experts)
        self._both = both
        self._banks: Banks | None = None  # of the pass, if its rows travel in FP8
        self._x: torch.Tensor | None = None  # while its rows travel
        self._route: Route | None = None  # until y is combined, if dy will travel in FP8

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """(x (..., h), map (T, E), probabilities (T, E)) -> (rows (R, h), probabilities (R,)); FP8 rows as bytes."""
        self._banks, x = self.experts.may_get_codes(), hidden_states
        self._x = self._route = None
        if self._banks is None:
            return super().dispatch_preprocess(x, routing_map, probs)
        tokens, probs = self.permuted(x, routing_map, probs)
        self._x, self._expert = x, self._expert_of_rows()
        flat = source.rows(x.detach())
        codes = self._banks[0].send(flat, INPUT, tokens, self._expert, training=self.experts.training)
        self._type = codes.dtype
        return codes.view(torch.uint8), probs

    def _expert_of_rows(self) -> torch.Tensor:
        """(R,) int64: the permutation sorts rows by expert."""
        rows = torch.arange(self.reversed_local_input_permutation_mapping.numel(), device=self.routing_map.device)
        if self.drop_and_pad:
            return rows // self.capacity
        return torch.searchsorted(self.routing_map.sum(0).cumsum(0), rows, right=True)

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        """(Rows, probabilities) as they have arrived -> (rows (R', h), the number of each expert's, probabilities)."""
        rows, counts, probs = super().dispatch_postprocess(global_input_tokens, global_probs)
        x, self._x = self._x, None
        if self._banks is None:
            return rows, counts, probs
        route = self._way(counts)
        self._stay = rows.shape[0] > 0 and self.experts.takes_tickets()
        rows = Dispatched.apply(x, rows.view(self._type), route, self._banks[0], self._stay)
        self._route = route if self._both else None
        return rows, counts, probs

    def _way(self, counts: torch.Tensor) -> Route:
        several = self.num_local_experts > 1
        return Route(
            self.reversed_local_input_permutation_mapping,
            self._expert,
            self.hidden_shape_before_permute[0],
            self.ep_group,
            self.tp_group,
            self.input_splits,
            self.output_splits,
            None if self.output_splits_tp is None else self.output_splits_tp.tolist(),
            self.num_global_tokens_per_local_expert if several else None,
            self.sort_input_by_local_experts,
            self.restore_output_by_local_experts,
            counts,
        )

    def combine_preprocess(self, hidden_states):
        """y (R', h) -> rows on their way back; with both ways in FP8, all of it."""
        if self._route is None or self._banks is None:
            return super().combine_preprocess(hidden_states)
        box = box_on(hidden_states) if self._stay else None  # a hook on the experts reads values
        how = self._route, self._banks[1], box, self.experts.training
        return Combined.apply(hidden_states, self._combine, *how)

    def _combine(self, y: torch.Tensor) -> torch.Tensor:
        rows = super().token_combine(super().combine_preprocess(y))
        return super().combine_postprocess(rows)

    def token_combine(self, hidden_states, *args, **kwargs):
        """Rows back on their tokens' ranks."""
        return hidden_states if self._route is not None else super().token_combine(hidden_states, *args, **kwargs)

    def combine_postprocess(self, permutated_local_input_tokens):
        """Rows -> y (..., h)."""
        route, self._route = self._route, None
        if route is not None:
            return permutated_local_input_tokens
        return super().combine_postprocess(permutated_local_input_tokens)


def dispatch_in_fp8(model: torch.nn.Module, fp8: Fp8Config) -> None:
    """Exchange the dispatchers of a model's layers with experts, with --fp8-dispatch.

    Raises UserError if a script has given a layer another dispatcher than stock's all-to-all, or other experts.
    """
    if fp8.dispatch == OFF:
        return
    for layer in model.modules():
        if not isinstance(layer, BaseMoELayer):
            continue
        stock, experts = layer.token_dispatcher, layer.experts
        if type(stock) is not MoEAlltoAllTokenDispatcher or not isinstance(experts, Fp8Experts):
            raise UserError(
                f"{DISPATCH.name} {fp8.dispatch}: a layer of the script's model has a {type(stock).__name__} and "
                f"{type(experts).__name__}; only stock's all-to-all dispatcher sends FP8, so remove the flag"
            )
        layer.token_dispatcher = Fp8Dispatcher(stock, experts, fp8.dispatch == "both")


def check_dispatch(fp8: Fp8Config, chunks) -> None:
    """Raise UserError on all ranks if some experts of a layer are trained in FP8 and others are not: a rank cannot send
    FP8 to an expert that reads BF16. Collective as `told_of_all`; the weights are named."""
    if fp8.dispatch == OFF:
        return
    alike: dict[tuple[str, int], dict[bool, str]] = {}
    for bank, in_fp8, name in told_of_all(chunks, lambda w: (w.bank, w.fp8 and w.trained, w.name)):
        if bank is not None:
            alike.setdefault(bank, {})[in_fp8] = name
    for found in alike.values():
        if len(found) > 1:
            raise UserError(
                f"{DISPATCH.name} {fp8.dispatch}: {found[False]} is frozen or in BF16, and {found[True]} of the same "
                "layer is trained in FP8; treat all experts of a layer alike, or remove the flag"
            )
