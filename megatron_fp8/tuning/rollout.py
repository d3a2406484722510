"""A live model's weights for an engine that generates (a rollout): Hugging Face's names, the values that GEMMs read.

    for name, tensor, scale in rollout.weights(model_chunks):
        engine.load(name, tensor, scale)            values are tensor * scale; scale is None if tensor is BF16

At O3 a linear's weight is stored in E4M3 with one power of two. That payload and that scale come out, so the engine
computes with the very weights that were trained: nothing is rounded again. Weights that are stored in BF16 (O1, O2,
linears that are left out of FP8, all that is not a linear) come in BF16.
"""

from argparse import Namespace
from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from ..checkpoint.hf.families import Parameter, parameters
from ..engine.owned_weight import OwnedWeight, owned_weights
from ..errors import UserError

_FUSED = {  # stock's names of the norms that are a module of their own
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@torch.no_grad()
def weights(
    chunks: list[torch.nn.Module], vocab_size: int | None = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """(name, tensor, scale (1,) FP32 or None) of each tensor of this pipeline stage's layers, in the model's order.

    All tensor-parallel ranks iterate together, between two steps, and each gets the whole tensors. With
    --overlap-param-gather, gather the optimizer's parameters first. Tensors are copies or views: use them before the
    next step.

    vocab_size: real tokens; None: with those that pad the vocabulary. Raises UserError for a model that no family of
    checkpoint/hf/families.py computes.
    """
    for chunk in map(unwrap_model, chunks):
        args = _args_of(chunk, vocab_size)
        wanted = {parameter.name: parameter for parameter in parameters(args)}
        tied = not args.untie_embeddings_and_output_weights
        owned = {id(weight.param): weight for weight in owned_weights([chunk])}
        for name, param in chunk.named_parameters():
            name, layer = _place(chunk, name)
            if tied and name == "output_layer.weight":  # a copy of the embedding
                continue
            if name not in wanted:
                raise UserError(f"{name} has no place in a model of Hugging Face's; export a model without it")
            yield from _tensors(wanted[name], layer, param, owned.get(id(param)), args, chunk.pg_collection.tp)


def _args_of(model, vocab_size: int | None) -> Namespace:
    """A GPTModel's arguments, as far as names and layouts depend on them."""
    config = model.config
    return Namespace(**{
        **vars(config),
        "num_experts": config.num_moe_experts,
        "swiglu": config.gated_linear_unit,
        "position_embedding_type": model.position_embedding_type,
        "max_position_embeddings": model.max_sequence_length,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "padded_vocab_size": model.vocab_size,
        "vocab_size": vocab_size or model.vocab_size,
    })  # fmt: skip


def _place(chunk, name: str) -> tuple[str, int]:
    """(a parameter's name in a checkpoint, which stacks layers; the layer's number from 0 in the whole model)."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name, 0
    number, _, rest = name.removeprefix(prefix).partition(".")
    layer = chunk.decoder.layers[int(number)]
    assert isinstance(layer, TransformerLayer)
    for alone, fused in _FUSED.items():
        if rest.startswith(alone):
            rest = fused + rest.removeprefix(alone)
    return prefix + rest, layer.layer_number - 1


def _tensors(
    parameter: Parameter,
    layer: int,
    param: torch.nn.Parameter,
    weight: OwnedWeight | None,
    args: Namespace,
    group: torch.distributed.ProcessGroup,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    scale = None
    tensor = param.detach()
    if weight is not None:
        weight.arrive()
        if weight.stored is not None:
            assert weight.stored.payload is not None
            tensor, scale = weight.stored.payload, weight.stored.scale_inv.reshape(1)
    gated = args.swiglu and ".linear_fc1." in parameter.name  # its norm is whole on every rank
    whole = _whole(tensor, param, gated, group)
    for name, part in zip(parameter.names, parameter.split(whole, args), strict=True):
        yield name.format(layer), part, scale


def _whole(
    tensor: torch.Tensor, param: torch.nn.Parameter, gated: bool, group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """The tensor of all tensor-parallel ranks. gated: each rank has a part of the gate above its part of the rest."""
    if group.size() == 1 or not getattr(param, "tensor_model_parallel", False):
        return tensor
    bits = tensor.contiguous().view(torch.uint8)
    parts = [torch.empty_like(bits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, bits, group)
    found = [part.view(tensor.dtype) for part in parts]
    if gated:
        found = [part.chunk(2)[half] for half in (0, 1) for part in found]
    return torch.cat(found, param.partition_dim)  # type: ignore[attr-defined]
