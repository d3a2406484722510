"""Makes DPO's reference model: a frozen copy of the policy as it was at the start, for forward passes only.

    linear in FP8       E4M3 payload and scale of the policy's GEMMs at the start: 1 byte a weight
    other parameters    the policy's at the start, in BF16

It has no optimizer and no gradients, and checkpoints do not contain it. It casts activations with the scales that the
policy's linear has in the same step (`Casts` is shared). It does not update them, because it is in evaluation mode. At
the first step both models' log-probabilities are equal to the last bit, with delayed scales too.

In a resumed run the policy has changed. The reference is then loaded from the checkpoint that the policy started from
and rounded with the same noise (numerics/dither.py): the bytes are the same.

If adapters train on a frozen base (LoRA), the reference is the policy with its adapters off: no second model. An
adapter is a module with the methods disable_adapter_layers and enable_adapter_layers, as Megatron Bridge's has.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from megatron.core.utils import unwrap_model

from .. import ops
from ..engine.frozen import OwnedParameter
from ..engine.frozen_set import nearest
from ..engine.owned_weight import OwnedWeight, owned_weights, owners
from ..errors import UserError
from ..numerics.dither import dithered
from ..numerics.formats import E4M3
from ..numerics.scaling import compute_scale


@torch.no_grad()
def make_reference(chunks: list[torch.nn.Module], policy: list[torch.nn.Module]) -> None:
    """Copy the policy's present weights into `chunks`, a second model of the same configuration, and freeze it.

    policy: wrapped chunks. Raises UserError if a script has changed the policy's parameters.
    """
    for mine, theirs in zip(map(unwrap_model, chunks), map(unwrap_model, policy), strict=True):
        if [*dict(mine.named_parameters())] != [*dict(theirs.named_parameters())]:
            raise UserError(
                "the policy has parameters that its flags do not build; a reference supports only those of the flags, "
                "and adapters whose modules have disable_adapter_layers and enable_adapter_layers"
            )
        mine.requires_grad_(False)
        mine.eval()
        weights = list(zip(owned_weights([mine]), owned_weights([theirs]), strict=True))
        for weight, twin in weights:
            _copy(weight, twin)
        ours = {id(weight.param) for weight, _ in weights}
        others = [*theirs.named_parameters(), *theirs.named_buffers()]
        found = dict([*mine.named_parameters(), *mine.named_buffers()])
        for name, value in others:
            if id(found[name]) not in ours:
                found[name].copy_(value)


def _copy(weight: OwnedWeight, twin: OwnedWeight) -> None:
    """Copy the policy's weight in the form that its GEMMs read, and share its casts' scales."""
    assert weight.name == twin.name
    weight.stand_beside(twin, functools.partial(_load, weight))
    if not twin.fp8:
        weight.param.copy_(twin.dense())
        return
    read = twin.quantized()
    weight.move_to(read.payload.clone())
    weight.changed(read.scale_inv.clone())


@torch.no_grad()
def _load(weight: OwnedWeight, values: torch.Tensor) -> None:
    """Set the weight to `values` (N, K), rounded as the policy's that begins with them: collective over the ranks that
    share it."""
    assert weight.stored is not None and weight.of is not None
    values = values.to(weight.param.device)
    margin = weight.config.margin
    if weight.storage == "fp8":
        scale_inv = nearest(values, margin, weight.of.sharing).scale_inv
        scale = scale_inv.reciprocal()
        if weight.config.draws_masters:
            values = dithered(values.flatten(), weight.identity, scale).view_as(values)
        payload = ops.quantize(values, E4M3, scale)
    else:
        scale = compute_scale(ops.amax(values), E4M3, margin=margin)
        payload, scale_inv = ops.quantize(values, E4M3, scale), scale.reciprocal()
    weight.stored.payload.copy_(payload)
    weight.stored.scale_inv.copy_(scale_inv)


def has_adapters(policy: list[torch.nn.Module]) -> bool:
    """Whether this rank's chunks have adapters. All pipeline stages must agree, or their passes wait for each other."""
    return any(_adapters(chunk) for chunk in policy)


def _adapters(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in chunk.modules() if hasattr(module, "disable_adapter_layers")]


@contextlib.contextmanager
def adapters_off(policy: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """In here the policy's chunks, without DDP, are the reference: in evaluation mode, adapters off.

    Raises UserError if anything else than an adapter is trained, or a router's bias moves.
    """
    _check_base_is_frozen(policy)
    _check_routers_are_still(policy)
    training = [module for chunk in policy for module in chunk.modules() if module.training]
    adapters = [module for chunk in policy for module in _adapters(chunk)]
    try:
        for chunk in policy:
            chunk.eval()
        for module in adapters:
            module.disable_adapter_layers()
        yield [chunk.module for chunk in policy]
    finally:
        for module in training:
            module.training = True
        for module in adapters:
            module.enable_adapter_layers()


def _check_base_is_frozen(policy: list[torch.nn.Module]) -> None:
    for chunk in map(unwrap_model, policy):
        of_adapters = {id(p) for adapter in _adapters(chunk) for p in adapter.parameters()}
        of_adapters -= {id(p) for _, linear in owners(chunk) for p in linear.parameters()}  # the base that one wraps
        for name, param in chunk.named_parameters():
            trained = not param.frozen if isinstance(param, OwnedParameter) else param.requires_grad
            if trained and id(param) not in of_adapters:
                raise UserError(
                    f"{name} is trained beside adapters, so the policy with its adapters off is no reference: freeze "
                    "it, or read the reference's scores by --dpo-reference-scores"
                )


def _check_routers_are_still(policy: list[torch.nn.Module]) -> None:
    """A router's bias for an expert is a buffer, which Megatron moves at the end of a step without a gradient."""
    for module in (module for chunk in policy for module in chunk.modules()):
        still = "read the reference's scores by --dpo-reference-scores"
        if getattr(module, "qb_beta", None) is not None:
            flag = "--moe-router-load-balancing-type quantile_balancing"
        elif (
            getattr(module, "expert_bias", None) is not None
            and not module.frozen_expert_bias
            and module.config.moe_router_bias_update_rate
        ):
            flag, still = "--moe-router-enable-expert-bias", f"add --moe-router-bias-update-rate 0, or {still}"
        else:
            continue
        raise UserError(
            f"{flag}: each step moves the routers' biases, frozen or not, so the policy with its adapters off is no "
            f"reference: {still}"
        )
