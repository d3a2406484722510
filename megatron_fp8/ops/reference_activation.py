"""Activations with their casts in plain PyTorch: the oracle for ops/triton/activation.py, and what runs on the CPU.

    kind            act(x), x = h + bias                    with halves x1, x2 of x's last dimension (GATED)
    gelu            x Phi(x), Phi the normal distribution   F.gelu
    gelu_tanh       x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2 / pi)    stock's bias_gelu_fusion
    squared_relu    max(x, 0)^2
    swiglu          silu(x1) x2
    geglu           gelu_tanh(x1) x2                        stock's fused_bias_geglu

Everything is float32 from the 16-bit inputs on; the one rounding is that of the result, to FP8 or to h's type. So FP8
here differs from quantize(activation in BF16), which rounds twice. An infinity of x becomes what the formula makes of
it, which may be a NaN, but never a number.

What the backward pass needs of h may be kept in a byte an element: x in RowBlocks, E4M3 with a power of two for each
128 of a row; of gated kinds each half is a row, (2M, F). Wherever h is an argument such blocks will do, without a bias,
which is in them.
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
    """d value / d x of a kind that is not gated; for gated kinds of their first half's function."""
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
        return x * _normal(x)  # torch's gelu on the CPU makes a NaN of +inf
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
    """Unwritten blocks in which h (M, F or 2F) can be kept."""
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
    """act(h + bias): h (M, F), of gated kinds (M, 2F), and bias of h's width -> (M, F) in h's type. kept, of
    `blocks_for`, becomes h + bias."""
    return _forward(h, kind, bias, kept).to(h.dtype)


def activate_backward(
    dy: torch.Tensor, h: torch.Tensor | RowBlocks, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """dh = dy act'(h + bias): dy (M, F), h (M, F), of gated kinds (M, 2F) -> (M, F or 2F) in dy's type."""
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
    """act(h + bias) of activate, cast from float32 as ops.quantize casts: (payload (M, F), payload_t (F, M)).

    scale: 0-d float32. rows, columns: which of the two are wanted; the other is None. amax_out (0-d float32) becomes
    max(amax_out, max|act|) of the float32 values, NaN and infinity included. kept as in activate.
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
    """dh of activate_backward, cast from float32: (payload of its shape, payload_t, dbias); else as activate_quantize.

    dbias (dh's width, dy's type), where bias_grad asks for it: the sum of dh's float32 values over rows. again: a scale
    and FP8 columns (F, M), which become those that activate_quantize would make of h.
    """
    dh = _backward(dy, h, kind, bias)
    if again is not None:
        scale_again, out = again
        y = _forward(h, kind, bias, None)
        out.copy_(_quantize(y, by_dtype(out.dtype), scale_again, False, True, None)[1])
    payloads = _quantize(dh, fmt, scale, rows, columns, amax_out)
    return *payloads, (dh.sum(0).to(dy.dtype) if bias_grad else None)
