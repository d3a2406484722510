"""state_dict() of a model with E4M3 weights returns and loads BF16 values, never codes."""

import pytest
import torch
from engine_parts import OneWeight

from megatron_fp8.errors import UserError
from megatron_fp8.layers.linear import _OwnedLinear
from megatron_fp8.numerics.formats import E4M3, E5M2

N, K = 32, 48


class Plain(torch.nn.Module):
    def __init__(self, one: OneWeight):
        super().__init__()
        self.weight, self.owned, self.one = one.weight.param, one.weight, one


class Linear(_OwnedLinear, Plain):
    """A linear with our additions to stock's, without the GEMM."""


def linear(group, storage: str, seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    return Linear(OneWeight((torch.randn(N, K) * 0.02).bfloat16(), group, storage=storage))


@pytest.mark.parametrize("storage", ["fp8", "bf16"])
def test_values_come_out(storage, group):
    ours = linear(group, storage)
    found = ours.state_dict(prefix="fc1.")["fc1.weight"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, ours.owned.dense())
    assert found.float().abs().max() < 0.2  # codes would be thousands of times as large
    kept = ours.state_dict(keep_vars=True)["weight"]  # as stock's sharded_state_dict calls it
    again = ours.state_dict(keep_vars=True)["weight"]
    assert torch.equal(kept, found) and torch.equal(again, found)
    assert {id(kept), id(again)} == {*map(id, ours.owned.in_model_state())}
    assert storage == "fp8" or kept is again is ours.weight
    del again
    assert [*map(id, ours.owned.in_model_state())] == [id(kept)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_go_in_and_their_masters(dtype, group):
    ours, other = linear(group, "fp8"), linear(group, "fp8", seed=1)
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(2)).to(dtype) * 0.02
    for each in (ours, other):
        each.load_state_dict({"weight": values})
    assert torch.equal(ours.state_dict()["weight"], other.state_dict()["weight"])
    assert (ours.state_dict()["weight"].float() - values).abs().max() < 2**-3 * 0.1
    masters = ours.one.bucket.masters()[: N * K].view(N, K)
    # FP32 values are kept to 19 bits; BF16 ones are dithered within half an ulp
    assert torch.allclose(masters, values.float(), rtol=2**-8 if dtype == torch.bfloat16 else 2**-18, atol=1e-8)


def test_what_came_out_of_one_model_goes_into_another(group):
    first, second = linear(group, "fp8"), linear(group, "fp8", seed=1)
    second.load_state_dict(first.state_dict())
    difference = (second.state_dict()["weight"].float() - first.state_dict()["weight"].float()).abs()
    assert not difference.any()  # masters are drawn, codes stay (numerics/dither.py)


@pytest.mark.parametrize("storage", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [E4M3.dtype, E5M2.dtype, torch.uint8])
def test_codes_are_refused(storage, dtype, group):
    ours = linear(group, storage)
    before = ours.owned.dense().clone()
    codes = torch.ones(N, K).to(dtype)
    with pytest.raises(UserError, match=r"weight: \w+ codes without their scale; load values in BF16 or FP32"):
        ours.load_state_dict({"weight": codes})
    assert torch.equal(ours.owned.dense(), before)
