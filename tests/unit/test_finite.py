"""What is not finite is not saved: it would count as progress, and a run that goes on from it skips every step."""

import math

import pytest
import torch
from small_checkpoints import load, one_rank, save

from megatron_fp8.checkpoint.finite import first_not_finite

__all__ = ["load", "one_rank"]
STATES = ("param", "fp32_param", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["decoder.linear_fc1.weight", *(f"optimizer.state.{name}.weight" for name in STATES)])
def test_a_save_of_it_ends_the_run(load, tmp_path, key, bad):
    tensor = torch.randn(3, 1000, dtype=torch.bfloat16 if "decoder" in key else torch.float32)
    save(tmp_path, 5, more={key: tensor})
    tensor[1, 357] = bad
    why = f"iter_0000010 is not saved: {key} is not finite, and no later step would mend that"
    last = "start again, from iter_0000005, and if it comes again lower --lr"
    with pytest.raises(ValueError, match=f"^--save {tmp_path}: {why}; {last}$"):
        save(tmp_path, 10, more={key: tensor})
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000005"] and load(tmp_path) == 5


def test_what_may_be_infinite(load, tmp_path):
    """A buffer of the model's, and the amaxes of a step that was skipped."""
    bad = torch.full((4,), -math.inf)
    save(tmp_path, 5, more={"decoder.mask": bad, "optimizer.fp8_scaling.0": bad, "numbers.weight": torch.ones(2).int()})
    assert load(tmp_path) == 5


def test_without_any(tmp_path):
    assert first_not_finite({"args": {"weight": math.nan}, "empty": torch.empty(0)}) == ""
