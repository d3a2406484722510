"""Embeddings of tokens and of learned positions that add their gradient to main_grad, as linears do; and the
placeholder that autograd gets in place of the head's gradient.

    y = W[tokens]            dW[t] = sum of dy over the places of token t

A micro-batch has a few thousand different tokens, the vocabulary 50 thousand. Torch makes a BF16 gradient of all rows,
zeros too, and then adds it to the FP32 main_grad: four passes over the table. With tied embeddings the head's
placeholder adds two more. Here only the rows of the micro-batch's tokens are read and written, in FP32, without any
rounding.

main_grad.py says when this serves.

Stock's head adds to main_grad too, and gives autograd an empty gradient, as large as the table in BF16. If the table is
tied, that gradient would wait for the embedding's until the backward pass ends: 620 MB of a rank of 175B at TP 2, on
top of all activations. So the head reads a view of W without that mark. The view's backward pass gives the placeholder:
none if the embedding gives one, else one that takes no memory (main_grad.py).

Megatron copies y (b, s, h) into (s, b, h), and dy comes back in that order. So y is made in that order if no other rank
must add to it, and dy's rows are read as they lie.
"""

from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F

from .. import ops
from ..rebind import Hook, When
from .main_grad import added, adds, let_add

_TIED, _TURNED = "fp8_is_head_too", "fp8_turned"  # marks: this stage's head uses the table too; its result is (s, b, h)


_BUILT = When("when a model is built, without --no-gradient-accumulation-fusion")
_HEAD = Hook(
    *("megatron.core.tensor_parallel.ColumnParallelLinear", "_forward_impl", "layers.embedding", "self input weight"),
    _BUILT,
    "Spares the LM head, which adds to main_grad, an empty gradient as large as the table.",
    of_object=True,
)
_POSITIONS = Hook(
    *("torch.nn.Embedding", "forward", "layers.embedding", "self input", _BUILT),
    "Lets learned positions add their gradient to main_grad.",
    of_object=True,
)
HOOKS = (_HEAD, _POSITIONS)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        if getattr(weight, _TURNED, False) and tokens.dim() == 2:
            return F.embedding(tokens.t(), weight).transpose(0, 1)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dy):
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if tokens.dim() == 2 and not dy.is_contiguous():
            tokens, dy = tokens.t(), dy.transpose(0, 1)
        ops.add_rows(weight.main_grad, tokens.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return None, added(weight)


class _HeadWeight(torch.autograd.Function):
    """W (N, K) for a head that adds to main_grad by itself."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, nothing):
        assert nothing is None
        weight = ctx.weight
        if getattr(weight, _TIED, False):
            return None  # the embedding gives one in the same graph
        return added(weight)


class Functional:
    """torch.nn.functional; for weights whose gradient goes to main_grad, `embedding` is the one above."""

    def __getattr__(self, name: str):
        return getattr(F, name)

    @staticmethod
    def embedding(tokens, weight, *args, **kwargs):
        if adds(weight) and not (args or kwargs):
            return _Embedding.apply(tokens, weight)
        return F.embedding(tokens, weight, *args, **kwargs)


def functional(stock) -> Functional:
    """Replaces the torch.nn.functional that stock's layers use."""
    return Functional()


def _look_up(table: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    return Functional.embedding(input, table.weight)


def _head_product(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The head's product `stock`, without the empty gradient that autograd would get for its weight."""

    def product(*, weight: torch.Tensor, **how):
        if torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
            main_grad, weight = weight.main_grad, _HeadWeight.apply(weight)
            weight.main_grad = main_grad
        return stock(weight=weight, **how)

    return product


def add_to_main_grad(model) -> None:
    """Let a GPTModel's embeddings add their gradient to main_grad, if stock's linears add theirs; and let its head
    leave no gradient in autograd.

    If a table is tied, or multi-token prediction reads it too, stock also adds autograd's gradient to main_grad
    (`zero_out_wgrad`); the head's is zeros then. Here that gradient is not read. On a pipeline's last stage stock does
    not add it, and loses multi-token prediction's part of a tied table's gradient.
    """
    if model.post_process and model.output_layer.gradient_accumulation_fusion:
        _HEAD.on(model.output_layer, _head_product(model.output_layer._forward_impl))
    if not (hasattr(model, "embedding") and model.config.gradient_accumulation_fusion):
        return
    alone = model.embedding.tp_group.size() == 1
    positions = getattr(model.embedding, "position_embeddings", None)
    if isinstance(positions, torch.nn.Embedding):
        let_add(positions.weight)
        setattr(positions.weight, _TURNED, alone)
        _POSITIONS.on(positions, MethodType(_look_up, positions))  # which a deep copy binds to itself
    weight = model.embedding.word_embeddings.weight
    if model.post_process and model.share_embeddings_and_output_weights:
        if not model.output_layer.gradient_accumulation_fusion:
            return  # the head's gradient comes through autograd, so the embedding's must too
        setattr(weight, _TIED, True)
    weight.zero_out_wgrad = False
    let_add(weight)
    setattr(weight, _TURNED, alone)
