"""Optimizer state of the engine in Megatron's distributed checkpoints (`torch_dist`).

A shard of a flat buffer means nothing to another layout, and a format nothing to another level.  So what is saved is
each weight's own FP32 master, exp_avg and exp_avg_sq, whole for this tensor- and pipeline-parallel rank, under the
sharding of the model's weight itself: `optimizer.state.exp_avg.<weight>`.  dist_checkpointing then reshards over
data, tensor and pipeline parallelism as it does for weights, and stores every element once (data-parallel replicas
are marked by the weight's own replica id).  Every format's values are FP32 values, so saving loses nothing, and a run
that loads its own checkpoint goes on bit for bit; another level rounds to its own formats.  The names are those of
stock's fully reshardable form, which therefore loads too.  The price: 12 bytes a parameter of disk, and of the host's
memory while saving, on every data-parallel rank.  `--fp8-ckpt-compact` saves the bytes as they are instead
(compact.py).

The model part holds every weight as BF16 under its stock name, at each level: an E4M3 payload times a power of two is a
BF16 number.  Loading it sets weights and, without optimizer state, masters.

Beside them: of E4M3 weights scale and amax, of delayed scaling the amax history and scale of each linear's two slots,
of `--fp8-grad-reduce shared` each weight's mu; by layer number.  What a checkpoint has of these is said in its
content metadata (`contents`), which Megatron saves and hands back: only what is there is asked for.  A weight that has
none, since it stays in BF16, has zeros there: a run in which others do (`--fp8-bf16-layers`) finds its own, or zeros.
Of `--fp8-on-spike` its histories and the linears that are out of FP8: plain numbers, the same on all ranks.
"""

from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from ..engine.bucket import Bucket
from ..engine.owned_weight import OwnedWeight
from ..errors import UserError
from ..flags.config import Fp8Config
from ..numerics.scaling import DelayedScaling
from .stock_state import FORM, RESHARDABLE

CONTENTS, VERSION = "megatron_fp8", 1
STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # stock's names: a bucket's


def contents(fp8: Fp8Config, args) -> dict:
    """What a checkpoint of this run holds: the version of the format, what it has, of compact ones the layout."""
    return {
        "version": VERSION,
        "weight_scale": fp8.weight == "fp8",
        "scaling": fp8.recipe == "delayed" and fp8.gemm == "fp8",
        "compact": _compact_layout(fp8, args) if fp8.ckpt_compact else "",
    }


def _compact_layout(fp8: Fp8Config, args) -> str:
    """What a compact checkpoint depends on."""
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "data")
    parts = [f"{size} {getattr(args, f'{size}_model_parallel_size', None) or 1}" for size in sizes[:3]]
    parts += [f"{size} {getattr(args, f'{size}_parallel_size')}" for size in sizes[3:]]
    kept = " ".join([f"{fp8.bf16_layers_start} + {fp8.bf16_layers_end}", *fp8.bf16_layers])
    parts.append(f"BF16 layers {kept}")
    if args.pipeline_model_parallel_layout is not None:
        parts.append(f"stages {args.pipeline_model_parallel_layout}")
    parts.append(f"distributed optimizer {args.use_distributed_optimizer}")
    parts.append(f"buckets {args.ddp_num_buckets or args.ddp_bucket_size}")
    parts += [f"{cell} {getattr(fp8, cell)}" for cell in ("exp_avg", "exp_avg_sq", "master", "weight", "partition")]
    return ", ".join(parts)


def says_contents(fp8: Fp8Config) -> Callable[[Callable], Callable]:
    """What makes of Megatron's metadata of a checkpoint one that says what of ours it holds."""

    def make(stock):
        def metadata(args, *rest, **kwargs):
            return {**stock(args, *rest, **kwargs), CONTENTS: contents(fp8, args)}

        return metadata

    return make


