"""TorchAttention on CUDA: cuDNN's kernel, and what takes its place under --deterministic-mode.

cuDNN's backward pass adds dq in the order in which its blocks come: the same input gives other last bits. torch does
not offer it where deterministic algorithms are asked for, and its flash kernel, which is next, adds in one order then.
"""

import math

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_fp8.layers.attention import TorchAttention

pytestmark = pytest.mark.gpu
SHAPES = [(2048, 4, 32, 32, 128), (4096, 2, 32, 8, 128), (1000, 3, 12, 12, 64)]  # s, b, heads, of K and V, hn
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def attention_of(shape):
    """(the layer, [q, k, v], the gradient of its output), fresh random data."""
    s, b, heads, groups, hn = shape
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")  # shown when the test fails
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * hn, num_attention_heads=heads, num_query_groups=groups, attention_dropout=0.0
    )
    layer = TorchAttention(config, 1, AttnMaskType.causal, "self")
    operands = [
        torch.randn(s, b, n, hn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, groups, groups)
    ]
    return layer, operands, torch.randn(s, b, heads * hn, device="cuda", dtype=torch.bfloat16)


def results(layer, operands, grad):
    """[out, dq, dk, dv]."""
    out = layer(*operands)
    return [out.detach(), *torch.autograd.grad(out, operands, grad)]


@pytest.fixture(params=[False, True], ids=["as it comes", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@shapes
def test_near_float64(shape, deterministic):
    """The first batch's first group of heads, output and gradients: within 4 units of BF16's last place in the mean."""
    s, _, heads, groups, hn = shape
    layer, operands, grad = attention_of(shape)
    together = heads // groups
    q, k, v = (
        t.detach()[:, 0, :n].double().transpose(0, 1).requires_grad_()
        for t, n in zip(operands, (together, 1, 1), strict=True)
    )
    future = torch.ones(s, s, dtype=torch.bool, device="cuda").triu(1)
    out = (q @ k.transpose(-1, -2) / math.sqrt(hn)).masked_fill(future, -math.inf).softmax(-1) @ v
    exact_grad = grad[:, 0].view(s, heads, hn)[:, :together].double().transpose(0, 1)
    exact = [out.detach(), *torch.autograd.grad(out, (q, k, v), exact_grad)]
    first, *grads = results(layer, operands, grad)
    got = [first.view(s, -1, heads, hn), *grads]
    for name, value, right in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
        error = (value[:, 0, : right.shape[0]].double().transpose(0, 1) - right).norm() / right.norm()
        assert error < 4 * 2**-9, (name, error.item())  # measured: 0.0020 to 0.0030


@shapes
@pytest.mark.parametrize("deterministic", [True], ids=["deterministic"], indirect=True)
def test_the_same_bits_again_beside_other_work(shape, deterministic):
    layer, operands, grad = attention_of(shape)
    beside, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first = results(layer, operands, grad)
    for repetition in range(30):
        with torch.cuda.stream(beside):
            for _ in range(repetition % 5):
                torch.mm(noise, noise)
        for name, again, before in zip(("out", "dq", "dk", "dv"), results(layer, operands, grad), first, strict=True):
            assert torch.equal(again, before), (name, repetition)
