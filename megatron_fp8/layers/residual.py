"""The residual stream without passes of its own: x + f(norm(x)), f being attention or an MLP of ours.

    forward   x ──► norm ──► linear ──► ... ──► row linear, + x in its GEMM
    backward  dx = norm's gradient + that of "+ x", in the norm's kernel

Forward: the product of f's last linear would be written, then read with x, and their sum written: 8 bytes an element in
BF16. A GEMM whose epilogue reads x writes the sum itself: 4. It is rounded once there, where stock rounds the product,
with its bias, and the sum; a backend that does not fuse rounds as stock does (gemm/interface.py). A sum over
tensor-parallel ranks comes before the residual; the linear adds it to the sum. That saves no pass, but the host's time:
stock's addition, with a bias and dropout, is compiled by torch, and such a call costs the host as much as several
launches. If dropout comes before the residual, or the bias of a sum over ranks, stock adds both.

Backward: both readers' gradients of x meet in autograd, which adds them in a kernel that reads both and writes a third:
6 bytes an element, and the norm's backward pass has written one of them just before. So one function has both outputs,
the norm and x (`NormCast`), gets both gradients, and its kernel reads one more operand instead: 2 bytes. It rounds as
autograd does.

The norm is the linear's, as in Transformer Engine, and where stock's layer has a norm there is nothing; but the layer
takes a pair from a norm, its output and the residual. A `Fork` in that place lets the linear begin with its norm. It
gives the residual to a `ResidualSum`, which stands where the layer has bias_dropout_add; f's last linear takes it
there. The residual is not in a parcel (parcel.py): between an attention and its last linear stock makes new tensors.
What no linear has taken when the layer's pass ends, as after an error, is offered no more (`Pass`).

Left as they are: an MLP that is recomputed or done in pieces, of which the norm is a part; experts; latent attention;
classes that are not ours; modules with hooks of a script; and, for the gradient alone, a pass without gradients.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from ..rebind import Hook, When
from .linear import Fp8NormColumnParallelLinear, Fp8RowParallelLinear, hooked
from .mlp import Fp8Mlp
from .self_attention import FusedSelfAttention

_LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
_BUILT = When("when a model is built, if a layer's linear holds its norm")
_FORK = {
    name: Hook(
        *(_LAYER, name, "layers.residual", "holds IdentityOp", _BUILT),
        "Lets the linear begin with its norm, and the norm's backward pass add the residual's gradient.",
        of_object=True,
    )
    for name in ("input_layernorm", "pre_mlp_layernorm")
}
_SUM = {
    name: Hook(
        *(_LAYER, name, "layers.residual", "training fused", _BUILT),
        "Hands on what the last linear's GEMM has added to the residual.",
        of_object=True,
    )
    for name in ("self_attn_bda", "mlp_bda")
}
_PASS = Hook(
    *(_LAYER, "forward", "layers.residual", "...", _BUILT),
    "Ends what is offered to the last linears, also if the pass ends by an error.",
    of_object=True,
)
HOOKS = (*_FORK.values(), *_SUM.values(), _PASS)


class Pass:
    """Stands for the layer's forward. `runs`: inside it alone a residual is offered, and taken: if a script calls a
    part of the layer by itself, the result is the part's."""

    def __init__(self, layer: TransformerLayer):
        self._layer, self.runs = layer, False

    def __call__(self, *args, **kwargs):
        self.runs = True
        try:
            return type(self._layer).forward(self._layer, *args, **kwargs)
        finally:
            self.runs = False


