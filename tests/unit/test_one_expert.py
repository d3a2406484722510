"""One expert that every token goes to, with probability 1, is a dense MLP: the same result and gradients, bit for bit.

The dense MLP is stock's class with the level's linears, as a shared expert is. Fp8Mlp, which makes its activation in
FP8, rounds elsewhere.
"""

import functools
import re

import architecture
import pytest
import torch
from megatron.core.transformer.mlp import MLP

from megatron_fp8.layers.spec import _our_linears

ONE = "--disable-bias-linear --num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax --fp8-experts"
BALANCED = "--moe-router-load-balancing-type none"
KINDS = ["--swiglu", "--squared-relu", "", "--swiglu --moe-apply-probs-on-input"]
ROWS = [32, 7]  # a multiple of 16 or not; of one row alone a CPU's product sums in another order


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


@functools.cache
def pair(kind: str, gemm: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(a layer of one expert, a dense MLP of the same weights)"""
    flags = f"{ONE} {BALANCED} --fp8-gemm {gemm} {kind}"
    layer = architecture.build(flags.split(), level=True).decoder.layers[1].mlp.to(dtype)
    architecture.fill(layer)
    expert = layer.experts.local_experts[0]
    dense = MLP(layer.config, _our_linears(expert.linear_fc1.owned.config), tp_group=expert.tp_group).to(dtype)
    dense.load_state_dict(expert.state_dict())
    return layer, dense


def passed(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """(y, dx, dW of both linears)"""
    weights = architecture.attach(module)
    module.train()
    x = x.clone().requires_grad_()
    y, bias = module(x)
    assert bias is None
    y.backward(dy)
    return [y.detach(), x.grad, *(weight.sink.sum for weight in weights)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gemm", ["fp8", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit(kind, gemm, dtype, rows):
    layer, dense = pair(kind, gemm, dtype)
    x, dy = (torch.randn(rows, 1, layer.config.hidden_size).to(dtype) for _ in range(2))
    names = "y", "dx", "dW1", "dW2"
    expert, mlp = passed(layer, x, dy), passed(dense, x, dy)
    for name, a, b in zip(names, expert, mlp, strict=True):
        assert torch.equal(a, b), (name, (a - b).abs().max() / b.abs().max())
        assert a.abs().sum() > 0


def test_names_of_grouped_experts_are_read():
    """A plain state dict of Transformer Engine's grouped experts (--ckpt-format torch), and one of a level."""
    flags = "--disable-bias-linear --swiglu --num-experts 3 --fp8-experts --fp8-gemm fp8"
    model, other = (architecture.build(flags.split(), level=True) for _ in range(2))
    for parameter in other.parameters():
        parameter.data.normal_()
    held = {}
    for name, value in other.state_dict().items():
        new = re.sub(r"local_experts\.(\d)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
        held[new] = value
    assert sum("experts.linear_fc1.weight2" in name for name in held) == 2
    for state in held, other.state_dict():
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
