"""All experts of a rank at once: their rows in one matrix; for each linear one cast and a grouped product.

    rows (R, h) ──cast──► q (R', h) ──fc1──► h (R', 2f) ──activation x probability──► (R', f) ──cast, fc2──► (R, h)
                 pad                                                                              cut

Between the products the rows are padded (ops/groups.py). What the padding holds there is undefined, and is never read:
the casts replace it by zeros, and what is cut leaves it out. The activation function, and how the probabilities are
multiplied in, are stock's: its MLP runs, with products of all experts in the place of its two linears. But on a GPU
SwiGLU is part of the cast that follows it, in both passes: neither its result nor its gradient is in memory in BF16
(`Weighted`). The CPU runs stock's, which rounds more often, so that its bits stay those of experts one by one.

The rows may be a ticket, which carries what they are made of in a `Box`. Codes that other ranks have sent
(--fp8-dispatch, dispatch.py) are only padded; in the same way the gradient of the result may come. Rows of x that are
still to be gathered (local_dispatch.py) are gathered by the cast: they never lie in memory in BF16. SwiGLU's are cast.

On a GPU such rows' results are not cut but added up, token by token, and so are the gradients of x's rows (`combine` in
ops): each sum in float32, rounded once. The gradient of the sums is gathered by its cast, as x is. The CPU cuts, and
leaves the sums to stock, for the sake of its bits.

If only the device knows how many rows there are (gathered_dispatch.py), their matrices are as large as if all that can
come had come. So no product keeps a copy of its rows in FP8 then: x, or h and the probabilities, are cast again for the
weight gradient.

Each expert's rows are cast with its own weight's scale. So the results are those of experts that run one after the
other, if the products are: on the CPU bit for bit (tests/cpu/test_grouped_experts.py).
"""

import functools
from types import SimpleNamespace

import torch
from megatron.core.transformer.mlp import MLP

from .. import ops
from ..engine.bank import Bank
from ..engine.owned_weight import GRAD, INPUT
from ..gemm import grouped
from ..ops.groups import Groups, Made, groups_of
from .function import Function
from .mlp import activation_kind
from .parcel import ticket

LOST = (
    "experts' rows, or their gradient, were changed between the dispatcher and the experts, by a hook or a wrapper; "
    "remove it, or --moe-grouped-gemm"
)

type Contents = torch.Tensor | grouped.GroupedTensor


