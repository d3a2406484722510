"""Saves and loads the engine's optimizer state in Megatron's distributed checkpoints (`torch_dist`).

Another layout cannot use a shard of a flat buffer, and another level cannot use a format.  So each weight's FP32
master, exp_avg and exp_avg_sq are saved, whole for this tensor- and pipeline-parallel rank, with the sharding of the
model's weight: `optimizer.state.exp_avg.<weight>`.  dist_checkpointing then reshards them over data, tensor and
pipeline parallelism like weights, and stores every element once (the weight's replica id marks data-parallel
replicas).  Every format's values are FP32 values, so saving loses nothing: a run that loads its own checkpoint
continues bit for bit; another level rounds to its own formats.  The names are those of stock's fully reshardable form,
so that form loads too.  The price is 12 bytes a parameter on disk, and in host memory on every data-parallel rank
during a save.  `--fp8-ckpt-compact` saves the states' own bytes instead (compact.py).

The model part has every weight in BF16 under its stock name, at each level: an E4M3 payload times a power of two is a
BF16 number.  Loading it sets the weights and, without optimizer state, the masters.

Other entries, by layer number:

    E4M3 weights              scale and amax of each
    delayed scaling           amax history and scale of each linear's two slots
    --fp8-grad-reduce shared  mu of each weight
    --fp8-on-spike            its histories and the linears that are out of FP8: plain numbers, equal on all ranks

The content metadata (`contents`), which Megatron saves and returns, tells which of them a checkpoint has; a run asks
only for those.  A weight that stays in BF16 has zeros there.  So a run with other `--fp8-bf16-layers` finds a value or
zeros for each weight.
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from ..engine.bucket import Bucket
from ..engine.owned_weight import OwnedWeight
from ..errors import UserError
from ..flags.config import Fp8Config
from ..numerics.scaling import DelayedScaling
from ..ranks import gathered
from .stock_state import FORM, RESHARDABLE

CONTENTS, VERSION = "megatron_fp8", 1
STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # stock's names: a bucket's


def contents(fp8: Fp8Config, args) -> dict:
    """The content metadata of this run's checkpoints: format version, entries, and the layout of compact ones."""
    return {
        "version": VERSION,
        "weight_scale": fp8.weight == "fp8",
        "scaling": fp8.recipe == "delayed" and fp8.gemm == "fp8",
        "experts": fp8.experts,
        "compact": _compact_layout(fp8, args) if fp8.ckpt_compact else "",
    }


def _compact_layout(fp8: Fp8Config, args) -> str:
    """The layout and formats that a compact checkpoint depends on, as text."""
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
    """Makes a wrapper of Megatron's content metadata function that adds `contents`."""

    def make(stock):
        def metadata(args, *rest, **kwargs):
            return {**stock(args, *rest, **kwargs), CONTENTS: contents(fp8, args)}

        return metadata

    return make


def says_layers_differ(stock: Callable) -> Callable:
    """Wraps Megatron's content metadata function: each layer is saved under its own number."""

    def metadata(args, *rest, **kwargs):
        return {**stock(args, *rest, **kwargs), "non_homogeneous_layers": True}

    return metadata


def is_ours(common: dict | None) -> bool:
    """Whether a level saved the checkpoint. common: the part of it that every rank reads."""
    return CONTENTS in contents_of(common)


def check_fits(common: dict, args, fp8: Fp8Config | None) -> None:
    """Raise UserError if this run cannot load a checkpoint's optimizer state. fp8: None for a run without a level."""
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
        if ours.get("experts", False) != fp8.experts:
            was, remedy = ("without", "remove") if fp8.experts else ("with", "add")
            raise UserError(
                f"--load {args.load}: the optimizer state was saved {was} --fp8-experts, which decides the form of the "
                f"experts' states; {remedy} it, or add {weights_only}"
            )
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
    """The layout that stock's form for one layout depends on, as text."""
    sizes = [f"{size} {getattr(args, f'{size}_model_parallel_size', 1)}" for size in ("tensor", "pipeline")]
    return f"{', '.join(sizes)}, distributed optimizer {getattr(args, 'use_distributed_optimizer', True)}"


