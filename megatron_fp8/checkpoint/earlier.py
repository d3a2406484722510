"""What earlier versions saved otherwise: until November 2026 shared experts were stock's parameters, not linears.

Their weights, masters and moments load as they are, in the form for every layout: the names are the same, but for the
masters without the distributed optimizer (stock_state.py). What is missing are the entries that a level adds for its
linears: scales, amax histories, mu. Zeros stand for them, which mean that there is none yet, as for a weight that was
BF16.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training.global_vars import get_args

from ..errors import UserError
from ..ranks import gathered

_OURS, _SHARED = "optimizer.fp8_", ".shared_experts."
_OF_ONE_LAYOUT = "optimizer.fp8_compact.", "optimizer.distributed."  # parts of forms that know no weights

type Path = tuple[Any, ...]


class MissingShared:
    """The entries of shared experts that a run asks for and its checkpoint does not have, taken out of what is asked.

    state: what the run asks for; changed.  stored: the names of all that is there.  Collective.

    Raises UserError, on all ranks, for a checkpoint in a form in which the states of stock's parameters and of linears
    cannot change places.

    Attributes:
        found: whether any rank misses one.
    """

    def __init__(self, state: dict, stored: list[str]):
        self._taken: dict[Path, torch.Tensor] = {}
        self.found = False
        args = get_args()
        if not args.moe_shared_expert_intermediate_size or not stored:
            return
        names = frozenset(stored)
        for within, name, entry in list(_tensors(state)):
            if _OURS in entry.key and _SHARED in entry.key and entry.key not in names:
                self._taken[(*within, name)] = torch.zeros_like(entry.data)
                del _at(state, within)[name]
        if self._taken:
            for entry in nested_values(state):
                key = getattr(entry, "key", "")
                if _SHARED in key and key not in names:
                    entry.key = key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
        self.found = any(gathered(bool(self._taken)))
        of_one_layout = any(key in str(getattr(e, "key", "")) for e in nested_values(state) for key in _OF_ONE_LAYOUT)
        if self.found and any(gathered(of_one_layout)):
            raise UserError(
                f"--load {args.load}: saved for one layout, when shared experts were not a level's linears: their "
                "optimizer state has another place now; add --no-load-optim (weights and iteration are kept)"
            )

    def put_into(self, loaded: dict) -> None:
        """Zeros in the places of what was taken out."""
        for (*within, name), zeros in self._taken.items():
            _at(loaded, within)[name] = zeros


def _tensors(state: dict, within: Path = ()) -> Iterator[tuple[Path, Any, ShardedTensor]]:
    """(path of the dictionary that holds it, its name there, entry) of all tensors."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _tensors(value, (*within, name))
        elif isinstance(value, ShardedTensor):
            yield within, name, value


def _at(state: dict, path: Any) -> dict:
    for name in path:
        state = state.setdefault(name, {})
    return state
