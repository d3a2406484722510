"""What the weights of one set share. It is made before their buckets, and each weight gets it when it is attached."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..flags.config import Fp8Config
from ..numerics.scaling import DelayedScaling, WeightScaling
from .dispatch_scales import DispatchScales
from .events import Events
from .owned_weight import OwnedWeight, Scratch
from .reductions import Reduction
from .weight_groups import WeightGroups


@dataclass(frozen=True, eq=False)
class SetParts:
    """See the top of the file.

    Attributes:
        of: the set's process groups and names.
        fp8: the run's configuration.
        sharded: whether each data-parallel rank owns one row of a bucket; else it owns all of it.
        reduction: how the gradients are summed.
        events, scratch, device: the engine's.
        scaling, slots: delayed scaling of the linears' operands, or None; and each weight's two places in it.
        dispatch: the scales of other ranks' experts, if rows are sent to them in FP8; else None.
        weight_scaling, places: the scales of the weights that are stored in E4M3, or None; and each weight's place.
    """

    of: WeightGroups
    fp8: Fp8Config
    sharded: bool
    reduction: Reduction
    events: Events
    scratch: Scratch
    device: torch.device
    scaling: DelayedScaling | None = None
    slots: Mapping[OwnedWeight, tuple[int, int]] = field(default_factory=dict)
    dispatch: DispatchScales | None = None
    weight_scaling: WeightScaling | None = None
    places: Mapping[OwnedWeight, int] = field(default_factory=dict)