class Box:
    """What the rows of a grouped product are made of. The product finds the box on its input, or has left it on its
    result, for the gradient. Other code sees a ticket in the place of the rows, which has no memory (parcel.py)."""

    __slots__ = "rows", "source", "tables", "ticket"

    def __init__(self) -> None:
        self.rows: Contents | None = None
        self.source: torch.Tensor | None = None
        self.ticket: torch.Tensor | None = None
        self.tables: tuple[Groups, Groups] | None = None  # of groups_of_chosen, if the dispatcher has made them

    def put(self, ticket: torch.Tensor, rows: Contents, source: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the ticket. rows: (R, K) in FP8; or (T, K), of which the rows are those of `source` (R,); or cast."""
        self.rows, self.source, self.ticket = rows, source, ticket
        return ticket

    def on(self, ticket: torch.Tensor, rows: Contents, source: torch.Tensor | None = None) -> torch.Tensor:
        """As `put`; the ticket carries the box."""
        leave_box(ticket, self)
        return self.put(ticket, rows, source)

    def read_by(self, groups: Groups) -> Groups:
        """Tables for the rows, of which `groups` has those as given."""
        if self.source is None:
            return groups
        assert isinstance(self.rows, torch.Tensor)
        return groups.reading(self.source, self.rows.shape[0] if adds_up(self.rows) else None)

    def take(self, given: torch.Tensor) -> tuple[Contents | None, torch.Tensor | None]:
        """(Rows, source) that `given` stands for, once; (None, None) if it is no ticket.

        Raises RuntimeError if something on the way has replaced the ticket.
        """
        rows, source, waited = self.rows, self.source, self.ticket
        self.rows = self.source = self.ticket = None
        if rows is not None and given is not waited:
            raise RuntimeError(LOST)
        return rows, source


def box_on(x: torch.Tensor) -> Box | None:
    """The box that x carries, or None."""
    return getattr(x, "_fp8_box", None)


def leave_box(x: torch.Tensor, box: Box) -> None:
    """Let x carry the box."""
    x._fp8_box = box  # type: ignore[attr-defined]


class Grouped(torch.autograd.Function):
    """y_e = x_e W_e^T for all experts e.

    x: (R, K) as given, or (R', K) padded. y: if not `cut`, (R', N); else (R, N), or with a table of tokens' rows their
    sums (T, N). anchor: requires a gradient if the weights do; None if there will be no backward pass. box: for dy, if
    that may come in FP8.
    """

    @staticmethod
    def forward(ctx, x, anchor, box: Box | None, bank: Bank, groups: Groups, cut: bool, training: bool):
        maker = box_on(x) or Box()
        rows, source = maker.take(x)
        again = groups.bound and rows is not None  # the columns are made in the backward pass
        how = {"rows": True, "columns": anchor is not None and not again}
        if rows is None and x.numel() > 1 and not any(x.stride()):
            raise RuntimeError(LOST)  # a ticket without its box
        if isinstance(rows, grouped.GroupedTensor):
            q = rows
        elif rows is not None and source is None:
            q = bank.received(rows, INPUT, groups, **how)
        else:
            q = bank.cast(x if rows is None else rows, INPUT, groups, **how, training=training)
        w, ctx.box = bank.quantized(), box
        ctx.maker = None if source is None or groups.table is None else maker
        y = grouped.rows(q, w, x.new_empty(groups.rows, w.payload.shape[1]), fast_accum=True)
        ctx.bank, ctx.groups, ctx.w, ctx.training = bank, groups, w, training
        ctx.shape, ctx.cast = x.shape, None
        if anchor is not None and again:
            assert q.again is not None
            made, scale = q.again
            ctx.cast, ctx.read = made.cast, q.groups
            ctx.save_for_backward(q.scale_inv, scale, *made.of)
        elif anchor is not None:
            ctx.save_for_backward(q.scale_inv, q.columns)
        if not cut:
            return y
        return y.index_select(0, groups.place) if groups.table is None else ops.combine(y, groups.table)

    @staticmethod
    def backward(ctx, dy):
        scale_inv, *kept = ctx.saved_tensors
        bank, groups, needs_dx = ctx.bank, ctx.groups, ctx.needs_input_grad[0]
        codes, _ = (None, None) if ctx.box is None else ctx.box.take(dy)
        if isinstance(codes, grouped.GroupedTensor):
            q = codes
        elif codes is None:
            q = bank.cast(dy, GRAD, groups, rows=needs_dx, columns=True, training=ctx.training)
        else:
            q = bank.received(codes, GRAD, groups, rows=needs_dx, columns=True)
        dx = None
        if needs_dx:
            w_t = bank.transposed(ctx.w)
            dx = grouped.rows(q, w_t, dy.new_empty(groups.rows, w_t.payload.shape[1]))
        if ctx.cast is None:
            (columns,) = kept
        else:
            scale, *of = kept
            columns = bank.columns_again(Made(ctx.cast, tuple(of)), INPUT, ctx.read, scale)
        bank.take_gradients(q, grouped.GroupedTensor(groups, scale_inv, None, columns))
        if dx is not None and ctx.maker is not None:
            dx = ctx.maker.put(ticket(ctx.shape, dy, 0.0), ops.combine(dx, groups.table))
        elif dx is not None and ctx.shape[0] != groups.rows:
            dx = dx.index_select(0, groups.place)
        return dx, None, None, None, None, None, None


class Spread(torch.autograd.Function):
    """Probabilities (R,) as given -> (R',) padded with zeros."""

    @staticmethod
    def forward(ctx, probs, groups: Groups):
        ctx.source, ctx.given = groups.source, probs.numel()
        return torch.where(groups.source >= 0, probs[groups.source.clamp(min=0)], 0)

    @staticmethod
    def backward(ctx, gradient):
        at = torch.where(ctx.source >= 0, ctx.source, ctx.given).long()
        return gradient.new_zeros(ctx.given + 1).scatter_(0, at, gradient)[: ctx.given], None


class Weighted(Function):
    """The ticket of SwiGLU of h (R', 2F), times the probabilities (R,) as given: cast for fc2, and back for fc1.

    maker: the box that fc1's product has left on h, or None if there will be no backward pass.
    """

    @staticmethod
    def forward(ctx, h, probs, maker: Box | None, fc1: Bank, fc2: Bank, groups: Groups, training: bool):
        ctx.save_for_backward(h, probs)
        ctx.maker, ctx.bank, ctx.groups, ctx.training = maker, fc1, groups, training
        made, columns = Made(ops.weighted_quantize, (h, probs)), maker is not None and not groups.bound
        q = fc2.cast(made, INPUT, groups, rows=True, columns=columns, training=training)
        return Box().on(ticket((groups.rows, h.shape[1] // 2), h, torch.nan), q)

    @staticmethod
    def backward(ctx, dy):
        h, probs = ctx.saved_tensors
        dprobs = torch.empty_like(probs, dtype=torch.float32)
        made = Made(functools.partial(ops.weighted_backward_quantize, dprobs=dprobs), (dy, h, probs))
        q = ctx.bank.cast(made, GRAD, ctx.groups, rows=True, columns=True, training=ctx.training)
        dh = ctx.maker.put(ticket(h.shape, h, 0.0), q)
        return dh, dprobs.to(probs.dtype), None, None, None, None, None


def adds_up(x: torch.Tensor) -> bool:
    """Whether experts add up the results of rows of x that are still to be gathered; see the top of the file."""
    return x.is_cuda


def _weighs(like: MLP, rows: torch.Tensor) -> bool:
    """Whether the activation function is part of the casts; see the top of the file."""
    return rows.is_cuda and activation_kind(like.config) == "swiglu" and not like.config.activation_func_fp8_input_store


class _Linear(torch.nn.Module):
    """In the place of a linear of stock's MLP, for one pass."""

    def __init__(self, *how):
        super().__init__()
        self._how = how

    def forward(self, x):
        bank, *_ = self._how
        anchor, box = None, None
        if torch.is_grad_enabled():
            bank.await_gradients()
            anchor, box = torch.zeros(0, requires_grad=True), Box()
        y = Grouped.apply(x, anchor, box, *self._how)
        if box is not None:
            leave_box(y, box)
        return y, None


def experts_together(
    like: MLP, fc1: Bank, fc2: Bank, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, training: bool
) -> torch.Tensor:
    """The experts' results (R, h) for rows (R, h), R > 0, of which each has counts (E,), with probabilities (R,).

    If the rows are those of an x (T, h) and still to be gathered, and x `adds_up` or the dispatcher has made the
    tables, which then count: for each row of x the sum (T, h).

    like: any of the experts, for its activation function.
    """
    box = box_on(rows)
    if box is not None and box.tables is not None:
        groups, read = box.tables
    else:
        groups = groups_of(counts, rows.shape[0], rows.device)
        read = groups if box is None else box.read_by(groups)
    given_back = groups if read.table is None else read  # as the gradient of the result comes
    first, second = _Linear(fc1, read, False, training), _Linear(fc2, given_back, True, training)
    if _weighs(like, rows):
        h, _ = first(rows)
        y, _ = second(Weighted.apply(h, probs, box_on(h), fc1, fc2, groups, training))
        return y
    mlp = SimpleNamespace(
        config=like.config, activation_func=like.activation_func, linear_fc1=first, linear_fc2=second
    )
    y, _ = MLP.forward(mlp, rows, Spread.apply(probs, groups))
    return y
