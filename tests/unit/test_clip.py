"""Stock's clip without copies (engine/clip.py): the same bits, in place."""

import pytest
import torch
from exact import same
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_scale

from megatron_fp8.engine.clip import scaled_in_place

ODD = [0.0, -0.0, 2.0**-149, 2.0**-126, -(2.0**127), torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("scale", [0.37, 1e-30, 2.0**-140])
def test_the_bits_are_stocks(scale):
    gradients = [torch.randn(n) * 10.0 ** torch.randint(-44, 38, (n,)) for n in (1, 3, 1000, 4097)]
    gradients[2][: len(ODD)] = torch.tensor(ODD)
    ours, stocks = ([g.clone() for g in gradients] for _ in range(2))
    places = [g.data_ptr() for g in ours]
    local_multi_tensor_scale(65536, None, [stocks, stocks], scale)
    scaled_in_place(local_multi_tensor_scale)(65536, None, [ours, ours], scale)
    assert all(same(a, b) for a, b in zip(ours, stocks, strict=True)) and not same(ours[3], gradients[3])
    assert [g.data_ptr() for g in ours] == places


def test_other_lists_are_left_to_stock_and_none_is_no_error():
    scale = scaled_in_place(local_multi_tensor_scale)
    src, dst = [torch.ones(3)], [torch.zeros(3)]
    scale(65536, None, [src, dst], 0.5)
    assert src[0].tolist() == [1.0] * 3 and dst[0].tolist() == [0.5] * 3
    none: list[torch.Tensor] = []
    scale(65536, None, [none, none], 0.5)


def test_stock_gives_one_list_twice(monkeypatch):
    """So it is that the scaling can be in place."""
    given = []
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", lambda chunk, flag, lists, scale: given.extend(lists))
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "type", lambda self: "torch.cuda.FloatTensor")
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: torch.ones(1))
    clip_grads.clip_grad_by_total_norm_fp32([param], 1.0, 9.0)
    assert given[0] is given[1] and given[0][0].data_ptr() == param.grad.data_ptr()
