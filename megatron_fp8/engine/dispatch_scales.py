"""The scales of experts on other ranks, for rows that are sent to them in FP8 (--fp8-dispatch).

A rank casts the rows that it sends, each with the scale of the expert that will get it. So the bytes that arrive are
those that a cast after the journey would have made. For this each rank of expert parallelism knows the scales of all
experts of a layer, and the expert's rank learns the amax of what was cast elsewhere:

    step begins    scale (E,)    gathered over the ranks of expert parallelism, at the first cast
    cast           amax (E,)     of each expert's rows, on the rank that sends them
    step ends      amax          the largest of all senders goes into the expert's own slot, on its own rank

Both are one collective a step for all layers: 8 bytes an expert and linear. After the second the set agrees on its
amaxes as always (numerics/scaling.py). So scales, and checkpoints, are those of a run that sends BF16.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..numerics.scaling import DelayedScaling
from ..ranks import all_reduce_largest


class DispatchScales:
    """See the top of the file.

    Args:
        scaling: of this rank's experts.
        banks: for each bank of this rank, the slots (INPUT, GRAD) of its experts; alike on all ranks of the group.
        group: the ranks of expert parallelism.

    Attributes:
        amax: (banks, roles, experts of all ranks) float32, what this rank has cast in the step.
    """

    def __init__(self, scaling: DelayedScaling, banks: Sequence[Sequence[tuple[int, int]]], group: dist.ProcessGroup):
        self._scaling, self._group = scaling, group
        device = scaling.amax.device
        self._places = torch.tensor(banks, device=device).mT.contiguous()  # (banks, roles, experts of a rank)
        self._bank = {bank[0]: i for i, bank in enumerate(banks)}
        shape = (*self._places.shape[:2], self._places.shape[2] * group.size())
        self.amax = torch.zeros(shape, device=device)
        self._scale = torch.ones(shape, device=device)
        self._of: torch.Tensor | None = None  # the scales that were gathered

    def of(self, first: tuple[int, int], role: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(Scales (E,), amaxes (E,) for kernels to raise) of all ranks' experts, of the bank whose first expert here
        has the slots `first`. The first call of a step is collective over the group."""
        if self._of is not self._scaling.scale:
            self._gather()
        bank = self._bank[first]
        return self._scale[bank, role], self.amax[bank, role]

    def _gather(self) -> None:
        self._of = self._scaling.scale
        mine = self._of[self._places]
        gathered = mine.new_empty(self._group.size(), *mine.shape)
        dist.all_gather_into_tensor(gathered.view(-1), mine.view(-1), group=self._group)  # gloo wants like shapes
        self._scale = gathered.permute(1, 2, 0, 3).flatten(2)

    def begin_step(self) -> None:
        """Forget the amaxes of a step that was skipped."""
        self.amax.zero_()

    def settle(self) -> None:
        """The step ends: raise the amaxes of this rank's experts to those of what was sent to them. Collective over the
        group."""
        all_reduce_largest(self.amax, self._group)
        mine = self.amax.unflatten(2, (self._group.size(), -1))[:, :, self._group.rank()]
        amax = self._scaling.amax
        amax[self._places] = torch.maximum(amax[self._places], mine)
        self.amax.zero_()
