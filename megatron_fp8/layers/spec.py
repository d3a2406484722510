"""The layer spec: stock Megatron's spec, in which the four linears, the norms and the attention are exchanged.

Megatron describes a model as nested dataclasses, lists and partials that name classes.  `convert` walks such
a description and returns a copy in which

    self_attention.linear_qkv   input_layernorm + column linear  ->  Fp8NormColumnParallelLinear (and residual.py)
    self_attention.linear_proj  row linear                       ->  Fp8RowParallelLinear
    mlp.linear_fc1              pre_mlp_layernorm + column       ->  Fp8NormColumnParallelLinear, likewise
    mlp.linear_fc2              row linear                       ->  Fp8RowParallelLinear
    mlp                         MLP itself                       ->  Fp8Mlp
    every other norm            torch / apex / TE                ->  Norm
    core_attention              unfused / TE                     ->  TorchAttention
    self_attention              SelfAttention itself             ->  FusedSelfAttention
    multi-latent attention      its linears likewise             ->  latent.py
    mlp.shared_experts          column, row                      ->  Fp8ColumnParallelLinear, Fp8RowParallelLinear

    mlp.experts                 stock's, of any class            ->  Fp8Experts, with --fp8-experts

Exchanges go by place, not by class. So a local spec, a Transformer Engine spec and a user's own `--spec` all work.
Every token passes through the shared experts. Their linears are dense, as in any other MLP; their norm is also the
router's, and stays apart. The result has the parameter names of Megatron's TE spec, whatever spec came in, and also has
--qk-l2-norm, which the local spec leaves out. tests/unit/test_architecture.py compares it with the model that stock's
TE spec builds, over all of Megatron's flags of the model.
"""

import dataclasses
import functools
import re

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from ..flags.config import Fp8Config
from .attention import TorchAttention, UnfusedAttention
from .experts import ExpertRowLinear, Fp8Experts, drawn_as_grouped
from .latent import convert_latent, is_latent
from .linear import Fp8ColumnParallelLinear, Fp8NormColumnParallelLinear, Fp8RowParallelLinear
from .mlp import Fp8Mlp
from .norm import Norm
from .self_attention import FusedSelfAttention


def convert_block(spec, config, fp8: Fp8Config, vp_stage=None) -> TransformerBlockSubmodules:
    """A GPT decoder's spec (one layer, or a whole block) -> the block with FP8 layers and our final norm."""
    if isinstance(spec, ModuleSpec) and issubclass(spec.module, TransformerBlock):
        spec = spec.submodules
    elif isinstance(spec, ModuleSpec):
        layers = [spec] * get_num_layers_to_build(config, vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    return convert(spec, config, fp8)


def accept_local_names(model) -> None:
    """Let `model` load a plain state dict (--ckpt-format torch) of stock's local spec, whose norms stand alone, and of
    TE's grouped experts, which are `linear_fc1.weight0`, `linear_fc1.weight1`...

    torch_dist checkpoints have the names of the TE spec whichever spec wrote them.
    """

    def rename(module, state_dict, prefix, *_):
        expected = {prefix + name for name, _ in module.named_parameters()}
        for key in list(state_dict):
            new = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            new = new.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
            new = re.sub(r"\.experts\.(linear_fc\d)\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", new)
            if key not in expected and new in expected:
                state_dict[new] = state_dict.pop(key)

    model.register_load_state_dict_pre_hook(rename)


def convert(spec, config, fp8: Fp8Config):
    """A copy of `spec` with the exchanges in the table above, however deep the layers sit."""
    swap = functools.partial(convert, config=config, fp8=fp8)
    if isinstance(spec, Fp8Config):
        return spec
    if isinstance(spec, TransformerLayerSubmodules):
        return _convert_layer(spec, config, fp8)
    if isinstance(spec, MoESubmodules):
        experts = _owned_experts(fp8) if fp8.experts else spec.experts
        spec = dataclasses.replace(spec, experts=experts, shared_experts=_with_our_linears(spec.shared_experts, fp8))
    if isinstance(spec, functools.partial):
        keywords = {k: swap(v) for k, v in spec.keywords.items()}
        build = drawn_as_grouped if spec.func is SequentialMLP and fp8.draws_grouped else spec.func
        return functools.partial(build, *map(swap, spec.args), **keywords)
    if isinstance(spec, list):
        return [swap(s) for s in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        return dataclasses.replace(spec, **{k: swap(v) for k, v in fields.items()})
    if spec is RowParallelLinear:  # no layer has taken it over, so it is an expert's
        return ExpertRowLinear
    return Norm if _is_norm(spec) else spec


def _is_norm(spec) -> bool:
    name = getattr(spec, "__name__", "")
    return name in ("WrappedTorchNorm", "FusedLayerNorm", "TENorm", "LayerNorm", "RMSNorm")


def _convert_layer(layer: TransformerLayerSubmodules, config, fp8: Fp8Config) -> TransformerLayerSubmodules:
    """Fuse each norm into the linear that follows it, if both are ours."""
    changed = {}
    row = functools.partial(Fp8RowParallelLinear, fp8_config=fp8)
    attention = layer.self_attention
    if _is_gpt_attention(attention):
        column, normed = _column_after(layer.input_layernorm, attention.submodules.linear_qkv, fp8)
        changed["input_layernorm"] = IdentityOp if normed else layer.input_layernorm
        plain = attention.module is SelfAttention
        changed["self_attention"] = dataclasses.replace(
            attention,
            **({"module": FusedSelfAttention, "params": {**attention.params, "fp8_config": fp8}} if plain else {}),
            submodules=dataclasses.replace(
                attention.submodules,
                linear_qkv=column,
                linear_proj=row,
                core_attention=_core_attention(attention, config, fp8),
                **({"q_layernorm": L2Norm, "k_layernorm": L2Norm} if config.qk_l2_norm else {}),
            ),
        )
    elif is_latent(attention):
        changed["self_attention"] = convert_latent(attention, _core_attention(attention, config, fp8), config, fp8)
    if _is_dense_mlp(layer.mlp):
        mlp, submodules = layer.mlp, layer.mlp.keywords["submodules"]
        column, normed = _column_after(layer.pre_mlp_layernorm, submodules.linear_fc1, fp8)
        changed["pre_mlp_layernorm"] = IdentityOp if normed else layer.pre_mlp_layernorm
        submodules = dataclasses.replace(submodules, linear_fc1=column, linear_fc2=row)
        build = Fp8Mlp.as_mlp_submodule if mlp.func.__self__ is MLP else mlp.func
        changed["mlp"] = functools.partial(build, *mlp.args, **{**mlp.keywords, "submodules": submodules})
    changed["sharded_state_dict_keys_map"] = {}  # the modules have the names of the TE spec themselves
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)} | changed
    return dataclasses.replace(layer, **{k: convert(v, config, fp8) for k, v in fields.items()})


