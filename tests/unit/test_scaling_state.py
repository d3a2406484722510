"""Delayed scaling's history and scales in a checkpoint that Megatron writes and reads."""

from types import SimpleNamespace

import pytest
import torch
from small_checkpoints import one_rank

from megatron_fp8.checkpoint.state import load_scaling_state, sharded_scaling_state
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

__all__ = ["one_rank"]


def linears(history_len: int):
    """(the scaling of two linears, stand-ins for their weights)."""
    scaling = DelayedScaling([E4M3, E5M2] * 2, history_len, "max", 0, "cpu")
    casts = [SimpleNamespace(scaling=scaling, slots=slots) for slots in ((0, 1), (2, 3))]
    of = SimpleNamespace(replica=(0, 0, 0))
    return scaling, [SimpleNamespace(key=f"linear_{i}", casts=one, of=of) for i, one in enumerate(casts)]


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("warm", [True, False])
def test_a_history_of_another_length_keeps_its_newest_rows(one_rank, tmp_path, length, warm):
    from megatron.core import dist_checkpointing

    saved, weights = linears(3)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for amax in (1.0, 7.0, 14.0, 28.0):
        saved.amax.copy_(amax * factors)
        saved.update()
    dist_checkpointing.save(sharded_scaling_state(weights, is_loading=False), str(tmp_path))

    resumed, weights = linears(length)
    state = dist_checkpointing.load(sharded_scaling_state(weights, is_loading=True), str(tmp_path))
    load_scaling_state(resumed, weights, state, warm)
    newest = [28.0, 14.0, 7.0, 0.0, 0.0][:length]
    assert resumed.amax_history.tolist() == [[amax * factor for factor in factors.tolist()] for amax in newest]
    assert resumed.scale.tolist() == saved.scale.tolist() == [16.0, 1024.0, 4.0, 256.0]
    assert resumed.warm is warm and not resumed.amax.any()
