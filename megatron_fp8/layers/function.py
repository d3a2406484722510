"""torch's autograd.Function, applied with less host time.

torch's `apply` asks at each call whether `setup_context` is overridden, and looks for tensors of functorch's transforms
(vmap, grad) among the arguments. That is 3 us of 7 on one CPU, and a layer has eight of these calls. The functions here
have no `setup_context`, and a layer is not transformed. So their `apply` is the one that torch's own calls at its end.
"""

import torch


class Function(torch.autograd.Function):
    """A base for functions with `forward(ctx, ...)` and `backward(ctx, ...)`. Not for functorch's transforms."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.apply = super(torch.autograd.Function, cls).apply


def announce(ctx) -> None:
    """Tell the function that made this one's first input that its backward pass comes next, so that it may start now
    what it will wait for: call `announced`, if it has left one on its ctx."""
    maker = ctx.next_functions[0][0]
    announced = getattr(maker, "announced", None)
    if announced is not None:
        announced(maker)
