"""Casts of several experts' rows in plain PyTorch: the reference for the kernels, and the CPU's implementation."""

import torch

from ..numerics.formats import Format, encode
from .groups import TILE, Groups
from .reference import amax


def quantize_groups(
    x: torch.Tensor,
    groups: Groups,
    fmt: Format,
    scale: torch.Tensor,
    *,
    rows: bool,
    columns: bool,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cast x to FP8, each expert's rows with its own scale: (payload (R', K) if rows, payload_t (K, R') if columns).

    x: (R, K) as given, or (R', K) padded (groups.py); bf16, fp16 or fp32. What it has in rows of padding is not read:
    they become zeros. scale: (E,) float32. amax_out: (E,) float32, becomes max(amax_out, max|x|) of each expert's rows.
    Rows beyond the last tile are not written.
    """
    given, parts = x.shape[0] != groups.rows, groups.parts
    payload = torch.empty(groups.rows, x.shape[1], dtype=fmt.dtype, device=x.device)
    for e, part in enumerate(parts):
        begin, count = part.start, part.stop - part.start
        mine = x[groups.source[part].long()] if given else x[part]
        if count and amax_out is not None:
            torch.maximum(amax_out[e], amax(mine), out=amax_out[e])
        payload[part] = encode(mine.contiguous(), fmt, scale[e])
        payload[part.stop : begin + -(-count // TILE) * TILE].view(torch.uint8).zero_()
    return payload if rows else None, payload.t().contiguous() if columns else None


def quantize_routed(
    x: torch.Tensor,
    source: torch.Tensor,
    expert: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor,
    *,
    amax_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather rows of x and cast each to FP8 with its expert's scale: payload (R, K), row i of x[source[i]].

    x: (T, K), bf16, fp16 or fp32. source: (R,) int64. expert: (R,) int64, for each row its expert. scale: (E,) float32.
    amax_out: (E,) float32, becomes max(amax_out, max|x|) of each expert's rows.
    """
    gathered = x[source]
    if amax_out is not None and source.numel():
        amax_out.scatter_reduce_(0, expert, gathered.abs().amax(1).float(), "amax")
    return encode(gathered, fmt, scale[expert][:, None])


def spread_groups(
    codes: torch.Tensor, groups: Groups, *, rows: bool, columns: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What quantize_groups makes of rows that come in FP8: (payload (R', K) if rows, payload_t (K, R') if columns).

    codes: (R, K) as given. Rows of padding become zeros. Rows beyond the last tile are not written.
    """
    payload = torch.empty(groups.rows, codes.shape[1], dtype=codes.dtype, device=codes.device)
    assert groups.place is not None
    payload.view(torch.uint8).zero_().index_copy_(0, groups.place, codes.view(torch.uint8))
    return payload if rows else None, payload.t().contiguous() if columns else None


def transpose_each(payloads: torch.Tensor, out: torch.Tensor) -> None:
    """out (E, K, N) = the transpose of each of payloads (E, N, K) in FP8, of which each is contiguous."""
    out.copy_(payloads.mT)
