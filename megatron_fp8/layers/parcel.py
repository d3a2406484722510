"""A parcel: everything about one call of a linear that travels with its activation, from its producer and back.

    forward                                              backward

    norm or activation function                          norm or activation function
      │ plans the call, casts x: q(x), scale               ▲ dx, in BF16; it computes dW if that came `late`
      │ packs them; x's ticket carries the parcel          │
    stock Megatron passes the ticket on                    │
      ▼                                                    │
    linear    y = q(x) q(W)^T                            linear    dx = q(dy) q(W),  dW = q(dy^T) q(x^T)
      │ y carries the same parcel                          ▲ takes q(dy) out of the parcel
      ▼                                                    │
    activation function or attention, y's only reader ─────┘ posts q(dy) to the parcel; dy's ticket goes back

x (M, K), W (N, K) and y (M, N) as in linear_fp8.py; q(.) is a cast to FP8 with one scale for the tensor.

**The ticket.** Autograd needs a tensor in the place of x, or of dy. The ticket has x's shape and type, the edge of the
graph, and no memory: every element is the same scalar. A forward ticket reads as NaN, so that code which computes with
it by mistake shows at once.

**The carrier.** A parcel is an attribute of the tensor that stock passes on (`carried`), and of nothing else. Stock
hands the very tensor object through to the linear's GEMM. A linear whose input carries no parcel plans and casts by
itself: latent attention's projections, an adapter around the linear, a hook that replaces x, a norm that is recomputed.

**The plan.** A `Call` says how one call is computed. It is frozen, and made before the forward pass; the backward pass
reads no flag that may have changed since. To plan changes nothing, and calls that are alike share one plan (`Calls`).
What belongs to one call alone is in its parcel.

**The recipe** (--fp8-activations). wgrad reads q(x^T), which waits for the backward pass as one byte an element. It can
be made again instead, from what waits there in any case. A norm or an activation function keeps its own input, in FP8,
and its `Recipe` makes q(x^T) of that. An attention kernel keeps its output in BF16 (`hold`): a second cast with the
forward pass's scale gives the same bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import gemm
from ..comm import tensor
from ..comm.wire import Flight
from ..engine.owned_weight import GRAD, INPUT, OwnedWeight
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Castable, Payloads


@dataclass(frozen=True, eq=False)
class Call:
    """How a call of a linear is computed, in both passes.

    Attributes:
        weight: the linear's.
        group: the tensor-parallel ranks.
        gather, gather_dy: how the other ranks' rows of x, or of dy, come here: "bf16" or "fp8"; None: all are here.
        sum_y, sum_dx: how y, or dx, is summed over the ranks: "bf16" or "fp8"; None: it is not.
        scatter: whether each rank gets its rows of such a sum (sequence parallelism), or all of them.
        training: whether casts count for the scales.
        keep: whether a backward pass will come.
        wgrad: whether that computes a gradient of the weight.
        fp8: whether the GEMMs are in FP8.
        wgrad_fp8: whether the weight gradient's is.
        seen: whether observers see the GEMMs; then x waits for the backward pass in BF16 too.
        recasts: whether the backward pass makes q(x^T) again if there is a recipe.
        takes_x: whether x may come in FP8.
        takes_dy: whether dy may, if y is the plain product.
        columns: whether the forward pass casts q(x^T) too, unless there is a recipe for it.
    """

    weight: OwnedWeight
    group: torch.distributed.ProcessGroup
    gather: str | None
    gather_dy: str | None
    sum_y: str | None
    sum_dx: str | None
    scatter: bool
    training: bool
    keep: bool
    wgrad: bool
    fp8: bool
    wgrad_fp8: bool
    seen: bool
    recasts: bool
    takes_x: bool
    takes_dy: bool
    columns: bool

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x (s, ..., K), or this rank's part of it, as (M, K)."""
        x = source.rows(x)
        return self.start_gather(x).land() if self.gather else x

    def start_gather(self, rows: torch.Tensor) -> Flight:
        """Start to gather all ranks' rows (M, ...); this rank has `rows`."""
        return Flight(tensor.gather(rows, self.group))

    def start_sum(self, dx: torch.Tensor) -> Flight:
        """Start the sum of dx (M, K) over the ranks."""
        return Flight(tensor.add(dx, self.group, self.scatter, self.sum_dx == "fp8"))

    def show_forward(self, x: torch.Tensor, read_x: gemm.Operand, read_w: gemm.Operand) -> None:
        """Tell observers of the forward pass."""
        whole = self.whole(x)
        for look in self.weight.events.forward:
            look(self.weight, whole, read_x, read_w)

    def show_backward(self, x: torch.Tensor, dy: torch.Tensor | None, dgrad: tuple, product) -> None:
        """Tell observers of the backward pass; x as in the forward pass."""
        whole, wgrad = self.whole(x), None if product is None else (product.a.T, product.b.T)
        for look in self.weight.events.backward:
            look(self.weight, whole, dy, dgrad, wgrad)


