"""The gradient of a table: the oracle against FP64, the kernels through the interpreter, and what autograd is given."""

import os
import subprocess
import sys

import pytest
import torch
from launch import ROOT

from megatron_fp8.layers.embedding import Functional, add_to_main_grad
from megatron_fp8.ops.reference_embedding import add_rows

RUN = """
import importlib, torch
from megatron_fp8.ops import reference_embedding
kernels = importlib.import_module("megatron_fp8.ops.triton.embedding")
def check(rows, V, K):
    into, values = torch.randn(V, K), torch.randn(len(rows), K).bfloat16()
    expected = into.clone()
    reference_embedding.add_rows(expected, rows, values)
    kernels.add_rows(into, rows, values)
    torch.testing.assert_close(into, expected, rtol=1e-6, atol=1e-5)
for n, V, K in ((1, 5, 16), (31, 7, 16), (32, 7, 20), (33, 3, 16), (100, 9, 520)):
    check(torch.randint(0, V, (n,)), V, K)
for n in (32, 63, 64, 65, 160):
    check(torch.zeros(n, dtype=torch.int64), 2, 8)      # one run over all chunks
check(torch.arange(128) // 32, 4, 8)                    # runs that are chunks
check((torch.arange(128) + 16) // 32, 5, 8)             # runs over the borders
check(torch.randint(-3, 8, (90,)), 5, 8)                # rows that are not there
print("equal")
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_oracle(dtype):
    into, rows, values = torch.randn(11, 6).to(dtype), torch.randint(-2, 13, (80,)), torch.randn(80, 6).bfloat16()
    expected = into.double()
    for row, value in zip(rows.tolist(), values.double(), strict=True):
        if 0 <= row < 11:
            expected[row] += value
    add_rows(into, rows, values)
    torch.testing.assert_close(into.double(), expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-5)


def test_the_kernels():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "equal\n", done.stderr[-3000:]


class Model:
    """What add_to_main_grad looks at of a GPTModel."""

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
        self.output_layer = type("Head", (), {"gradient_accumulation_fusion": head_fusion})
        add_to_main_grad(self)


def backward(model) -> None:
    tokens = torch.tensor([[1, 1, 6]])
    Functional().embedding(tokens, model.weight).float().sum().backward()


def test_tokens_and_positions_as_megatron_turns_them():
    """(b, s, h) turned into (s, b, h): the same values and gradients as torch's, and no copy in between."""
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
def test_main_grad_gets_it_and_autograd_a_stand_in(tied):
    model = Model(tied)
    backward(model)
    backward(model)
    expected = torch.zeros(7, 4)
    expected[1], expected[6] = 4, 2
    assert torch.equal(model.weight.main_grad, expected) and model.weight.grad_added_to_main_grad
    assert (model.weight.grad is None) == tied and not model.weight.zero_out_wgrad


@pytest.mark.parametrize("how", [{"tied": False, "fusion": False}, {"tied": True, "head_fusion": False}])
def test_where_it_stays_autograds(how):
    model = Model(**how)
    backward(model)
    assert model.weight.grad[1, 0] == 2 and not model.weight.main_grad.any()
    assert model.weight.zero_out_wgrad == how["tied"]


def test_all_else_is_torchs():
    assert Functional().gelu is torch.nn.functional.gelu
