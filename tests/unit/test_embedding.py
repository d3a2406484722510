"""The gradient of a table: the oracle against FP64, and what autograd is given."""

import pytest
import torch

from megatron_fp8.layers.embedding import Functional, add_to_main_grad
from megatron_fp8.ops.reference_embedding import add_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_oracle(dtype):
    into, rows, values = torch.randn(11, 6).to(dtype), torch.randint(-2, 13, (80,)), torch.randn(80, 6).bfloat16()
    expected = into.double()
    for row, value in zip(rows.tolist(), values.double(), strict=True):
        if 0 <= row < 11:
            expected[row] += value
    add_rows(into, rows, values)
    torch.testing.assert_close(into.double(), expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-5)


class Model:
    """What add_to_main_grad looks at of a GPTModel."""

    def __init__(self, tied, fusion=True, head_fusion=True):
        weight = torch.nn.Parameter(torch.randn(7, 4).bfloat16())
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(7, 4), False
        weight.zero_out_wgrad = tied
        self.weight, self.pre_process, self.post_process = weight, True, True
        self.share_embeddings_and_output_weights = tied
        self.config = type("Config", (), {"gradient_accumulation_fusion": fusion})
        self.embedding = type("Embedding", (), {"word_embeddings": self})
        self.output_layer = type("Head", (), {"gradient_accumulation_fusion": head_fusion})
        add_to_main_grad(self)


def backward(model) -> None:
    tokens = torch.tensor([[1, 1, 6]])
    Functional().embedding(tokens, model.weight).float().sum().backward()


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