class ResidualSum:
    """Stands for the layer's bias_dropout_add after its `part`. It offers the residual to the part's last linear,
    `name`, which takes it in its forward pass; then the linear's result is the sum, and nothing is left to add."""

    def __init__(self, layer: TransformerLayer, part: str, name: str, of: Pass):
        self._layer, self._reader, self._name, self._pass = layer, getattr(layer, part), name, of
        self._offered: torch.Tensor | None = None
        self._taken = False
        getattr(self._reader, name).take_residual = self._take

    def offer(self, x: torch.Tensor, alone: bool) -> None:
        """Let the linear add x (..., K) to its next result, if it is in FP8 and nothing comes between.

        alone: whether the part is called by the layer, without a wrapper and without hooks.
        """
        self._offered, self._taken = None, False
        if alone and self._pass.runs and not self._layer.hidden_dropout:
            row = getattr(self._reader, self._name)
            if isinstance(row, Fp8RowParallelLinear) and row.owned.fp8 and not hooked(row):  # no wrapper has its place
                self._offered = x

    def _take(self) -> torch.Tensor | None:
        """What the linear is to add, or None. Only the linear asks, and adds it."""
        x, self._offered = self._offered if self._pass.runs else None, None
        self._taken = x is not None
        return x

    def __call__(self, training: bool, fused: bool):
        taken, self._taken = self._taken, False
        return _has_been_added if taken else get_bias_dropout_add(training, fused)


def _has_been_added(x_with_bias, residual, prob):
    return x_with_bias[0]


class Fork(IdentityOp):
    """x -> (what the linear `name` of the layer's `part` is to be given, x for the residual), or x, which it norms.

    An IdentityOp still, to stock: there is no norm of the layer's own that it could recompute.
    """

    def __init__(self, layer: TransformerLayer, part: str, name: str, add: ResidualSum | None):
        super().__init__()
        self._place = layer, getattr(layer, part)  # in a tuple they are no part of this module
        self._part, self._name, self._add = part, name, add

    def forward(self, x, *args, **kwargs):
        layer, reader = self._place
        # A wrapper that has taken a module's place by now, and hooks, would look into a tensor without memory.
        alone = getattr(layer, self._part) is reader and not hooked(reader) and not hooked(self)
        normed = None
        if alone and torch.is_grad_enabled():
            linear = getattr(reader, self._name)
            if isinstance(linear, Fp8NormColumnParallelLinear) and not hooked(linear):
                normed, x = linear.begin(x)
        if self._add is not None:
            self._add.offer(x, alone)
        return x if normed is None else (normed, x)


def join_residuals(model: torch.nn.Module) -> None:
    """Put a Fork before each attention and MLP of the model that begins with a linear that holds its norm, and a
    ResidualSum after it if the last linear can add."""
    for layer in model.modules():
        if type(layer) not in (TransformerLayer, MoETransformerLayer):
            continue
        of = Pass(layer)
        if type(layer.input_layernorm) is IdentityOp and type(layer.self_attention) is FusedSelfAttention:
            add = _sum(layer, "self_attn_bda", "self_attention", "linear_proj", of)
            _FORK["input_layernorm"].on(layer, Fork(layer, "self_attention", "linear_qkv", add))
        chunks = layer.config.mlp_chunks_for_training, layer.config.mlp_chunks_for_prefill
        whole = not layer.recompute_mlp and chunks == (1, 1)
        if type(layer.pre_mlp_layernorm) is IdentityOp and type(layer.mlp) is Fp8Mlp and whole:
            add = _sum(layer, "mlp_bda", "mlp", "linear_fc2", of)
            _FORK["pre_mlp_layernorm"].on(layer, Fork(layer, "mlp", "linear_fc1", add))
        if any(isinstance(add, ResidualSum) for add in (layer.self_attn_bda, layer.mlp_bda)):
            _PASS.on(layer, of)


def _sum(layer: TransformerLayer, bda: str, part: str, name: str, of: Pass) -> ResidualSum | None:
    """The ResidualSum that now stands in the layer's place `bda`; None if there is to be none."""
    row = getattr(getattr(layer, part), name)
    between = row.tp_group.size() > 1 and row.bias is not None
    if getattr(layer, bda) is not get_bias_dropout_add or between:
        return None
    add = ResidualSum(layer, part, name, of)
    _SUM[bda].on(layer, add)
    return add