def contents_of(common: dict | None) -> dict:
    """The content metadata of a checkpoint. common: the part of it that every rank reads."""
    return (load_content_metadata(preloaded_state_dict=common) or {}) if common else {}


def sharded_engine_state(
    buckets: list[Bucket], model_sharded_state_dict, is_loading: bool, frozen: Sequence[OwnedWeight] = ()
) -> dict:
    """What to save, or to load into: {state name: {index of the weight: sharded FP32 tensor on the host}}.

    frozen: experts that a script has frozen. A layer's experts are one tensor, which may have no hole: if others are
    trained, on any rank, a frozen one's weight stands for its master, and zeros for its moments. Nothing reads them.
    """
    sharded = {
        id(entry.data): entry
        for entry in nested_values(model_sharded_state_dict)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, dict[int, ShardedTensor]] = {name: {} for name in STATES}

    def like(weight: OwnedWeight) -> ShardedTensor | ShardedTensorFactory:
        (entry,) = (sharded[id(copy)] for copy in weight.in_model_state() if id(copy) in sharded)
        return entry

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
                state[name][index] = _state(name, like(weight), tensor)
            index += 1
    mine = {like(weight).key for bucket in buckets for weight in bucket.weights if weight.expert is not None}
    trained = {key for others in gathered(mine) for key in others}
    for weight in (weight for weight in frozen if like(weight).key in trained):
        values = weight.dense().detach().float().cpu()
        for name in STATES:
            state[name][index] = _state(name, like(weight), values if name == "param" else torch.zeros_like(values))
        index += 1
    return state


def _state(name: str, like: ShardedTensor | ShardedTensorFactory, tensor: torch.Tensor):
    """A weight's state, with the sharding of `like`, the model's weight."""
    return make_sharded_optimizer_tensor(like, tensor, prefix=f"optimizer.state.{name}")


def load_engine_state(buckets: list[Bucket], state: dict) -> None:
    """Copy this rank's shards from the loaded whole tensors. Weights are loaded already."""
    first = 0  # index of the bucket's first weight
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
    """Load sharded_weight_scales. Weights keep their values. A weight that was BF16 keeps its scale."""
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
        # A run with another --fp8-amax-history-len loads the newest amaxes that fit.
        state[weight.key] = _by_layer("fp8_scaling", table, weight, allow_shape_mismatch=True)
    return state


def load_scaling_state(scaling: DelayedScaling, weights: list[OwnedWeight], state: dict, warm: bool) -> None:
    """Load sharded_scaling_state. If not warm, or if any slot is new, all slots scale just in time for a step."""
    history, scale = torch.zeros_like(scaling.amax_history), scaling.scale.clone()
    for weight in (w for w in weights if w.casts.scaling is scaling):
        table = state[weight.key].t()
        slots = list(weight.casts.slots)
        history[:, slots], scale[slots] = table[1:], table[0]
    used = scale > 0
    scaling.load(history, torch.where(used, scale, 1.0), warm and bool(used.all()))


def sharded_mu_state(mu: torch.Tensor, weights: list[OwnedWeight]) -> dict:
    """The shared reduction's mu (weights,), one number for each weight."""
    return {w.key: _by_layer("fp8_grad_mu", mu[i : i + 1], w) for i, w in enumerate(weights)}


def load_mu_state(weights: list[OwnedWeight], state: dict, device) -> torch.Tensor:
    """Load sharded_mu_state: mu (weights,)."""
    return torch.cat([torch.empty(0, device=device), *(state[w.key].to(device) for w in weights)])


def _by_layer(name: str, tensor: torch.Tensor, weight: OwnedWeight, **kwargs) -> ShardedTensor:
    """A weight's entry, equal on all its tensor- and data-parallel ranks.

    Each layer has its own key instead of Megatron's stack of all layers: some layers may have no entry
    (--first-last-layers-bf16, experts).
    """
    assert weight.of is not None
    key = f"optimizer.{name}.{weight.key}"
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=weight.of.replica, **kwargs)
