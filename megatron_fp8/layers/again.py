"""What a linear's backward pass makes again instead of keeping it (--fp8-activations): q(x^T), which wgrad reads.

It is made of what waits for the backward pass in any case. A norm or an activation function keeps its own input, in
FP8, and says in a `Recipe` how its output is made of that; an attention keeps its output in BF16 (`hold`), of which a
cast with the scale of the forward pass gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Payloads


@dataclass(frozen=True, eq=False)
class Recipe:
    """make(format, scale, *kept, rows=, columns=) gives q(x) in the layouts asked for.

    late: whether x's maker makes it along with its own gradient, and so finishes what is `Late`.
    """

    make: Callable[..., Payloads]
    kept: tuple[torch.Tensor | None, ...]
    late: bool = False


@dataclass(frozen=True, eq=False)
class Late:
    """A weight gradient that waits for q(x^T): q(dy^T), and the scale and its inverse that x is cast with."""

    dy: ScaledTensor
    scale: torch.Tensor
    scale_inv: torch.Tensor


def hold(x: torch.Tensor) -> None:
    """Say that somebody keeps x in memory until the backward pass of whom x is given to."""
    x._fp8_held = True


def of_held(x: torch.Tensor) -> Recipe | None:
    """How x is cast again, where somebody holds it."""
    return Recipe(_cast, (x,)) if getattr(x, "_fp8_held", False) else None


def _cast(fmt, scale: torch.Tensor, x: torch.Tensor, *, rows: bool, columns: bool) -> Payloads:
    return source.cast(x.reshape(-1, x.shape[-1]), fmt, scale, rows=rows, columns=columns, amax_out=None)
