"""How one call of a linear is computed: decided before its forward pass, frozen, read by its backward pass too.

A `Call` is made by `plan`, by the linear or by the module that has its input first; products.py carries it out, and
handover.py has what other modules do for it.
"""

from dataclasses import dataclass

import torch

from .. import ops
from ..comm import tensor
from ..comm.wire import Flight, landed
from ..engine.owned_weight import INPUT, OwnedWeight
from ..flags.emulate import OPERANDS
from ..numerics.emulation import EmulatedFormat
from ..numerics.noise import noise_seed
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Castable
from .again import Late, Recipe

type Rounding = tuple[EmulatedFormat, tuple[int, int] | None]  # with a seed where it is stochastic


@dataclass(frozen=True, eq=False)
class Posted:
    """dy in FP8, both layouts; the ticket that autograd has of it; dy itself where someone looks at the GEMMs."""

    q: ScaledTensor
    ticket: torch.Tensor
    exact: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a linear, as its forward and its backward pass go by it.

    Attributes:
        group: the tensor-parallel ranks.
        gather, gather_dy: how x, or dy, comes from them: "bf16" or "fp8"; None: it is whole.
        sum_y, sum_dx: how y, or dx, is summed over them: "bf16" or "fp8"; None: it is not.
        scatter: whether each has its rows of such a sum (sequence parallelism), or all of it.
        training: whether what is cast counts for the scales.
        keep: whether a backward pass will come; wgrad: whether that makes a gradient of the weight.
        fp8: whether the GEMMs are FP8's; wgrad_fp8: whether the weight gradient's is.
        rounding: of a BF16 call, how operands are rounded that are emulated.
        seen: whether someone looks at the GEMMs, so that x waits in BF16 too.
        recasts: whether the backward pass casts x again, where there is a recipe.
        mailbox: holds q(dy) between the backward pass that made it and this call's own.
        late: holds a weight gradient between this call's backward pass and that of x's maker.
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
    rounding: dict[str, Rounding]
    seen: bool
    recasts: bool
    mailbox: list[Posted]
    late: list[Late]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x (s, ..., K), or a rank's part of it, as (M, K)."""
        x = source.rows(x)
        return self.start_gather(x).land() if self.gather else x

    def start_gather(self, rows: torch.Tensor) -> Flight:
        """All ranks' rows (M, ...) of this rank's."""
        return Flight(tensor.gather(rows, self.group))

    def start_sum(self, dx: torch.Tensor) -> Flight:
        """What becomes of dx (M, K): the sum over the ranks, or itself."""
        if self.sum_dx:
            return Flight(tensor.add(dx, self.group, self.scatter, self.sum_dx == "fp8"))
        return Flight(landed(dx))

    def rounded(self, operand: str, x: torch.Tensor) -> torch.Tensor:
        """x as a BF16 GEMM reads it: rounded where it is emulated."""
        how = self.rounding.get(operand)
        return x if how is None else ops.emulate(x.detach(), *how)


def plan(
    weight: OwnedWeight, group, sequence_parallel: bool, sum_dx: bool, training: bool, sum_y: bool = False
) -> Call:
    """Decide how a linear's next call is computed, and count it.

    sum_y: of a row-parallel linear; else x is gathered, and dx summed, under sequence parallelism, or without it as
    sum_dx says.
    """
    keep, fp8, config = torch.is_grad_enabled(), weight.fp8, weight.config
    wgrad = keep and weight.expect_gradient()
    gather, of_y, of_dx = "bf16", "bf16", "bf16"
    if fp8:
        gather = config.tp_gather
        of_y, of_dx = ("fp8" if config.tp_reduce_scatter in ("fp8", way) else "bf16" for way in ("forward", "backward"))
    return Call(
        weight,
        group,
        gather=gather if sequence_parallel and not sum_y else None,
        gather_dy=(gather if config.wgrad else "bf16") if sequence_parallel and sum_y else None,
        sum_y=of_y if sum_y else None,
        sum_dx=of_dx if sum_dx or (sequence_parallel and not sum_y) else None,
        scatter=sequence_parallel,
        training=training,
        keep=keep,
        wgrad=wgrad,
        fp8=fp8,
        wgrad_fp8=config.wgrad,
        rounding={} if fp8 else _rounding(weight, keep),
        seen=keep and bool(weight.events.forward or weight.events.backward),
        recasts=keep and fp8 and config.wgrad and config.activations,
        mailbox=[],
        late=[],
    )


def _rounding(weight: OwnedWeight, keep: bool) -> dict[str, Rounding]:
    # A forward pass that is computed again has the noise of the first: micro-batches come in one order.
    count = weight.count_forward(keep)
    rounding: dict[str, Rounding] = {}
    if weight.emulate is None:
        return rounding
    for i, operand in enumerate(OPERANDS):
        how = weight.emulate.for_operand(weight.path, weight.layer_number, operand, weight.step)
        if how:
            # The weight is one, and rounded alike, on all ranks and in all micro-batches.
            rank, at = (0, 0) if operand == "weight" else (weight.rank, count)
            noisy = how.rounding == "stochastic"
            rounding[operand] = how, noise_seed(*weight.identity, rank, weight.step, i, at) if noisy else None
    return rounding


def cast_input(call: Call, x: Castable, recipe: Recipe | None = None) -> tuple[ScaledTensor, torch.Tensor]:
    """x (M, K) -> (q(x), its scale), as an FP8 call casts its input.

    Under sequence parallelism the backward pass gathers it again, and transposes then.
    """
    columns = call.wgrad and call.wgrad_fp8 and call.gather is None and recipe is None
    group = call.group if call.gather == "fp8" else None
    return call.weight.cast(x, INPUT, columns=columns, training=call.training, group=group)


def takes_fp8(call: Call) -> bool:
    """Whether x may come in FP8: not where the call wants it in BF16 for a gather or for wgrad."""
    return call.fp8 and call.gather != "bf16" and (call.wgrad_fp8 or not call.wgrad)