def says_layers_differ(stock: Callable) -> Callable:
    """Megatron's metadata of a checkpoint whose layers are saved each under its own number."""

    def metadata(args, *rest, **kwargs):
        return {**stock(args, *rest, **kwargs), "non_homogeneous_layers": True}

    return metadata


def is_ours(common: dict | None) -> bool:
    """Whether what every rank reads of a checkpoint says that a level saved it."""
    return CONTENTS in contents_of(common)


def check_fits(common: dict, args, fp8: Fp8Config | None) -> None:
    """UserError in one line where this run, at a level or None, cannot take a checkpoint's optimizer state."""
    saved, found = common.get("args"), contents_of(common)
    if args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False):
        return
    form, ours, weights_only = found.get(FORM), found.get(CONTENTS), "--no-load-optim (weights and iteration are kept)"
    if fp8 is None:
        raise UserError(
            f"--load {args.load}: the optimizer state of a run with --fp8-level does not load without one; add "
            f"--fp8-level, or {weights_only} or --finetune"
        )
    if not torch.distributed.is_initialized():
        return  # --use-checkpoint-args: the layout is not known yet
    if ours is not None:
        _check_ours(ours, _compact_layout(fp8, args), args.load)
    if form in (None, RESHARDABLE):
        return
    if ours is None:
        raise UserError(
            f"--load {args.load}: the optimizer state of a run without --fp8-level, saved as {form}, does not load at "
            f"one; save it with --dist-ckpt-optim-fully-reshardable, or add {weights_only} or --finetune"
        )
    if _layout(saved) != _layout(args):
        raise UserError(
            f"--load {args.load}: the optimizer state was saved as {form}, for its own layout only ({_layout(saved)}), "
            f"not this run's ({_layout(args)}); load it with that layout and save it again, now in the form for every "
            f"layout, or add {weights_only}"
        )


def _check_ours(found: dict, layout: str, load: str) -> None:
    if found["version"] > VERSION:
        raise UserError(
            f"--load {load}: the checkpoint's FP8 format is version {found['version']}, newer than {VERSION}, which "
            "this version of megatron_fp8 knows; update megatron_fp8, or add --no-load-optim"
        )
    if found["compact"] not in ("", layout):
        raise UserError(
            f"--load {load}: the checkpoint was saved with --fp8-ckpt-compact, for its own layout only "
            f"({found['compact']}), not this run's ({layout}); load it with that layout and save it without "
            "--fp8-ckpt-compact, or add --no-load-optim"
        )


def _layout(args) -> str:
    """What the forms of one layout depend on."""
    sizes = [f"{size} {getattr(args, f'{size}_model_parallel_size', 1)}" for size in ("tensor", "pipeline")]
    return f"{', '.join(sizes)}, distributed optimizer {getattr(args, 'use_distributed_optimizer', True)}"


def contents_of(common: dict | None) -> dict:
    """The content metadata in what every rank reads of a checkpoint."""
    return (load_content_metadata(preloaded_state_dict=common) or {}) if common else {}


def sharded_engine_state(buckets: list[Bucket], model_sharded_state_dict, is_loading: bool) -> dict:
    """What to save, or to load into: {state name: {index of the weight: sharded FP32 tensor on the host}}."""
    weights = [span[0] for bucket in buckets for span in bucket.spans]
    sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, (w.in_model_state() for w in weights))
    state: dict[str, dict[int, ShardedTensor]] = {name: {} for name in STATES}
    index = 0
    for bucket in buckets:
        # On the host, one state at a time: the whole state need not fit the device.
        host = {
            name: torch.empty(bucket.numel) if is_loading else bucket.unsharded(bucket.read(held)).cpu()
            for name, held in STATES.items()
        }
        for weight, start, end in bucket.spans:
            for name in STATES:
                tensor = host[name][start:end].view(weight.param.shape)
                state[name][index] = make_sharded_optimizer_tensor(
                    sharded[index], tensor, prefix=f"optimizer.state.{name}"
                )
            index += 1
    return state


