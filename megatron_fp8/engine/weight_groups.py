"""Sets of owned weights: who has a part of them, who sums their gradients, what they are called.

Weights of one set share their process groups. GPT's linears are one set, over the data-parallel group. Routed experts
are a second (--fp8-experts), over the expert-data-parallel group. There each rank has other experts, so no scale, amax
or sum may be agreed on across the two. All code that communicates, or names what it saves, asks the set (`Bucket`,
`WeightSet`, checkpoint/, monitor/). None asks Megatron for "the" data-parallel group.

`register` adds a set beside the linears. It takes a function that makes the new set from theirs, and that is called
when the optimizer is built. A weight belongs to the first set that has it; if none does, it is a linear of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core import mpu
from torch.distributed import ProcessGroup, get_process_group_ranks

from ..flags.config import Fp8Config
from ..numerics.noise import noise_seed
from ..ranks import gathered
from .owned_weight import OwnedWeight


@dataclass(frozen=True, eq=False)
class WeightGroups:
    """Some owned weights, their process groups and their names.

    Attributes:
        name: tells it from other sets, in noise and in keys of checkpoints; "" for the linears.
        has: whether a weight is one of them.
        data: its ranks have the same weights and sum their gradients; each owns a part of the state.
        sharing: the ranks that have parts or replicas of the same weights; each weight has one scale on all of them.
        amax: the ranks that agree on the amax of activations and gradients.
        norm: the square of the gradient norm is summed over it.
        stages: the ranks that have the set's other weights: the pipeline's stages, and other experts' ranks.
        mean: the factor from the sum over `data` to the gradient.
        rank: this process's, among the tensor-parallel ranks: they have other parts of the same weights.
        place: tells the buckets of this `data` group from those of all others, in keys of checkpoints.
        dispatch: the ranks that send each other the rows of their experts; None if the weights are no experts'.
        siblings: the ranks that have parts of the experts of the same layers; None if the weights are no experts'.
    """

    name: str
    has: Callable[[OwnedWeight], bool]
    data: ProcessGroup
    sharing: ProcessGroup
    amax: ProcessGroup
    norm: ProcessGroup
    stages: ProcessGroup
    mean: float
    rank: int
    place: str
    dispatch: ProcessGroup | None = None
    siblings: ProcessGroup | None = None

    def identity(self, weight: OwnedWeight, seed: int) -> tuple[int, ...]:
        """Numbers that only this rank's part of this weight has, in a run of that seed."""
        return noise_seed(seed, self.rank, weight.layer_number, *f"{self.name}{weight.path}".encode())

    def key(self, weight: OwnedWeight) -> str:
        """A weight's name in checkpoints, the same in every layout."""
        return f"{self.name}{weight.path}.{weight.layer_number}"

    def siblings_that_cast(self, casts: bool) -> ProcessGroup | None:
        """The ranks of `siblings` that cast in FP8, if this one `casts`: --fp8-bf16-layers may keep all experts of a
        rank in BF16. Collective over all ranks."""
        if self.siblings is None:
            return None
        mine = casts, tuple(get_process_group_ranks(self.siblings))
        said = set(gathered(mine))
        return self.siblings if len(said) == len({ranks for _, ranks in said}) else _alike(mine)

    @property
    def replica(self) -> tuple[int, int, int]:
        """This rank's replica id, for entries of a weight that are the same on all ranks of `sharing`."""
        return 0, self.rank, self.data.rank()


def linears(config, norm: ProcessGroup) -> WeightGroups:
    """The linears of GPT's layers. config: Megatron's, of the model; norm: its optimizer sums the norm over it."""
    data, stages = mpu.get_data_parallel_group(with_context_parallel=True), mpu.get_pipeline_model_parallel_group()
    rank = mpu.get_tensor_model_parallel_rank()
    return WeightGroups(
        name="",
        has=lambda weight: True,
        data=data,
        sharing=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        amax=mpu.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red),
        norm=norm,
        stages=stages,
        mean=1.0 if config.calculate_per_token_loss else 1.0 / data.size(),
        rank=rank,
        place=f"pp{stages.rank()}.tp{rank}",
    )


def experts(linears: WeightGroups, sharded: bool) -> WeightGroups:
    """The routed experts, each on one rank or split over those of expert tensor parallelism.

    A token's gradient reaches its expert once, on the ranks that computed it: so the sum is over the ranks that have
    the same part of the expert, and the mean is that of the linears, over the ranks that have other tokens, as in
    stock.

    linears: their set.  sharded: whether each rank of `data` owns a row of the buckets: then all ranks have other rows.
    """
    data, others = mpu.get_expert_data_parallel_group(), mpu.get_expert_tensor_model_pipeline_parallel_group()
    sharing, stages, rank = data, others, mpu.get_expert_tensor_parallel_rank()
    if mpu.get_expert_tensor_parallel_world_size() > 1:  # Megatron has no group of all that have parts of one expert
        stage = mpu.get_pipeline_model_parallel_rank()
        sharing = _alike(("sharing", mpu.get_expert_model_parallel_rank(), stage))
        stages = _alike(("stages", rank, data.rank()))
    return WeightGroups(
        name="experts.",
        has=lambda weight: weight.expert is not None,
        data=data,
        sharing=sharing,
        amax=sharing,
        norm=linears.norm if sharded else others,
        stages=stages,
        mean=linears.mean,
        rank=rank,
        place=f"experts{others.rank()}",
        dispatch=mpu.get_expert_model_parallel_group(),
        siblings=mpu.get_expert_tensor_and_model_parallel_group(),
    )


def _alike(mine: tuple) -> ProcessGroup:
    """The group of the ranks that say the same. Collective over all ranks."""
    said = gathered(mine)
    groups = {key: mpu.create_group([i for i, other in enumerate(said) if other == key]) for key in dict.fromkeys(said)}
    return groups[mine]


type MakeSet = Callable[[WeightGroups], WeightGroups]  # takes the linears' set, and may reuse its groups

_more: list[MakeSet] = []


def register(make: MakeSet) -> None:
    """Add a set to all models built from now on, until the plugin is uninstalled; see the top of the file."""
    _more.append(make)


def forget() -> None:
    """Forget the sets that were registered."""
    _more.clear()


def weight_sets(config, norm: ProcessGroup, fp8: Fp8Config, sharded: bool) -> list[WeightGroups]:
    """All sets of a run, the linears last. config, norm: as `linears` takes them; sharded: as `experts` does."""
    last = linears(config, norm)
    owned = [experts(last, sharded)] if fp8.experts else []
    return [*(make(last) for make in _more), *owned, last]
