"""Activations with their casts in plain PyTorch: the reference for triton/activation.py, and the CPU's implementation.

    kind            act(x), x = h + bias                    with halves x1, x2 of x's last dimension (GATED)
    gelu            x Phi(x), Phi the normal distribution   F.gelu
    gelu_tanh       x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2 / pi)    stock's bias_gelu_fusion
    squared_relu    max(x, 0)^2
    swiglu          silu(x1) x2
    geglu           gelu_tanh(x1) x2                        stock's fused_bias_geglu

All arithmetic on the 16-bit inputs is float32. Only the result is rounded, once, to FP8 or to h's type. So the FP8
result differs from quantize(activation in BF16), which rounds twice. For an infinite x the result is the formula's in
float32, which may be NaN (-inf * 0).

The forward pass may keep x for the backward pass in one byte an element, as RowBlocks: E4M3 with a power of two for
every 128 elements of a row. For gated kinds each half is a row of its own, (2M, F). An argument h may be such blocks;
bias must then be None, because the blocks include it.
"""

import math

import torch
from torch.nn import functional

from ..numerics.blocks import BLOCK, RowBlocks
from ..numerics.formats import Format, by_dtype
from . import reference

GATED = ("swiglu", "geglu")
KINDS = ("gelu", "gelu_tanh", "squared_relu", *GATED)
_C, _CUBE = math.sqrt(2 / math.pi), 0.044715


def _normal(x: torch.Tensor) -> torch.Tensor:
    """Phi(x)."""
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(_C * x * (1 + _CUBE * x * x))
    return 0.5 * x * ((1 - t * t) * (_C + 3 * _C * _CUBE * x * x)) + 0.5 * (1 + t)


def _slope(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The derivative of _value; for gated kinds, of the function applied to the first half."""
    if kind == "gelu":
        return _normal(x) + x * (torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))
    if kind in ("gelu_tanh", "geglu"):
        return _gelu_tanh_slope(x)
    if kind == "swiglu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    return 2 * functional.relu(x)


def _value(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return x * _normal(x)  # torch's gelu on the CPU returns NaN for +inf
    if kind in ("gelu_tanh", "geglu"):
        return 0.5 * x * (1 + torch.tanh(_C * x * (1 + _CUBE * x * x)))
    if kind == "swiglu":
        return functional.silu(x)
    return functional.relu(x).square()


def shape_of(h: torch.Tensor | RowBlocks, kind: str) -> tuple[int, int]:
    """(M, F) of act(h). ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r}: use one of {', '.join(KINDS)}")
    rows, columns = h.shape
    if kind not in GATED:
        return rows, columns
    return (rows // 2, columns) if isinstance(h, RowBlocks) else (rows, columns // 2)


def blocks_for(h: torch.Tensor, kind: str) -> RowBlocks:
    """Uninitialised blocks that can keep h (M, F or 2F)."""
    rows, columns = shape_of(h, kind)
    return RowBlocks.empty(rows * (2 if kind in GATED else 1), columns, h.device)


def _keep(x: torch.Tensor, kind: str, kept: RowBlocks) -> None:
    x = x.view(kept.shape)
    whole = functional.pad(x, (0, -x.shape[1] % BLOCK))
    blocks = reference.quantize_blocks(whole.view(-1))
    kept.payload.copy_(blocks.payload.view(whole.shape)[:, : x.shape[1]])
    kept.exponents.copy_(blocks.exponents.view(kept.exponents.shape))


def _input(h: torch.Tensor | RowBlocks, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    rows, _ = shape_of(h, kind)
    if isinstance(h, RowBlocks):
        return h.dequantize().view(rows, -1)
    return h.float() if bias is None else h.float() + bias.float()


def _forward(h, kind: str, bias: torch.Tensor | None, kept: RowBlocks | None) -> torch.Tensor:
    x = _input(h, bias, kind)
    if kept is not None:
        _keep(x, kind, kept)
    if kind not in GATED:
        return _value(x, kind)
    one, two = x.chunk(2, -1)
    return _value(one, kind) * two


def _backward(dy: torch.Tensor, h, kind: str, bias: torch.Tensor | None) -> torch.Tensor:
    x, dy = _input(h, bias, kind), dy.float()
    if kind not in GATED:
        return dy * _slope(x, kind)
    one, two = x.chunk(2, -1)
    return torch.cat([dy * _slope(one, kind) * two, dy * _value(one, kind)], -1)


def _quantize(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor, rows: bool, columns: bool, amax_out: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    payload, payload_t = reference.quantize(x, fmt, scale, transpose=True, rows=rows, amax_out=amax_out)
    return payload, (payload_t if columns else None)


def activate(
    h: torch.Tensor, kind: str, bias: torch.Tensor | None = None, kept: RowBlocks | None = None
) -> torch.Tensor:
    """act(h + bias) (M, F) in h's type.

    h: (M, F), or (M, 2F) for gated kinds. bias: of h's width. kept: from `blocks_for`; h + bias is written to it.
    """
    return _forward(h, kind, bias, kept).to(h.dtype)


def activate_backward(
    dy: torch.Tensor, h: torch.Tensor | RowBlocks, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """dh = dy act'(h + bias), of h's shape, in dy's type.

    dy: (M, F). h: (M, F), or (M, 2F) for gated kinds; or the blocks that keep it, without a bias.
    """
    return _backward(dy, h, kind, bias).to(dy.dtype)


def activate_quantize(
    h: torch.Tensor | RowBlocks,
    kind: str,
    fmt: Format,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    kept: RowBlocks | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The float32 act(h + bias), cast as ops.quantize casts: (payload (M, F), payload_t (F, M)).

    scale: 0-d float32. rows, columns: whether to return payload and payload_t; None stands for one that is not wanted.
    amax_out (0-d float32) becomes max(amax_out, max|act|) of the float32 values, NaN and infinity included. h, bias,
    kept: as in activate; h may also be the blocks that keep it, without a bias.
    """
    return _quantize(_forward(h, kind, bias, kept), fmt, scale, rows, columns, amax_out)


def activate_backward_quantize(
    dy: torch.Tensor,
    h: torch.Tensor | RowBlocks,
    kind: str,
    fmt: Format,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = False,
    amax_out: torch.Tensor | None = None,
    bias_grad: bool = False,
    again: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """activate_backward's dh in float32, cast: (payload of dh's shape, payload_t, dbias).

    dbias (dh's width, dy's type) is the sum of dh's float32 rows if bias_grad is True, else None. again: (scale, FP8
    payload_t (F, M)); act(h + bias) is cast with this scale and written there, as activate_quantize would cast it. The
    other arguments are as in activate_quantize.
    """
    dh = _backward(dy, h, kind, bias)
    if again is not None:
        scale_again, out = again
        y = _forward(h, kind, bias, None)
        out.copy_(_quantize(y, by_dtype(out.dtype), scale_again, False, True, None)[1])
    payloads = _quantize(dh, fmt, scale, rows, columns, amax_out)
    return *payloads, (dh.sum(0).to(dy.dtype) if bias_grad else None)
