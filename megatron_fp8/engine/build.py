"""Builds the engine for a model: from FP8 linears and Megatron's optimizer configuration to one optimizer chain."""

from collections.abc import Callable

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args

from ..comm.reduce import node_groups, reduce_blocks, reduce_fp32
from ..comm.shared import SharedScale
from ..comm.wire import Stages
from ..flags.config import Fp8Config
from ..numerics.scaling import DelayedScaling, WeightScaling
from .bucket import Bucket, cut
from .chain import Fp8ChainedOptimizer
from .events import Events
from .frozen import show_to_stock
from .frozen_set import freeze
from .gatherer import ChunkGather
from .optimizer import Archive, EngineOptimizer
from .owned_weight import OwnedWeight, Scratch, in_forward_order, name_weights, owned_weights
from .reducer import ChunkReducer
from .weight_groups import WeightGroups, weight_sets
from .weight_set import WeightSet


def build_optimizer(
    fp8: Fp8Config, stock, config, model_chunks, config_overrides, archive: Archive
) -> Fp8ChainedOptimizer:
    """The chain of stock Megatron's optimizer parts and ours, over wrapped model chunks.

    Args:
        stock: the ChainedOptimizer that Megatron built for everything that is not an FP8 linear's weight.
        config, config_overrides: the optimizer configuration it was built from.
        archive: makes the state dicts of the two.

    A rank may have no FP8 linear (a pipeline stage of the embedding alone): its part owns nothing, and joins in what
    all ranks decide together.
    """
    weights = owned_weights(model_chunks)
    name_weights(model_chunks)
    groups = _our_param_groups(model_chunks, {id(w.param): w for w in weights}, config, config_overrides)
    build = _Build(fp8, config.use_distributed_optimizer, model_chunks, groups)
    stats_group = stock.chained_optimizers[0].get_grad_stats_parallel_group()
    model_config = get_model_config(model_chunks[0])
    sets = []
    left = weights
    for of in weight_sets(model_config, stats_group):
        sets.append(build.owned_set(of, [weight for weight in left if of.has(weight)]))
        left = [weight for weight in left if not of.has(weight)]
    options, events = list(build.options.values()), build.events
    engine = EngineOptimizer(sets, options, config, model_chunks, build.device, stats_group, events, archive)
    _finalize_with(engine, model_config)
    for chunk in model_chunks:
        # Stock's own check aborts the run and asks the host at every bucket; ours skips the step and does not.
        chunk.ddp_config.check_for_nan_in_grad = False
    return Fp8ChainedOptimizer(stock.chained_optimizers, engine)


class _Build:
    """What all sets are built with; `options` collects (param-group options, their buckets) by the options' id."""

    def __init__(self, fp8: Fp8Config, sharded: bool, model_chunks, groups: list[dict]):
        self.fp8, self.sharded, self.chunks = fp8, sharded, model_chunks
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.events, self.scratch = Events(), Scratch()
        self._option_of = {id(p): option for option in groups for p in option.pop("params")}
        self.options: dict[int, tuple[dict, list[Bucket]]] = {id(option): (option, []) for option in groups}

    def owned_set(self, of: WeightGroups, weights: list[OwnedWeight]) -> WeightSet:
        """The set's weights, in model order, moved into buckets; but those that are frozen."""
        fp8 = self.fp8
        frozen = [weight for weight in weights if not weight.trained]
        freeze(frozen, of, fp8, self.events, self.scratch)
        trained = {id(weight) for weight in weights if weight.trained}
        plan = _plan_buckets(fp8, self.chunks, trained, self._option_of, of.data.size())
        ordered = [weight for chunk in plan for _, members in chunk for weight in members]
        reduce, shared_scale = _reduction(fp8, ordered, of, self.sharded, self.device)
        weight_scaling = _weight_scaling(fp8, ordered, of)
        first = 0  # of the next bucket of E4M3 weights, among all of the set
        reducers, gathers = [], []
        for chunk, cuts in zip(self.chunks, plan, strict=True):
            buckets = []
            for option, members in cuts:
                in_fp8 = members[0].storage == "fp8"
                scaling = weight_scaling if in_fp8 else None
                bucket = Bucket(members, of, self.sharded, fp8, scaling, first, reduce, self.events, self.scratch)
                first += len(members) if in_fp8 else 0
                buckets.append(bucket)
                self.options[id(option)][1].append(bucket)
            reducers.append(ChunkReducer(chunk, buckets, chunk.ddp_config.overlap_grad_reduce))
            gathers.append(ChunkGather(buckets[::-1], chunk.ddp_config.overlap_param_gather))
        casts = _attach_scaling(fp8, weights)
        return WeightSet(of, reducers, gathers, frozen, casts, weight_scaling, shared_scale, self.device)


