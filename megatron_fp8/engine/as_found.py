"""What a script has done to a model before its optimizer is built: which linears it has frozen, or taken away.

All ranks learn what each has found, so all go on or all end. A linear's parameter tells whether it is trained
(frozen.py).
"""

import re

from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from ..errors import UserError
from ..flags.config import Fp8Config
from ..ranks import gathered
from .frozen import REMEDY, OwnedParameter
from .names import ranges
from .owned_weight import owned_weights, owners


def check_linears(fp8: Fp8Config, model_chunks) -> list[str]:
    """The names of the linears that a script has frozen, on any rank (frozen.py); before stock builds its optimizer.

    Raises UserError, on all ranks, if no rank has a weight of ours in its model chunks, if a script has put another
    parameter in a weight's place, or if it is not clear what it has frozen.
    """
    mine = [
        (m.owned.name, m.owned.param.frozen, m._parameters.get("weight") is m.owned.param)
        for chunk in model_chunks
        for _, m in owners(chunk)
    ]
    linears = list(dict.fromkeys(linear for rank in gathered(mine) for linear in rank))
    if not linears:
        raise UserError(
            f"--fp8-level {fp8.level}: the model that the optimizer is built for has no GPT transformer layer to train "
            "in FP8: a level converts Megatron's GPTModel; use --fp8-level O0"
        )
    if replaced := [name for name, _, in_place in linears if not in_place]:
        raise UserError(f"--fp8-level {fp8.level}: the script replaces the weight of {ranges(replaced)}; {REMEDY}")
    frozen, trained = ([name for name, is_frozen, _ in linears if is_frozen == wanted] for wanted in (True, False))
    if differing := [name for name in frozen if name in trained]:
        raise UserError(
            f"--fp8-level {fp8.level}: the script freezes {ranges(differing)} on some ranks only; freeze it on all "
            "ranks that have a part of it"
        )
    if layers := sorted({number for rank in gathered(_half_frozen_layers(model_chunks)) for number in rank}):
        raise UserError(
            f"--fp8-level {fp8.level}: the script freezes the norms and biases of layer {', '.join(map(str, layers))}, "
            "and says nothing of its linears, of which it finds requires_grad False in any case; set requires_grad "
            "of their weights too, True or False"
        )
    return frozen


def cut_off(model_chunks) -> list[str]:
    """A line if an embedding is frozen below layers that are recomputed whole and have something to train.

    Megatron's checkpoint of a layer is a node of autograd's graph only if the layer's input asks for a gradient. Else
    what stands above those layers is trained alone, and stock says nothing. A hook of the embedding may ask for it
    (examples/lora.py); what a script's hook does is not looked at.
    """
    for model in map(unwrap_model, model_chunks):
        embedding = getattr(model, "embedding", None)
        if embedding is None or model.config.recompute_granularity != "full":
            continue
        asks = any(p.requires_grad for p in embedding.parameters()) or embedding._forward_hooks
        layers = model.decoder.parameters()
        trained = (not p.frozen if isinstance(p, OwnedParameter) else p.requires_grad for p in layers)
        if not asks and any(trained):
            return [
                "the script freezes the embedding, so layers under --recompute-granularity full get no gradient: their "
                "input asks for none; call model.embedding.register_forward_hook(lambda module, given, embedded: "
                "embedded.requires_grad_()) before training"
            ]
    return []


def layers_differ(model_chunks) -> bool:
    """Whether a script has made the layers of the model's stack different, on any rank: their parameters' names, or
    which of them are trained. Such layers cannot be saved as one tensor with an axis of layers."""
    layers = {
        tuple((name, parameter.requires_grad, getattr(parameter, "frozen", False)) for name, parameter in found)
        for chunk in model_chunks
        for name, layer in chunk.named_modules()
        if isinstance(layer, TransformerLayer) and re.search(r"\bdecoder\.layers\.\d+$", name)
        for found in [list(layer.named_parameters())]
    }
    return len({layer for rank in gathered(list(layers)) for layer in rank}) > 1


def _half_frozen_layers(model_chunks) -> list[int]:
    """Numbers, from 1, of the layers that a script perhaps meant to freeze: it has said nothing about a weight of ours
    there, and trains nothing else of the layer."""
    numbers = []
    for layer in (m for chunk in model_chunks for m in chunk.modules() if isinstance(m, TransformerLayer)):
        others = [p.requires_grad for p in layer.parameters() if not isinstance(p, OwnedParameter)]
        untold = any(not weight.param.told for weight in owned_weights([layer]))
        if untold and others and not any(others):
            numbers.append(layer.layer_number)
    return numbers
