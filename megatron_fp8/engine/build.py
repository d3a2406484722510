"""Builds the engine for a model: from FP8 linears and Megatron's optimizer configuration to one optimizer chain."""

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from ..config import Fp8Config
from ..layers.linear import Fp8Weight, fp8_weights, name_weights
from ..numerics.scaling import DelayedScaling
from .optimizer import EngineOptimizer, Fp8ChainedOptimizer
from .weights import WeightGroup


def build_optimizer(fp8: Fp8Config, stock, config, model_chunks, config_overrides) -> Fp8ChainedOptimizer:
    """The chain of stock Megatron's optimizer parts and ours, over wrapped model chunks.

    Args:
        stock: the ChainedOptimizer that Megatron built for everything that is not an FP8 linear's weight.
        config, config_overrides: the optimizer configuration it was built from.

    Raises ValueError when the model has no FP8 linear.
    """
    weights = fp8_weights(model_chunks)
    if _fewest(len(weights)) == 0:
        raise ValueError(
            f"--fp8-level {fp8.level}: found no GPT transformer layer to train in FP8 on some rank: use --fp8-level "
            "O0 for other models, and a layer on every pipeline stage"
        )
    _refuse_frozen_layers(fp8, model_chunks)
    name_weights(model_chunks)
    by_param = {id(w.param): w for w in weights}
    dp_group = mpu.get_data_parallel_group(with_context_parallel=True)
    groups, options = [], []
    for option in _our_param_groups(model_chunks, by_param, config, config_overrides):
        members = [by_param[id(p)] for p in option.pop("params")]
        if members:  # a parameter group may live on other pipeline stages only
            groups.append(WeightGroup(members, dp_group, config.use_distributed_optimizer, fp8.grad_reduce))
            options.append(option)

    model_config = get_model_config(model_chunks[0])
    engine = EngineOptimizer(
        groups,
        options,
        config,
        model_chunks,
        stats_group=stock.chained_optimizers[0].get_grad_stats_parallel_group(),
        scaling=_attach_scaling(fp8, weights),
        amax_group=mpu.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=model_config.tp_only_amax_red
        ),
        grad_scale=1.0 if model_config.calculate_per_token_loss else 1.0 / dp_group.size(),
    )
    _finalize_with(engine, model_config)
    for chunk in model_chunks:
        # Stock's own check aborts the run and asks the host at every bucket; ours skips the step and does not.
        chunk.ddp_config.check_for_nan_in_grad = False
    return Fp8ChainedOptimizer(stock.chained_optimizers, engine)


def _fewest(count: int) -> int:
    """The smallest count of any rank, so that all ranks stop together."""
    if not torch.distributed.is_initialized():
        return count
    smallest = torch.tensor([count], device="cuda")
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest)


def _refuse_frozen_layers(fp8: Fp8Config, model_chunks) -> None:
    """Stop where a script froze a layer: our weights, frozen to stock in any case, would be trained all the same."""
    for layer in (m for chunk in model_chunks for m in chunk.modules() if isinstance(m, TransformerLayer)):
        ours = {id(w.param) for w in fp8_weights([layer])}
        others = [p.requires_grad for p in layer.parameters() if id(p) not in ours]
        if ours and others and not any(others):
            raise ValueError(
                f"--fp8-level {fp8.level}: the parameters of layer {layer.layer_number} are frozen; frozen layers "
                "are not supported: use --fp8-level O0"
            )


def _our_param_groups(model_chunks, by_param: dict[int, Fp8Weight], config, overrides) -> list[dict]:
    """Megatron's own parameter groups, for exactly the parameters that it does not see."""
    flags = [(p, p.requires_grad) for chunk in model_chunks for p in chunk.parameters()]
    try:
        for param, _ in flags:
            param.requires_grad_(id(param) in by_param)
        if overrides is None:
            overrides = get_standard_config_overrides(config)
        return _get_param_groups(model_chunks, config, overrides)
    finally:
        for param, flag in flags:
            param.requires_grad_(flag)


def _attach_scaling(fp8: Fp8Config, weights: list[Fp8Weight]) -> DelayedScaling | None:
    """Two slots, input and output gradient, for every linear that computes in FP8."""
    users = [w for w in weights if w.fp8]
    if fp8.recipe != "delayed" or not users:
        return None
    scaling = DelayedScaling(
        2 * len(users),
        [fp8.forward_format, fp8.grad_format] * len(users),
        fp8.amax_history_len,
        fp8.amax_compute_algo,
        fp8.margin,
        users[0].param.device,
    )
    for i, weight in enumerate(users):
        weight.scaling, weight.slots = scaling, (2 * i, 2 * i + 1)
    return scaling


def _finalize_with(engine: EngineOptimizer, model_config) -> None:
    """Reduce our gradients where Megatron finishes its own: at finalize_model_grads_func, an official hook."""
    stock = model_config.finalize_model_grads_func or finalize_model_grads

    @torch.no_grad()
    def finalize(model, num_tokens=None, *args, **kwargs):
        stock(model, num_tokens, *args, **kwargs)  # leaves the global number of tokens in num_tokens
        engine.finalize_grads(num_tokens)

    model_config.finalize_model_grads_func = finalize
