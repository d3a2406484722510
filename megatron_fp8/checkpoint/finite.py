"""A checkpoint whose weights or states are not finite is no progress: a run that goes on from it skips every step.

Looked at before anything is written, so that the checkpoint before it stays the last one.  The least and the largest
value of a tensor say whether any is infinite or NaN, in one pass without a copy: 3 GB/s on one core of a busy CPU where
the state is on the host, a few milliseconds where it is on a GPU.  Of 12 bytes a parameter that is a fraction of the
hashing (1.6 GB/s).  The bytes of --fp8-ckpt-compact are no numbers; the weights beside them show a NaN one step later.
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from ..errors import PassingError
from ..ranks import gathered

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_finite(state: dict, folder: Path, last: Callable[[], str]) -> None:
    """PassingError in one line, the same on all ranks, before a checkpoint is written; collective.

    last: says from where another run goes on; collective.
    """
    found = list(filter(None, gathered(first_not_finite(state))))
    if found:
        with contextlib.suppress(OSError):
            folder.rmdir()  # Megatron made it; with a checkpoint in it, it stays
        why = f"{folder.name} is not saved: {found[0]} is not finite, and no later step would mend that"
        raise PassingError(f"--save {folder.parent}: {why}; start again, {last()}, and if it comes again lower --lr")


def first_not_finite(state: Any) -> str:
    """The key of this rank's first weight or optimizer state with an infinity or a NaN in it; empty without one.

    A model's buffers may hold infinities for a reason, a mask's say.
    """
    for entry in nested_values(state):
        is_one = isinstance(entry, ShardedTensor | ShardedTensorFactory) and _is_learned(entry.key)
        if is_one and not _is_finite(entry.data):
            return entry.key
    return ""


def _is_finite(data: torch.Tensor | None) -> bool:
    if data is None or data.dtype not in _NUMBERS or not data.numel():
        return True
    return all(map(math.isfinite, torch.stack(torch.aminmax(data.detach())).tolist()))  # both are NaN if any is


def _is_learned(key: str) -> bool:
    if key.startswith("optimizer."):
        return key.startswith("optimizer.state.")
    return key.endswith(("weight", "bias"))