def _with_our_linears(build, fp8: Fp8Config):
    """The builder of an MLP, a partial, with our linears among its submodules; anything else comes back unchanged."""
    if not isinstance(getattr(build, "keywords", {}).get("submodules"), MLPSubmodules):
        return build
    return functools.partial(build.func, *build.args, **{**build.keywords, "submodules": _our_linears(fp8)})


def _our_linears(fp8: Fp8Config) -> MLPSubmodules:
    """The submodules of an MLP whose input is normalised before it."""
    column, row = (functools.partial(cls, fp8_config=fp8) for cls in (Fp8ColumnParallelLinear, Fp8RowParallelLinear))
    return MLPSubmodules(linear_fc1=column, linear_fc2=row)


def _owned_experts(fp8: Fp8Config):
    """The builder of routed experts that the engine owns."""
    if not fp8.draws_grouped:
        return functools.partial(Fp8Experts, submodules=_our_linears(fp8))
    return functools.partial(drawn_as_grouped, build=Fp8Experts, submodules=_our_linears(fp8))


def _is_gpt_attention(spec) -> bool:
    return (
        isinstance(spec, ModuleSpec)
        and issubclass(spec.module, SelfAttention)
        and isinstance(spec.submodules, SelfAttentionSubmodules)
    )


def _is_dense_mlp(spec) -> bool:
    """Whether spec is a partial of the classmethod MLP.as_mlp_submodule, or of a subclass's."""
    owner = getattr(getattr(spec, "func", None), "__self__", None)
    return isinstance(owner, type) and issubclass(owner, MLP)


def _column_after(norm, linear, fp8: Fp8Config):
    """(column linear builder, whether it holds the norm).  TE's fused class brings its norm with it."""
    fused = norm is not IdentityOp or "LayerNorm" in getattr(linear, "__name__", "")
    cls = Fp8NormColumnParallelLinear if fused else Fp8ColumnParallelLinear
    return functools.partial(cls, fp8_config=fp8), fused


def _core_attention(attention: ModuleSpec, config, fp8: Fp8Config):
    """torch's attention, unless a flag asks for another or the model needs one."""
    if fp8.attention == "te":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    unfused = (
        attention.params.get("attn_mask_type") != AttnMaskType.causal
        or fp8.unfused_attention
        or config.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        or config.softmax_type != "vanilla"
    )
    return UnfusedAttention if unfused else ModuleSpec(TorchAttention, {"reads_mask": fp8.reads_mask})
