"""Megatron's MLP with the activation function between FP8 products: h = fc1(x), y = fc2(act(h + b)).

    forward    act(h + b) is made in FP8, for fc2 alone: BF16 would be written and read again for nothing
    backward   dh = d act(h + b) * act'(h + b) is made in FP8, for fc1's two products alone

Both in one kernel that reads h (and the gradient) once (ops/triton/activation.py). What is kept for the backward pass
is h, as with any MLP, and q(act)^T; with --fp8-activations h + b in FP8 alone, of which q(act)^T is made again.

The parameters are stock's, and so is what is not an activation function known here, or not between two FP8 linears:
experts' tokens with weights, a clamp, another function.
"""

import functools

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.mlp import MLP

from .. import gemm, ops
from ..numerics.blocks import RowBlocks
from ..numerics.formats import Format
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Payloads
from .function import Function
from .linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, hooked
from .parcel import Parcel, Recipe, carried


def activation_kind(config) -> str | None:
    """The name by which ops.activate knows the activation function that `config` has, or None."""
    function, gated = config.activation_func, config.gated_linear_unit
    if config.activation_func_clamp_value is not None or config.glu_linear_offset or config.use_te_activation_func:
        return None
    fused = config.bias_activation_fusion  # stock's fused kernels have the tanh form of GELU
    if gated:
        return "swiglu" if function is F.silu else "geglu" if function is F.gelu and fused else None
    if function is F.gelu:
        return "gelu_tanh" if fused else "gelu"
    return "squared_relu" if function is squared_relu else None


class Activated:
    """act(h + bias) as a Source, of h (M, F) or, gated, (M, 2F). kept, if it is given, becomes h + bias, once something
    was made."""

    def __init__(self, h: torch.Tensor, bias: torch.Tensor | None, kind: str, kept: RowBlocks | None):
        self._h, self._bias, self._kind, self._kept = h, bias, kind, kept

    def cast(self, fmt, scale, *, rows, columns, amax_out) -> Payloads:
        how = {"rows": rows, "columns": columns, "amax_out": amax_out, "kept": self._kept}
        return ops.activate_quantize(self._h, self._kind, fmt, scale, bias=self._bias, **how)

    def values(self) -> torch.Tensor:
        return ops.activate(self._h, self._kind, self._bias, self._kept)


def _again(kind: str, fmt, scale: torch.Tensor, *kept, rows: bool, columns: bool) -> Payloads:
    """act(h + bias) in FP8 once more; kept: the payload and the exponents of h + bias."""
    return ops.activate_quantize(RowBlocks(*kept), kind, fmt, scale, rows=rows, columns=columns)


class ActivationGradient:
    """dy * act'(h + bias) as a Source, of dy (M, F); dbias, of h's width: its sum over M, once it was made in FP8.

    h may be blocks, which have the bias in them. again: the format and scale of act(h + bias)^T, if that is to be
    made along with it; columns: act(h + bias)^T, once it is made.
    """

    def __init__(
        self,
        dy: torch.Tensor,
        h: torch.Tensor | RowBlocks,
        bias: torch.Tensor | None,
        kind: str,
        again: tuple[Format, torch.Tensor] | None,
    ):
        self._dy, self._h, self._kind, self._again = dy, h, kind, again
        self.columns: torch.Tensor | None = None
        self._bias = None if isinstance(h, RowBlocks) else bias
        self._bias_type = None if bias is None else bias.dtype
        self.dbias: torch.Tensor | None = None

    def cast(self, fmt, scale, *, rows, columns, amax_out) -> Payloads:
        how = {"rows": rows, "columns": columns, "amax_out": amax_out, "bias_grad": self._bias_type is not None}
        again = None
        if self._again is not None and self.columns is None:
            fmt_again, scale_again = self._again
            self.columns = self._dy.new_empty(self._dy.shape[::-1], dtype=fmt_again.dtype)
            again = scale_again, self.columns
        *payloads, self.dbias = ops.activate_backward_quantize(
            self._dy, self._h, self._kind, fmt, scale, bias=self._bias, again=again, **how
        )
        return payloads[0], payloads[1]

    def values(self) -> torch.Tensor:
        dh = ops.activate_backward(self._dy, self._h, self._kind, self._bias)
        if self._bias_type is not None and self.dbias is None:  # an observer, after the cast, changes nothing
            self.dbias = dh.sum(0, dtype=torch.float32).to(self._bias_type)
        return dh


class ActivationCast(Function):
    """act(h + bias) of h (..., F or 2F), made in FP8 for the linear that follows.

    maker: the parcel that h carries, if its linear takes the gradient in FP8.
    """

    @staticmethod
    def forward(ctx, parcel: Parcel, h, bias, kind: str, maker: Parcel | None):
        flat = source.rows(h)
        kept = ops.blocks_for(flat, kind) if parcel.call.recasts else None
        ctx.kind, ctx.maker, ctx.shape, ctx.parcel = kind, maker, h.shape, parcel
        recipe = None
        if kept is None:
            ctx.save_for_backward(bias, h)
        else:
            tensors = kept.payload, kept.exponents
            ctx.save_for_backward(bias, *tensors)
            recipe = Recipe(functools.partial(_again, kind), tensors, late=True)
        return parcel.pack(Activated(flat, bias, kind, kept), h, recipe)

    @staticmethod
    def backward(ctx, dy):
        bias, *h = ctx.saved_tensors
        flat = source.rows(h[0]) if len(h) == 1 else RowBlocks(*h)
        dy, weight = source.rows(dy), ctx.parcel.call.weight
        late, ctx.parcel.late = ctx.parcel.late, None
        fmt = weight.config.forward_format
        gradient = ActivationGradient(dy, flat, bias, ctx.kind, late and (fmt, late.scale))
        dh = gradient.values().view(ctx.shape) if ctx.maker is None else ctx.maker.post(gradient, ctx.shape, dy)
        if late is not None:
            columns = gradient.columns
            if columns is None:  # dh was made in memory, so that a scale could be found
                _, columns = _again(ctx.kind, fmt, late.scale, *h, rows=False, columns=True)
            assert columns is not None
            weight.take_gradient(gemm.Product(late.dy, ScaledTensor(columns, late.scale_inv)))
        return None, dh, gradient.dbias, None, None


class Fp8Mlp(MLP):
    """Stock's MLP; see the top of the file."""

    linear_fc1: Fp8ColumnParallelLinear
    linear_fc2: Fp8RowParallelLinear

    def forward(self, hidden_states, per_token_scale=None, **kwargs):
        kind = activation_kind(self.config)
        ours = isinstance(self.linear_fc2, Fp8RowParallelLinear) and not hooked(self.linear_fc2)  # and no wrapper now
        if kind is None or per_token_scale is not None or not ours or hooked(self.linear_fc1):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        call = self.linear_fc2.plan()
        if not call.takes_x:
            return super().forward(hidden_states, **kwargs)
        h, bias = self.linear_fc1(hidden_states)
        maker = carried(h) if isinstance(self.linear_fc1, Fp8ColumnParallelLinear) else None
        activated = ActivationCast.apply(Parcel(call), h, bias, kind, maker)
        del h  # with --fp8-activations nothing else keeps it
        return self.linear_fc2(activated)
