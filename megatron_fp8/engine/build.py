"""Builds the engine for a model: from FP8 linears and Megatron's optimizer configuration to one optimizer chain."""

import itertools

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.utils import get_model_config

from ..flags.config import Fp8Config
from ..flags.dispatch import OFF
from ..numerics.scaling import DelayedScaling, WeightScaling
from ..rebind import Hook, When
from .bucket import Bucket
from .chain import Fp8ChainedOptimizer, refuse_padding_alone
from .dispatch_scales import DispatchScales
from .events import Events
from .frozen import show_to_stock
from .frozen_set import freeze
from .gatherer import ChunkGather
from .optimizer import Archive, EngineOptimizer
from .owned_weight import OwnedWeight, Scratch, in_forward_order, name_weights, owned_weights, whole_banks
from .partition import bucket_size, cut
from .reducer import ChunkReducer
from .reductions import reduction
from .set_parts import SetParts
from .weight_groups import WeightGroups, weight_sets
from .weight_set import WeightSet

_BUILT = When("when the engine is built")
_FINALIZE = Hook(
    "megatron.core.model_parallel_config.ModelParallelConfig",
    *("finalize_model_grads_func", "engine.build", "None or ...", _BUILT),
    "Reduces our gradients where stock finishes its own; an official field.",
    of_object=True,
)
_NAN_CHECK = Hook(
    "megatron.core.distributed.DistributedDataParallelConfig",
    *("check_for_nan_in_grad", "engine.build", "holds bool", _BUILT),
    "Stock's check aborts the run and asks the host at every bucket; ours skips the step and does not.",
    of_object=True,
)
HOOKS = (_FINALIZE, _NAN_CHECK)


def build_optimizer(
    fp8: Fp8Config, stock, config, model_chunks, config_overrides, archive: Archive, bucket_numel: int | None
) -> Fp8ChainedOptimizer:
    """The chain of stock Megatron's optimizer parts and ours, over wrapped model chunks.

    Args:
        stock: the ChainedOptimizer that Megatron built for everything that is not an FP8 linear's weight.
        config, config_overrides: the optimizer configuration it was built from.
        archive: makes the state dicts of the two.
        bucket_numel: elements of a bucket (--ddp-bucket-size); None: Megatron's rule.

    A rank may have no FP8 linear (a pipeline stage of the embedding alone). Its part then owns nothing, and takes part
    in the decisions that all ranks make together.
    """
    if fp8.ckpt_compact:
        refuse_padding_alone(stock.chained_optimizers)
    weights = owned_weights(model_chunks)
    name_weights(model_chunks)
    groups = _our_param_groups(model_chunks, {weight.param for weight in weights}, config, config_overrides)
    build = _Build(fp8, config.use_distributed_optimizer, model_chunks, groups, bucket_numel)
    stats_group = stock.chained_optimizers[0].get_grad_stats_parallel_group()
    model_config = get_model_config(model_chunks[0])
    sets = []
    left = weights
    for of in weight_sets(model_config, stats_group, fp8, config.use_distributed_optimizer):
        sets.append(build.owned_set(of, [weight for weight in left if of.has(weight)]))
        left = [weight for weight in left if not of.has(weight)]
    options = list(zip(build.options, build.buckets, strict=True))
    engine = EngineOptimizer(sets, options, config, model_chunks, stats_group, archive)
    _finalize_with(engine, model_config)
    for chunk in model_chunks:
        _NAN_CHECK.on(chunk.ddp_config, False)
    return Fp8ChainedOptimizer(stock.chained_optimizers, engine)


class _Build:
    """What all sets are built with.

    Args:
        sharded: whether each data-parallel rank owns one row of the buckets; else it owns all of them.
        groups: Megatron's parameter groups of our weights: options, with their parameters as `params`.
        bucket_numel: --ddp-bucket-size, or None.

    Attributes:
        options: Megatron's param-group options.
        buckets: for each of the options, the buckets that were built so far.
    """

    def __init__(self, fp8: Fp8Config, sharded: bool, model_chunks, groups: list[dict], bucket_numel: int | None):
        self.fp8, self.sharded, self.chunks, self._bucket_numel = fp8, sharded, model_chunks, bucket_numel
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.events, self.scratch = Events(), Scratch()
        self._option_of = {param: i for i, option in enumerate(groups) for param in option.pop("params")}
        self.options: list[dict] = groups
        self.buckets: list[list[Bucket]] = [[] for _ in groups]

    def owned_set(self, of: WeightGroups, weights: list[OwnedWeight]) -> WeightSet:
        """A set: its weights, given in model order, are moved into buckets; frozen ones are not."""
        fp8, frozen = self.fp8, [weight for weight in weights if not weight.trained]
        plans = [self._plan(chunk, set(weights).difference(frozen), of.data.size()) for chunk in self.chunks]
        if torch.distributed.get_rank() == 0 and (line := parted_banks(weights, list(itertools.chain(*plans)))):
            print(f"[fp8] {line}", flush=True)
        ordered = [weight for plan in plans for run in plan for weight in run]
        scaling, slots = _operand_scales(fp8, weights, of)
        weight_scaling, places = _weight_scales(fp8, ordered, of)
        parts = SetParts(
            of,
            fp8,
            self.sharded,
            reduction(fp8, ordered, of, self.sharded, self.device),
            self.events,
            self.scratch,
            self.device,
            scaling,
            slots,
            _dispatch_scales(fp8, of, scaling, slots),
            weight_scaling,
            places,
        )
        freeze(frozen, parts)
        reducers, gathers = [], []
        for chunk, plan in zip(self.chunks, plans, strict=True):
            reducer = ChunkReducer(chunk, chunk.ddp_config.overlap_grad_reduce)
            for run in plan:
                bucket = Bucket(run, parts, reducer.on_gradient)
                reducer.add(bucket)
                self.buckets[self._option_of[run[0].param]].append(bucket)
            reducers.append(reducer)
            gathers.append(ChunkGather(reducer.buckets[::-1], chunk.ddp_config.overlap_param_gather))
        return WeightSet(parts, reducers, gathers, frozen)

    def _plan(self, chunk, members: set[OwnedWeight], ranks: int) -> list[list[OwnedWeight]]:
        """The weights of each bucket of a chunk, buckets in the order in which the backward pass completes them.

        members: of the set.  ranks: of data parallelism.  The weights of a bucket have one option and one storage; a
        chunk without an FP8 linear has no bucket.
        """
        backward = [weight for weight in in_forward_order(owned_weights([chunk]))[::-1] if weight in members]
        numel = sum(weight.param.numel() for weight in backward)
        size = bucket_size(self._bucket_numel, chunk.ddp_config.num_buckets, numel, ranks)
        alike: dict[tuple[int, str], list[OwnedWeight]] = {}
        for weight in backward:
            alike.setdefault((self._option_of[weight.param], weight.storage), []).append(weight)
        runs = []
        for same in alike.values():
            whole = whole_banks(same)
            sizes = [sum(weight.param.numel() for weight in unit) for unit in whole]
            runs += [list(itertools.chain(*whole[run])) for run in cut(sizes, size, self.fp8.partition)]
        return sorted(runs, key=lambda run: backward.index(run[-1]))