def load_engine_state(buckets: list[Bucket], state: dict) -> None:
    """Take this rank's shards out of the loaded whole tensors; weights are loaded already."""
    first = 0  # of the bucket's weights, among all
    for bucket in buckets:
        for i, lo, hi in bucket.pieces():
            before = bucket.shard.start - bucket.spans[i][1]
            for name, held in STATES.items():
                part = state[name][first + i].reshape(-1)[before + lo : before + hi]
                bucket.write(held, i, lo, hi, part.to(bucket.weight.device))
        first += len(bucket.weights)


def sharded_weight_scales(buckets: list[Bucket], is_loading: bool) -> dict:
    """Scale and amax of each E4M3 weight: (2,)."""
    state = {}
    for bucket in (b for b in buckets if b.scaling is not None or not is_loading):
        for i, weight in enumerate(bucket.weights):
            values = torch.zeros(2) if bucket.scaling is None else bucket.scale_and_amax(i)
            state[weight.key] = _by_layer("fp8_weight_scale", values, weight)
    return state


def load_weight_scales(buckets: list[Bucket], state: dict) -> None:
    """The reverse of sharded_weight_scales; the weights keep their values, and one that was BF16 its scale."""
    for bucket in (b for b in buckets if b.scaling is not None):
        for i, weight in enumerate(bucket.weights):
            scale, amax = state[weight.key].to(bucket.weight.device)
            if scale > 0:
                bucket.rescale(i, scale, amax)


def sharded_scaling_state(weights: list[OwnedWeight], is_loading: bool) -> dict:
    """Scale and amax history of each linear's two slots: (2, 1 + history)."""
    state = {}
    for weight in (w for w in weights if w.casts.scaling is not None or not is_loading):
        scaling, table = weight.casts.scaling, torch.zeros(2, 2)
        if scaling is not None:
            slots = list(weight.casts.slots)
            table = torch.cat([scaling.scale[None, slots], scaling.amax_history[:, slots]]).t().contiguous()
        # Another --fp8-amax-history-len takes the newest amaxes that fit.
        state[weight.key] = _by_layer("fp8_scaling", table, weight, allow_shape_mismatch=True)
    return state


def load_scaling_state(scaling: DelayedScaling, weights: list[OwnedWeight], state: dict, warm: bool) -> None:
    """The reverse of sharded_scaling_state. Unless warm, or where a slot is new, all scale just in time for a step."""
    history, scale = torch.zeros_like(scaling.amax_history), scaling.scale.clone()
    for weight in (w for w in weights if w.casts.scaling is scaling):
        table = state[weight.key].t()
        slots = list(weight.casts.slots)
        history[:, slots], scale[slots] = table[1:], table[0]
    used = scale > 0
    scaling.load(history, torch.where(used, scale, 1.0), warm and bool(used.all()))


def sharded_mu_state(mu: torch.Tensor, weights: list[OwnedWeight]) -> dict:
    """mu (weights,) of the shared reduction; one number a weight."""
    return {w.key: _by_layer("fp8_grad_mu", mu[i : i + 1], w) for i, w in enumerate(weights)}


def load_mu_state(weights: list[OwnedWeight], state: dict, device) -> torch.Tensor:
    """The reverse of sharded_mu_state."""
    return torch.cat([torch.empty(0, device=device), *(state[w.key].to(device) for w in weights)])


def _by_layer(name: str, tensor: torch.Tensor, weight: OwnedWeight, **kwargs) -> ShardedTensor:
    """What belongs to a weight, the same on all its tensor- and data-parallel ranks.

    A key a layer, not Megatron's stack of all layers: some may have none (--first-last-layers-bf16, experts).
    """
    assert weight.of is not None
    key = f"optimizer.{name}.{weight.key}"
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=weight.of.replica, **kwargs)