def plan(
    weight: OwnedWeight, group, sequence_parallel: bool, sum_dx: bool, training: bool, sum_y: bool = False
) -> Call:
    """Plan a linear's call as things stand now; changes nothing.

    A row-parallel linear sums y (`sum_y`). Any other gathers x and sums dx under sequence parallelism, and without it
    sums dx if `sum_dx`.

    Raises UserError as OwnedWeight.makes_gradient.
    """
    keep, fp8, config = torch.is_grad_enabled(), weight.fp8, weight.config
    wgrad = keep and weight.makes_gradient()
    fp8_sums = config.tp_reduce_scatter if fp8 else None
    gather = config.tp_gather if fp8 else "bf16"
    of_x = gather if (gathers_x := sequence_parallel and not sum_y) else None
    all_dy_in_fp8 = config.wgrad or not wgrad  # no BF16 GEMM reads dy
    return Call(
        weight,
        group,
        gather=of_x,
        gather_dy=(gather if config.wgrad else "bf16") if sequence_parallel and sum_y else None,
        sum_y=("fp8" if fp8_sums in ("fp8", "forward") else "bf16") if sum_y else None,
        sum_dx=("fp8" if fp8_sums in ("fp8", "backward") else "bf16") if sum_dx or gathers_x else None,
        scatter=sequence_parallel,
        training=training,
        keep=keep,
        wgrad=wgrad,
        fp8=fp8,
        wgrad_fp8=config.wgrad,
        seen=keep and bool(weight.events.forward or weight.events.backward),
        recasts=keep and fp8 and config.wgrad and config.activations,
        # Without a gradient as with one: a BF16 weight gradient reads a rounded x, and then all passes cast that one.
        takes_x=fp8 and of_x != "bf16" and config.wgrad,
        takes_dy=fp8 and keep and all_dy_in_fp8 and not sum_y,
        columns=wgrad and config.wgrad and of_x is None,
    )


class Calls:
    """The plans of one linear's calls: each kind of call is planned once."""

    def __init__(self, weight: OwnedWeight):
        self._weight = weight
        self._planned: dict[tuple[bool, ...], Call] = {}

    def plan(self, group, sequence_parallel: bool, sum_dx: bool, training: bool, sum_y: bool = False) -> Call:
        """As `plan`. All that may change between two calls of a linear is in the key."""
        weight, keep = self._weight, torch.is_grad_enabled()
        events = weight.events
        seen = bool(events.forward or events.backward)
        key = keep, keep and weight.makes_gradient(), weight.fp8, seen, training, sequence_parallel, sum_dx
        call = self._planned.get(key)
        if call is None:
            call = self._planned[key] = plan(weight, group, sequence_parallel, sum_dx, training, sum_y)
        return call


@dataclass(slots=True, eq=False)
class Recipe:
    """make(format, scale, *kept, rows=, columns=) gives q(x) in the layouts asked for.

    late: whether x's producer makes q(x^T) along with its own gradient, and so runs the GEMM that is `Late`.
    """

    make: Callable[..., Payloads]
    kept: tuple[torch.Tensor | None, ...]
    late: bool = False


@dataclass(slots=True, eq=False)
class Late:
    """A weight gradient that waits for q(x^T): q(dy^T), and the scale and its inverse that x is cast with."""

    dy: ScaledTensor
    scale: torch.Tensor
    scale_inv: torch.Tensor


@dataclass(slots=True, eq=False)
class Posted:
    """dy in FP8, in the layouts that the call reads; its ticket; dy itself if observers see the GEMMs."""

    q: ScaledTensor
    ticket: torch.Tensor
    exact: torch.Tensor | None