def parted_banks(weights: list[OwnedWeight], runs: list[list[OwnedWeight]]) -> str:
    """A line about banks whose weights are in different buckets, or partly frozen; empty if there are none. Their
    gradients are made one by one (gemm/grouped.py). runs: the weights of each bucket."""
    of_run = {weight: i for i, run in enumerate(runs) for weight in run}
    banks: dict[tuple[str, int], list[OwnedWeight]] = {}
    for weight in weights:
        if weight.bank is not None:
            banks.setdefault(weight.bank, []).append(weight)
    parted = [same for same in banks.values() if len({of_run.get(weight) for weight in same}) > 1]
    if not parted:
        return ""
    n, k = parted[0][0].param.shape
    more = f", and {len(parted) - 1} more" if parted[1:] else ""
    return (
        f"--moe-grouped-gemm: the experts' weights of {parted[0][0].name} ({len(parted[0])} x {n} x {k}){more} do not "
        "lie together, and each gradient is a GEMM of its own: train them all or none, with the same optimizer settings"
    )


def _weight_scales(
    fp8: Fp8Config, weights: list[OwnedWeight], of: WeightGroups
) -> tuple[WeightScaling | None, dict[OwnedWeight, int]]:
    """The scales of the weights that are stored in E4M3, and each weight's place; a bucket's places are consecutive."""
    stored = [weight for weight in weights if weight.storage == "fp8"]
    if not stored:
        return None, {}
    scaling = WeightScaling(len(stored), fp8.forward_format, fp8.margin, of.sharing, stored[0].param.device)
    return scaling, {weight: i for i, weight in enumerate(stored)}


def _operand_scales(
    fp8: Fp8Config, weights: list[OwnedWeight], of: WeightGroups
) -> tuple[DelayedScaling | None, dict[OwnedWeight, tuple[int, int]]]:
    """Delayed scales of all linears that compute in FP8, and each one's two places: input and output gradient."""
    users = [weight for weight in weights if weight.fp8]
    if fp8.recipe != "delayed":
        return None, {}
    others = of.siblings_that_cast(bool(users))
    if not users:
        return None, {}
    scaling = DelayedScaling(
        [fp8.forward_format, fp8.grad_format] * len(users),
        fp8.amax_history_len,
        fp8.amax_compute_algo,
        fp8.margin,
        users[0].param.device,
        kinds=2,
        others=others,
    )
    return scaling, {weight: (2 * i, 2 * i + 1) for i, weight in enumerate(users)}


def _dispatch_scales(
    fp8: Fp8Config, of: WeightGroups, scaling: DelayedScaling | None, slots: dict[OwnedWeight, tuple[int, int]]
) -> DispatchScales | None:
    """With --fp8-dispatch, the scales of the experts on all ranks of expert parallelism."""
    if fp8.dispatch == OFF or of.dispatch is None or scaling is None:
        return None
    banks: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for weight, pair in slots.items():
        assert weight.bank is not None
        banks.setdefault(weight.bank, []).append(pair)
    return DispatchScales(scaling, list(banks.values()), of.dispatch)


def _our_param_groups(model_chunks, ours: set[torch.Tensor], config, overrides) -> list[dict]:
    """Megatron's own parameter groups, for just the parameters that it does not see; the same groups on all ranks."""
    flags = [(p, p.requires_grad) for chunk in model_chunks for p in chunk.parameters()]
    try:
        for param, _ in flags:
            show_to_stock(param, param in ours)
        if overrides is None:
            overrides = get_standard_config_overrides(config)
        return _get_param_groups(model_chunks, config, overrides)
    finally:
        for param, flag in flags:
            show_to_stock(param, flag)


def _finalize_with(engine: EngineOptimizer, model_config) -> None:
    """Reduce our gradients when Megatron finishes its own."""

    stock = model_config.finalize_model_grads_func or finalize_model_grads

    @torch.no_grad()
    def finalize(model, num_tokens=None, *args, **kwargs):
        stock(model, num_tokens, *args, **kwargs)  # leaves the global number of tokens in num_tokens
        engine.finalize_grads(num_tokens)

    _FINALIZE.on(model_config, finalize)
