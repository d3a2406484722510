"""Values (M, K) on their way to FP8: in memory, or to be cast by the very kernel that makes them.

A norm, an activation function or an attention's gradient is read by one GEMM, in FP8. Written in BF16 and read again
it costs four bytes an element for nothing, and a rounding. So who makes such values may describe them instead, as a
`Source`, and what knows the scale has them made: in FP8, or in their own type where a scale must be found first.
"""

from typing import Protocol

import torch

from ..numerics.formats import Format
from . import by_device

type Payloads = tuple[torch.Tensor | None, torch.Tensor | None]  # q(x) (M, K) and q(x^T) (K, M)


class Source(Protocol):
    """Values that are not in memory; each method may be called more than once."""

    def cast(
        self, fmt: Format, scale: torch.Tensor, *, rows: bool, columns: bool, amax_out: torch.Tensor | None
    ) -> Payloads:
        """In FP8, as reference.quantize does of what `values` gives, without its rounding."""

    def values(self) -> torch.Tensor:
        """(M, K) in the type of the model's activations."""


type Castable = torch.Tensor | Source


def rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., K) as (M, K): of what is contiguous, half of what reshape costs the host."""
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else x.reshape(-1, x.shape[-1])


def values(x: Castable) -> torch.Tensor:
    """x (M, K) in memory."""
    return x if isinstance(x, torch.Tensor) else x.values()


def cast(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor, *, rows: bool, columns: bool, amax_out: torch.Tensor | None
) -> Payloads:
    """x (M, K) in FP8 with `scale` (0-d float32), in the layouts asked for; amax_out as reference.quantize has it."""
    if columns:
        return by_device.quantize(x, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return by_device.quantize(x, fmt, scale, rows=rows, amax_out=amax_out), None
