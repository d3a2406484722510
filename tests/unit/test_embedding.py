"""The embedding's gradient: the reference against FP64, and the gradient that autograd gets in its place."""

import copy

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8 import ops
from megatron_fp8.gemm import fused_wgrad
from megatron_fp8.layers.embedding import Functional, add_to_main_grad
from megatron_fp8.layers.fp8_head import head_in_fp8
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.ops.reference_embedding import add_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference(dtype):
    into, rows, values = torch.randn(11, 6).to(dtype), torch.randint(-2, 13, (80,)), torch.randn(80, 6).bfloat16()
    expected = into.double()
    for row, value in zip(rows.tolist(), values.double(), strict=True):
        if 0 <= row < 11:
            expected[row] += value
    add_rows(into, rows, values)
    torch.testing.assert_close(into.double(), expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-5)


def _product(input, weight, **how):
    """A head's."""


class Model:
    """The parts of a GPTModel that add_to_main_grad reads."""

    def __init__(self, tied, fusion=True, head_fusion=True):
        weight = torch.nn.Parameter(torch.randn(7, 4).bfloat16())
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(7, 4), False
        weight.zero_out_wgrad = tied
        self.weight, self.pre_process, self.post_process = weight, True, True
        self.share_embeddings_and_output_weights = tied
        self.config = type("Config", (), {"gradient_accumulation_fusion": fusion})
        group = type("Group", (), {"size": lambda self: 1})()
        self.positions = torch.nn.Embedding(3, 4).bfloat16()
        self.positions.weight.main_grad = torch.zeros(3, 4)
        parts = {"word_embeddings": self, "position_embeddings": self.positions, "tp_group": group}
        self.embedding = type("Embedding", (), parts)
        self.output_layer = type("Head", (), {"gradient_accumulation_fusion": head_fusion, "_forward_impl": _product})
        add_to_main_grad(self)


def backward(model) -> None:
    tokens = torch.tensor([[1, 1, 6]])
    Functional().embedding(tokens, model.weight).float().sum().backward()


def test_tokens_and_positions_as_megatron_transposes_them():
    """(b, s, h) transposed to (s, b, h): torch's values and gradients, without a copy in between."""
    model = Model(False)
    tokens, places = torch.randint(0, 7, (2, 3)), torch.arange(3).expand(2, 3)
    tables = [table.detach().float().requires_grad_() for table in (model.weight, model.positions.weight)]
    expected = (torch.nn.functional.embedding(tokens, tables[0]) + tables[1][places]).transpose(0, 1)
    y = (Functional().embedding(tokens, model.weight) + model.positions(places)).transpose(0, 1)
    assert y.is_contiguous() and torch.allclose(y.float(), expected, atol=2e-2)
    dy = torch.randn(y.shape).bfloat16()
    y.backward(dy)
    expected.backward(dy.float())
    for weight, table in zip((model.weight, model.positions.weight), tables, strict=True):
        assert weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad, table.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_gets_the_gradient_and_autograd_a_placeholder(tied):
    model = Model(tied)
    backward(model)
    backward(model)
    expected = torch.zeros(7, 4)
    expected[1], expected[6] = 4, 2
    assert torch.equal(model.weight.main_grad, expected) and model.weight.grad_added_to_main_grad
    assert model.weight.grad is not None and not model.weight.zero_out_wgrad


class Allocations(TorchDispatchMode):
    """Records operations that allocate a BF16 tensor of a table's shape."""

    def __init__(self, shape, log):
        super().__init__()
        self.shape, self.log = shape, log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = isinstance(out, torch.Tensor) and out.shape == self.shape and out.dtype == torch.bfloat16
        made = made and out.layout == torch.strided
        if made and ("empty" in str(func) or "zeros" in str(func)):
            self.log.append("allocated")
        return out


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_autograd_keeps_no_gradient_of_a_head(tied, fp8, monkeypatch):
    """Autograd's gradient for W takes no memory."""
    model = Model(tied)
    n, k, log = 32, 16, []
    weight = model.weight
    weight.data, weight.main_grad = torch.randn(n, k).bfloat16(), torch.zeros(n, k)
    head = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(head)
    head.gradient_accumulation_fusion = True
    if fp8:
        head_in_fp8(head, E4M3)
    model.output_layer = head
    add_to_main_grad(model)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", fused_wgrad.MODULE, raising=False)

    def add(main_grad, rows, values):
        log.append("embedding")
        add_rows(main_grad, rows, values)

    monkeypatch.setattr(ops, "add_rows", add)
    tokens = torch.randint(0, n, (1, 5))
    x = Functional().embedding(tokens, weight).transpose(0, 1)
    how = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
    y = head._forward_impl(input=x, weight=weight, gradient_accumulation_fusion=True, **how)
    dy = torch.randn(y.shape).bfloat16()
    with Allocations(weight.shape, log):
        y.backward(dy)
    assert weight.grad is not None and weight.grad_added_to_main_grad
    assert log == ["embedding"]
    values, table = weight.detach().float(), torch.zeros(n, k)
    table.index_add_(0, tokens[0], dy[:, 0].float() @ values)
    expected = table + dy[:, 0].float().T @ values[tokens[0]]
    assert (weight.main_grad - expected).norm() / expected.norm() < (0.08 if fp8 else 0.01)


@pytest.mark.parametrize("how", [{"tied": False, "fusion": False}, {"tied": True, "head_fusion": False}])
def test_when_autograd_keeps_the_gradient(how):
    model = Model(**how)
    backward(model)
    assert model.weight.grad[1, 0] == 2 and not model.weight.main_grad.any()
    assert model.weight.zero_out_wgrad == how["tied"]


def test_a_deep_copy_reads_its_own_positions():
    copied = copy.deepcopy(Model(False).positions)
    with torch.no_grad():
        copied.weight.fill_(3)
    assert (copied(torch.tensor([1])) == 3).all()


def test_everything_else_is_torchs():
    assert Functional().gelu is torch.nn.functional.gelu
