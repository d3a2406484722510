"""FP8 on its way between a linear and the modules before and after it.

x may come in FP8 (`Fp8Activation`), cast by the module before as the linear would (`cast_input`), in the kernel that
makes it.  What autograd sees of it is a ticket: a tensor of x's shape and type without memory, which carries the edge
of the graph, and whose gradient is that of x.  In the same way dy may come in FP8 from the module after, which made it
(`post`): the cast lies in the call's mailbox, and autograd carries a ticket from one backward pass to the other.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..engine.owned_weight import GRAD
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Castable
from .again import Recipe
from .call import Call, Posted, cast_input


@dataclass(frozen=True, eq=False)
class Fp8Activation:
    """An activation in FP8 on its way from one module to a linear: the ticket for autograd, q(x), and its scale.

    exact: x itself where someone looks at the GEMMs, else None; recipe: None where q(x) waits for the backward pass.
    """

    ticket: torch.Tensor
    q: ScaledTensor
    scale: torch.Tensor
    exact: torch.Tensor | None
    recipe: Recipe | None


def hand_over(maker: type[torch.autograd.Function], call: Call, *inputs) -> tuple[Fp8Activation, Any]:
    """What a maker makes of its inputs for `call`, and what else it returns.

    Its forward pass gets (ctx, call, made, *inputs) and returns what `give` does, and something else or None; its
    backward pass returns None for the first two.
    """
    made: list[tuple[ScaledTensor, torch.Tensor, torch.Tensor | None, Recipe | None]] = []
    ticket, other = maker.apply(call, made, *inputs)
    return Fp8Activation(ticket, *made[0]), other


def give(call: Call, made: list, x: Castable, like: torch.Tensor, recipe: Recipe | None = None) -> torch.Tensor:
    """Cast x (M, K) for `call` into `made`; returns the ticket, of the type and the leading shape of `like`."""
    q, scale = cast_input(call, x, recipe)
    exact = source.values(x) if call.seen else None
    shape = *like.shape[:-1], call.weight.param.shape[1]
    made.append((q, scale, None if exact is None else exact.view(shape), recipe))
    return ticket(shape, like)


def ticket(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape, of the type of `like`, without memory: what autograd sees of one that is in FP8."""
    return torch.empty((), dtype=like.dtype, device=like.device).as_strided(shape, (0,) * len(shape))


def maker_of(y: torch.Tensor) -> Call | None:
    """The call that gave y and takes its gradient in FP8, or None.

    Only whoever alone reads y may ask, and `post` to it.
    """
    return getattr(y, "_fp8_call", None)


def post(call: Call, dy: Castable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Cast the gradient dy (M, N) of a call's result; what autograd is to be given for it: of the result's shape, and
    the type of `like`."""
    q, _ = call.weight.cast(dy, GRAD, columns=call.wgrad, training=call.training)
    sent = ticket(shape, like)
    call.mailbox.append(Posted(q, sent, source.values(dy) if call.seen else None))
    return sent
