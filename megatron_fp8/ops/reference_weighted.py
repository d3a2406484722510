"""Experts' SwiGLU, times the probabilities, with its cast: in plain PyTorch, the reference for triton/weighted.py.

    act = silu(h1) h2 p        of h (R', 2F) padded, with halves h1 and h2; p (R,) the probabilities of the given rows

A given row that is nowhere among the padded ones (groups.py) has no act, and its probability the gradient zero.

Arithmetic is float32, and the result is rounded to h's type: so stock's fused function rounds. Then it is cast as
quantize_groups casts what lies in memory. So FP8 gets the bits that it would get of stock's function and a cast, but
for those of the sigmoid.
"""

import torch

from ..numerics.formats import Format
from .groups import Groups
from .reference_activation import activate, activate_backward
from .reference_groups import quantize_groups


def weighted_quantize(
    h: torch.Tensor,
    probs: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cast act to FP8: (payload (R', F) if rows, payload_t (F, R') if columns).

    h: (R', 2F) padded, bf16, fp16 or fp32; what it has in rows of padding is not read. probs: (R,). The rest is as in
    quantize_groups.
    """
    there = groups.source >= 0
    p = probs[groups.source[there].long()]
    act = h.new_zeros(h.shape[0], h.shape[1] // 2)
    act[there] = (activate(h[there].float(), "swiglu") * p.float()[:, None]).to(h.dtype)
    return quantize_groups(act, groups, fmt, scale, rows=rows, columns=columns, amax_out=amax_out)


def weighted_backward_quantize(
    dy: torch.Tensor,
    h: torch.Tensor,
    probs: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    dprobs: torch.Tensor,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cast dh to FP8, of the gradient dy (R', F) of act: (payload (R', 2F) if rows, payload_t (2F, R') if columns).

    dprobs: (R,) float32, becomes the probabilities' gradient. The rest is as in weighted_quantize.
    """
    there = groups.source >= 0
    mine, given, source = h[there].float(), dy[there].float(), groups.source[there].long()
    dh = torch.zeros_like(h)
    dh[there] = activate_backward(given * probs[source].float()[:, None], mine, "swiglu").to(h.dtype)
    dprobs.zero_()[source] = (activate(mine, "swiglu") * given).sum(1)
    return quantize_groups(dh, groups, fmt, scale, rows=rows, columns=columns, amax_out=amax_out)
