"""Optimizer state of the engine in Megatron's distributed checkpoints (`torch_dist`).

A shard of a flat buffer means nothing to another layout.  So what is saved is each weight's own FP32 master,
exp_avg and exp_avg_sq, whole for this tensor- and pipeline-parallel rank, under the sharding of the model's
weight itself: `optimizer.state.exp_avg.<weight>`.  dist_checkpointing then reshards over data, tensor and
pipeline parallelism as it does for weights, and stores every element once (data-parallel replicas are marked
by the weight's own replica id).  The price: 12 bytes a parameter of host memory on every rank while saving.
The model part needs nothing: the weights are ordinary BF16 parameters.

Delayed scaling saves the amax history and the scale of each linear's two slots, by layer number, and
`--fp8-grad-reduce shared` each weight's mu.
"""

import torch
from megatron.core import mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from ..layers.linear import Fp8Weight
from ..numerics.scaling import DelayedScaling
from .weights import Bucket

STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


def sharded_engine_state(buckets: list[Bucket], adam, model_sharded_state_dict, is_loading: bool) -> dict:
    """What to save, or to load into: {state name: {index of the weight: sharded FP32 tensor on the host}}."""
    weights = [span[0] for bucket in buckets for span in bucket.spans]
    sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, (w.param for w in weights))
    state: dict[str, dict[int, ShardedTensor]] = {name: {} for name in STATES}
    index = 0
    for bucket in buckets:
        shards = _shards(bucket, adam)
        # On the host, one state at a time: the whole state need not fit the device.
        host = {
            name: torch.empty(bucket.weight.shape) if is_loading else bucket.unsharded(shard).cpu()
            for name, shard in shards.items()
        }
        for weight, start, end in bucket.spans:
            for name in STATES:
                tensor = host[name][start:end].view_as(weight.param)
                state[name][index] = make_sharded_optimizer_tensor(
                    sharded[index], tensor, prefix=f"optimizer.state.{name}"
                )
            index += 1
    return state


def load_engine_state(buckets: list[Bucket], adam, state: dict) -> None:
    """Take this rank's shards out of the loaded whole tensors."""
    index = 0
    for bucket in buckets:
        shards = _shards(bucket, adam)
        for _, start, end in bucket.spans:
            lo, hi = max(start, bucket.shard.start), min(end, bucket.shard.stop)
            if lo < hi:
                for name in STATES:
                    whole = state[name][index].reshape(-1)
                    part = slice(lo - bucket.shard.start, hi - bucket.shard.start)
                    shards[name][part].copy_(whole[lo - start : hi - start])
            index += 1


def sharded_scaling_state(scaling: DelayedScaling, weights: list[Fp8Weight], model_config) -> dict:
    """Scale and amax history of each linear's two slots: (2, 1 + history)."""
    state = {}
    for weight in (w for w in weights if w.scaling is scaling):
        slots = list(weight.slots)
        table = torch.cat([scaling.scale[None, slots], scaling.amax_history[:, slots]]).t().contiguous()
        # Another --fp8-amax-history-len takes the newest amaxes that fit.
        state[_key(weight)] = _by_layer("fp8_scaling", table, weight, model_config, allow_shape_mismatch=True)
    return state


def load_scaling_state(scaling: DelayedScaling, weights: list[Fp8Weight], state: dict, warm: bool) -> None:
    """The reverse of sharded_scaling_state."""
    history, scale = torch.zeros_like(scaling.amax_history), scaling.scale.clone()
    for weight in (w for w in weights if w.scaling is scaling):
        table = state[_key(weight)][0].t()
        slots = list(weight.slots)
        history[:, slots], scale[slots] = table[1:], table[0]
    amax = torch.zeros_like(scaling.amax)
    scaling.load_state_dict(
        {"amax_history": history, "scale": scale, "amax": amax, "warm": torch.tensor(warm)}
    )


def sharded_mu_state(mu: torch.Tensor, weights: list[Fp8Weight], model_config) -> dict:
    """mu (weights,) of the shared reduction; one number a weight."""
    return {_key(w): _by_layer("fp8_grad_mu", mu[i : i + 1], w, model_config) for i, w in enumerate(weights)}


def load_mu_state(weights: list[Fp8Weight], state: dict, device) -> torch.Tensor:
    """The reverse of sharded_mu_state."""
    return torch.cat([state[_key(w)][0].to(device) for w in weights])


def _key(weight: Fp8Weight) -> str:
    return f"{weight.path}.{weight.layer_number}"


def _by_layer(name: str, tensor: torch.Tensor, weight: Fp8Weight, model_config, **kwargs) -> ShardedTensor:
    """What belongs to a weight, the same on all its tensor- and data-parallel ranks: a slice of (layers, ...)."""
    layers = model_config.mtp_num_layers if weight.path.startswith("mtp.") else model_config.num_layers
    return ShardedTensor.from_rank_offsets(
        f"optimizer.{name}.{weight.path}",
        tensor[None],
        (0, weight.layer_number - 1, layers),
        replica_id=(0, mpu.get_tensor_model_parallel_rank(), dp_rank()),
        **kwargs,
    )


def dp_rank() -> int:
    return mpu.get_data_parallel_rank(with_context_parallel=True)


def _shards(bucket: Bucket, adam) -> dict[str, torch.Tensor]:
    """This rank's FP32 shards by name; creates Adam's state if there was no step yet."""
    state = adam.state[bucket.master]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=bucket.master.device)
        state["exp_avg"] = torch.zeros_like(bucket.master)
        state["exp_avg_sq"] = torch.zeros_like(bucket.master)
    return {"fp32_param": bucket.master.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