class Parcel:
    """One call of a linear, on its way; see the top of the file.

    Attributes:
        call: the plan.
        q, scale: q(x) and its scale, from the cast until the linear has read them.
        exact: x (M, K) in BF16 if observers see the GEMMs.
        recipe: how q(x^T) is made again, or None.
        dy: what the producer of y's gradient has posted, until this call's backward pass.
        late: a weight gradient on its way from this call's backward pass to that of x's producer.
    """

    __slots__ = "call", "dy", "exact", "late", "q", "recipe", "scale"

    def __init__(self, call: Call):
        self.call = call
        self.q: ScaledTensor | None = None
        self.scale: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.recipe: Recipe | None = None
        self.dy: Posted | None = None
        self.late: Late | None = None

    def cast(self, x: Castable, recipe: Recipe | None) -> None:
        """Cast x (M, K) as the call reads it.

        Under sequence parallelism the backward pass gathers q(x) again, and transposes then.
        """
        call = self.call
        columns, group = call.columns and recipe is None, call.group if call.gather == "fp8" else None
        self.q, self.scale = call.weight.cast(x, INPUT, columns=columns, training=call.training, group=group)
        self.recipe = recipe

    def pack(self, x: Castable, like: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
        """Cast x (M, K) and return the ticket that carries this parcel: (..., K), shape and type after `like`."""
        self.cast(x, recipe)
        if self.call.seen:
            self.exact = source.values(x)
        stands = ticket((*like.shape[:-1], self.call.weight.param.shape[1]), like, torch.nan)
        stands._fp8_parcel = self  # type: ignore[attr-defined]
        return stands

    def post(self, dy: Castable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Cast the gradient dy (M, N) of y; returns what autograd is to be given for it: of y's shape, and the type of
        `like`. Only for y's sole reader."""
        call = self.call
        q, _ = call.weight.cast(dy, GRAD, columns=call.wgrad, training=call.training)
        stands = ticket(shape, like, 0.0)
        self.dy = Posted(q, stands, source.values(dy) if call.seen else None)
        return stands


_HELD = "held"  # in the place of a parcel


def carry(x: torch.Tensor, parcel: Parcel) -> None:
    """Let x carry the parcel."""
    x._fp8_parcel = parcel  # type: ignore[attr-defined]


def carried(x: torch.Tensor) -> Parcel | None:
    """The parcel that x carries, or None: of the call that x is the input of, or of the one whose result it is."""
    parcel = getattr(x, "_fp8_parcel", None)
    return None if parcel is _HELD else parcel


def arriving(x: torch.Tensor) -> Parcel | None:
    """The parcel of x (..., K) if x comes in FP8, and so is a ticket; else None.

    Raises RuntimeError for a ticket that has lost its parcel: something between the producer and the linear has
    replaced the tensor.
    """
    parcel = getattr(x, "_fp8_parcel", None)
    if parcel is not None and parcel is not _HELD and parcel.q is not None:
        return parcel
    if x.numel() > 1 and not any(x.stride()):
        raise RuntimeError(
            "an FP8 linear was called with another input than its norm's result: something between the two, such as a "
            "wrapper, has replaced it"
        )
    return None


def hold(x: torch.Tensor) -> None:
    """Mark x: its producer keeps it until the backward pass, so q(x^T) may be cast from it again."""
    x._fp8_parcel = _HELD  # type: ignore[attr-defined]


def recipe_of(x: torch.Tensor) -> Recipe | None:
    """How a held x is cast again; None if it is not held."""
    return Recipe(_cast, (x,)) if getattr(x, "_fp8_parcel", None) is _HELD else None


def _cast(fmt, scale: torch.Tensor, x: torch.Tensor, *, rows: bool, columns: bool) -> Payloads:
    return source.cast(x.reshape(-1, x.shape[-1]), fmt, scale, rows=rows, columns=columns, amax_out=None)


def ticket(shape: tuple[int, ...], like: torch.Tensor, value: float) -> torch.Tensor:
    """A tensor of that shape and of `like`'s type without memory of its own: every element is one shared scalar."""
    return _scalar(value, like.dtype, like.device).as_strided(shape, (0,) * len(shape))


@functools.cache
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor made in that mode is no use to a later pass with gradients
        return torch.full((), value, dtype=dtype, device=device)
