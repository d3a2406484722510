"""Embeddings whose gradient goes straight to main_grad, as the linears' do: of tokens, and of learned positions; and
what autograd is given in place of a head's.

    y = W[tokens]            dW[t] = sum of dy over the places of token t

Of a vocabulary of 50 thousand a micro-batch has a few thousand. Torch makes a gradient of all rows in BF16, zeros and
all, which is added to the FP32 main_grad, in four passes over the table; with tied embeddings the head's stand-in adds
two more. Here the rows that a micro-batch has are read and written, in FP32, rounded nowhere.

It serves where main_grad.py says.

A head of stock's does the same, and gives autograd an empty gradient, as large as the table in BF16.  Of a tied table
that would wait for the embedding's until the backward pass ends: 620 MB of a rank of 175B at TP 2, on top of all
activations.  So the head reads a view of W without that mark, whose backward pass gives the stand-in: none where the
embedding gives one, else one that takes no memory (main_grad.py).

Megatron turns y (b, s, h) into (s, b, h) by a copy, and dy comes back turned. So y is made in that order where no other
rank must add to it, and dy's rows are read as they lie.
"""

from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F

from .. import ops
from ..rebind import Hook, When
from .main_grad import added, adds, let_add

_TIED, _TURNED = "fp8_is_head_too", "fp8_turned"  # of a table that the same stage's head uses; whose result is turned


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
            return None  # the embedding, in the same graph, gives one
        return added(weight)


class Functional:
    """torch.nn.functional, with `embedding` as above for weights that take their gradient so."""

    def __getattr__(self, name: str):
        return getattr(F, name)

    @staticmethod
    def embedding(tokens, weight, *args, **kwargs):
        if adds(weight) and not (args or kwargs):
            return _Embedding.apply(tokens, weight)
        return F.embedding(tokens, weight, *args, **kwargs)


def functional(stock) -> Functional:
    """For the torch.nn.functional that stock's layers use."""
    return Functional()


def _look_up(table: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    return Functional.embedding(input, table.weight)


def _head_product(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A head's product, `stock`, without the empty gradient that autograd would get for its weight."""

    def product(*, weight: torch.Tensor, **how):
        if torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
            main_grad, weight = weight.main_grad, _HeadWeight.apply(weight)
            weight.main_grad = main_grad
        return stock(weight=weight, **how)

    return product


def add_to_main_grad(model) -> None:
    """Have a GPTModel's embeddings add their gradient to main_grad, where stock's linears do so with theirs, and its
    head, which does, leave nothing behind.

    If a table is tied, or multi-token prediction reads it too, stock adds the gradient that comes in autograd to
    main_grad all the same (`zero_out_wgrad`): the head's is zeros then. Here that gradient is not read. On a pipeline's
    last stage stock does not add it, and loses what multi-token prediction gives a tied table.
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
            return  # the head's gradient comes in autograd: both must
        setattr(weight, _TIED, True)
    weight.zero_out_wgrad = False
    let_add(weight)
    setattr(weight, _TURNED, alone)