def _plan_buckets(
    fp8: Fp8Config, model_chunks, members: set[int], option_of: dict[int, dict], ranks: int
) -> list[list[tuple[dict, list[OwnedWeight]]]]:
    """For each chunk its buckets, in the order in which the backward pass completes them: (option, weights).

    members: ids of the weights.  option_of: of each parameter, by id.  ranks: of data parallelism.  The weights of a
    bucket have one option and one storage; a chunk without an
    FP8 linear has no bucket.
    """
    plan = []
    for chunk in model_chunks:
        backward = [weight for weight in in_forward_order(owned_weights([chunk]))[::-1] if id(weight) in members]
        numel = sum(w.param.numel() for w in backward)
        # Whole weights balance well only where there are many (partition.py).
        size = numel
        if fp8.partition != "greedy":
            asked, count = get_args().ddp_bucket_size, chunk.ddp_config.num_buckets
            size = bucket_size(asked, count, numel, ranks)
        place = {id(weight): i for i, weight in enumerate(backward)}
        alike: dict[tuple[int, str], list[OwnedWeight]] = {}
        for weight in backward:
            alike.setdefault((id(option_of[id(weight.param)]), weight.storage), []).append(weight)
        cuts = [run for members in alike.values() for run in cut(members, size)]
        cuts.sort(key=lambda run: place[id(run[-1])])
        plan.append([(option_of[id(run[0].param)], run) for run in cuts])
    return plan


def bucket_size(asked: int | None, count: int | None, numel: int, ranks: int) -> int:
    """Elements: Megatron's rule, but also without --overlap-grad-reduce: a bucket bounds what is in flight.

    asked, count: --ddp-bucket-size and --ddp-num-buckets, or None; numel: of the chunk; ranks: of data parallelism.
    """
    if count is not None:
        return numel // count
    return asked or max(40_000_000, 1_000_000 * ranks)


def _weight_scaling(fp8: Fp8Config, weights: list[OwnedWeight], of: WeightGroups) -> WeightScaling | None:
    """The scales of the weights that are stored in E4M3."""
    count = sum(weight.storage == "fp8" for weight in weights)
    if not count:
        return None
    return WeightScaling(count, fp8.forward_format, fp8.margin, of.sharing, weights[0].param.device)


def _reduction(
    fp8: Fp8Config, weights: list[OwnedWeight], of: WeightGroups, sharded: bool, device
) -> tuple[Callable[[Bucket], Stages], SharedScale | None]:
    """How a bucket is summed over data parallelism, and the state of it if it has one."""
    group = of.data
    if fp8.grad_reduce == "shared":
        sizes = [weight.param.numel() for weight in weights]
        shared = SharedScale(fp8.grad_scaling, sizes, group, of.sharing, sharded, device)
        index = {id(weight): i for i, weight in enumerate(weights)}

        def by_shared_scale(bucket: Bucket) -> Stages:
            return shared.reduce(bucket.grads.dense(), [(a, b, index[id(w)]) for w, a, b in bucket.spans])

        return by_shared_scale, shared
    if group.size() == 1:
        return lambda bucket: bucket.grads.local(), None
    if fp8.grad_reduce == "fp32":
        return lambda bucket: reduce_fp32(bucket.grads.dense().float(), group, sharded), None
    hierarchy = fp8.grad_reduce_hierarchy
    nodes = None
    if hierarchy != "off":
        nodes = node_groups(group, None if hierarchy == "node" else int(hierarchy))
        levels = f"in {nodes.across.size()} nodes of {nodes.inside.size()}" if nodes else "in one level"
        if torch.distributed.get_rank() == 0:
            print(f"[fp8] gradients are reduced over {group.size()} data-parallel ranks {levels}", flush=True)

    def by_blocks(bucket: Bucket) -> Stages:
        return bucket.grads.reduce_blocks(
            lambda packed, receive: reduce_blocks(packed, group, sharded, nodes, receive)
        )

    return by_blocks, None


def _our_param_groups(model_chunks, by_param: dict[int, OwnedWeight], config, overrides) -> list[dict]:
    """Megatron's own parameter groups, for exactly the parameters that it does not see; the same ones on all ranks."""
    flags = [(p, p.requires_grad) for chunk in model_chunks for p in chunk.parameters()]
    try:
        for param, _ in flags:
            show_to_stock(param, id(param) in by_param)
        if overrides is None:
            overrides = get_standard_config_overrides(config)
        return _get_param_groups(model_chunks, config, overrides)
    finally:
        for param, flag in flags:
            show_to_stock(param, flag)


def _attach_scaling(fp8: Fp8Config, weights: list[OwnedWeight]) -> DelayedScaling | None:
    """Two slots, input and output gradient, for every linear that computes in FP8."""
    users = [w for w in weights if w.fp8]
    if fp8.recipe != "delayed" or not users:
        return None
    scaling = DelayedScaling(
        [fp8.forward_format, fp8.grad_format] * len(users),
        fp8.amax_history_len,
        fp8.amax_compute_algo,
        fp8.margin,
        users[0].param.device,
    )
    for i, weight in enumerate(users):
        weight.casts.scaling, weight.casts.slots = scaling, (2 * i, 2 * i + 1)
    return scaling


def _finalize_with(engine: EngineOptimizer, model_config) -> None:
    """Reduce our gradients where Megatron finishes its own: at finalize_model_grads_func, an official hook."""
    stock = model_config.finalize_model_grads_func or finalize_model_grads

    @torch.no_grad()
    def finalize(model, num_tokens=None, *args, **kwargs):
        stock(model, num_tokens, *args, **kwargs)  # leaves the global number of tokens in num_tokens
        engine.finalize_grads(num_tokens)

    model_config.finalize_model_grads_func = finalize
