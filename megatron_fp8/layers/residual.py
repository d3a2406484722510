"""The gradient of the residual stream, added where the norm's backward pass writes its own.

    forward   x ──► norm ──► linear ──► ... ──► + x        backward   dx = norm's gradient + that of "+ x"

Both readers' gradients of x meet in autograd, which adds them in a kernel that reads both and writes a third: 6 bytes
an element in BF16, and the norm's backward pass has written one of them just before.  So one function has both outputs,
the norm and x (`NormCast`), gets both gradients, and its kernel reads one more operand instead: 2 bytes.

The norm is the linear's, as in Transformer Engine, and where stock's layer has a norm there is nothing; but the layer
takes a pair from a norm, its output and the residual.  A `Fork` in that place lets the linear begin with its norm.

Not forked, which costs time but changes no bit, since the kernel rounds as autograd does: a pass without gradients; an
MLP that is recomputed or done in pieces, of which the norm is a part; experts; latent attention; classes not ours.
"""

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from .linear import Fp8NormColumnParallelLinear, hooked
from .mlp import Fp8Mlp
from .self_attention import FusedSelfAttention


class Fork(IdentityOp):
    """x -> (what the linear `name` of `reader` is to be given, x for the residual), or x, which that linear norms.

    An IdentityOp still, to stock: there is no norm of the layer's own that it could recompute.
    """

    def __init__(self, reader: torch.nn.Module, name: str):
        super().__init__()
        self._reader, self._name = (reader,), name  # in a tuple it is no part of this module

    def forward(self, x, *args, **kwargs):
        linear = getattr(self._reader[0], self._name)
        if torch.is_grad_enabled() and isinstance(linear, Fp8NormColumnParallelLinear) and not hooked(linear):
            return linear.begin(x)
        return x


def fork_residuals(model: torch.nn.Module) -> None:
    """Put a Fork before each attention and MLP of the model that begins with a linear that holds its norm."""
    for layer in model.modules():
        if type(layer) not in (TransformerLayer, MoETransformerLayer):
            continue
        if type(layer.input_layernorm) is IdentityOp and type(layer.self_attention) is FusedSelfAttention:
            layer.input_layernorm = Fork(layer.self_attention, "linear_qkv")
        whole = not layer.recompute_mlp and layer.config.mlp_chunks_for_training == 1
        if type(layer.pre_mlp_layernorm) is IdentityOp and type(layer.mlp) is Fp8Mlp and whole:
            layer.pre_mlp_layernorm = Fork(layer.mlp, "linear_fc1")
