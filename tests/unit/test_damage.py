"""What a set of weights tells of the step before: whether it wrote something that is not finite."""

import math
from types import SimpleNamespace

import pytest
import torch
from engine_parts import Known, OneWeight, parts_of

from megatron_fp8.engine.weight_set import WeightSet
from megatron_fp8.ops.adam import AdamHyper

N, K = 16, 48
ONE = torch.tensor(1.0)


def step(owned: WeightSet, number: int) -> None:
    (bucket,) = owned.buckets
    bucket.begin_step(number - 1)
    bucket.weights[0].take_gradient(Known(torch.randn(N, K) * 1e-3))
    bucket.launch()
    bucket.land()
    if owned.weight_scaling is not None:
        owned.weight_scaling.begin_step(1e-2)
    bucket.step(AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, number), ONE)
    if owned.weight_scaling is not None:
        owned.weight_scaling.end_step()


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damage_is_seen_after_the_step_that_wrote_it(value, state, storage, group):
    bucket = OneWeight(torch.randn(N, K).bfloat16(), group, storage=storage).bucket
    reducer = SimpleNamespace(buckets=[bucket])
    owned = WeightSet(bucket.parts, [reducer], [], [])
    for number in (1, 2):
        assert owned.damage() == 0
        step(owned, number)
    assert owned.damage() == 0
    if state == "weight":  # its master: of E4M3 the codes, which have NaN only
        payload = bucket.weight.view(torch.uint8) if storage == "fp8" else bucket.master
    else:
        payload = getattr(bucket, state)
    payload[7] = 0x7F if payload.dtype == torch.uint8 else value
    assert owned.damage() == 0  # nothing was written yet
    step(owned, 3)
    assert owned.damage().isnan()


def test_a_set_without_weights(group):
    assert WeightSet(parts_of(group, None), [], [], []).damage() == 0
