"""`Source`: a GEMM operand (M, K) that is not in memory yet, so that the kernel which computes it can also cast it.

The output of a norm or of an activation function, or attention's gradient, is read by one GEMM, in FP8. Writing it in
BF16 and reading it again costs four bytes an element and a rounding. So the producer returns a `Source` instead. The
code that knows the scale then has the values computed in FP8, or in their own type if the scale needs amax first.
"""

from typing import Protocol

import torch

from ..numerics.formats import Format
from . import quantize

type Payloads = tuple[torch.Tensor | None, torch.Tensor | None]  # q(x) (M, K) and q(x^T) (K, M)


class Source(Protocol):
    """Values that are not in memory. Each method computes them, and may be called more than once."""

    def cast(
        self, fmt: Format, scale: torch.Tensor, *, rows: bool, columns: bool, amax_out: torch.Tensor | None
    ) -> Payloads:
        """The values in FP8: reference.quantize of `values()`, but without the rounding to their own type."""

    def values(self) -> torch.Tensor:
        """The values (M, K) in the type of the model's activations."""


type Castable = torch.Tensor | Source


def rows(x: torch.Tensor) -> torch.Tensor:
    """Flatten x (..., K) to (M, K). For contiguous x, view costs the host half as much as reshape."""
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else x.reshape(-1, x.shape[-1])


def values(x: Castable) -> torch.Tensor:
    """x (M, K) as a tensor."""
    return x if isinstance(x, torch.Tensor) else x.values()


def cast(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor, *, rows: bool, columns: bool, amax_out: torch.Tensor | None
) -> Payloads:
    """(payload (M, K) if rows, payload_t (K, M) if columns) of x. scale and amax_out: as in reference.quantize."""
    if columns:
        return quantize(x, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return quantize(x, fmt, scale, rows=rows, amax_out=amax_out), None
