"""ops.split_qkv and ops.join_qkv against Megatron's unfused rotary embedding and autograd."""

import pytest
import torch

from megatron_fp8 import ops
from megatron_fp8.layers.context_parallel import _side_by_side
from megatron_fp8.numerics.formats import E4M3, E5M2

# s, b, groups, query heads a group, size of a head, rotated numbers of a head
SHAPES = [(6, 2, 3, 1, 16, 16), (5, 3, 2, 4, 16, 8), (4, 1, 1, 2, 80, 80), (3, 2, 2, 1, 24, 6), (4, 2, 2, 3, 8, 0)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def stocks(mixed, groups, r, frequencies, interleaved):
    """The computation of SelfAttention.get_query_key_value_tensors and Attention.forward."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    s, b, width = mixed.shape
    hn = width // (groups * (r + 2))
    q, k, v = mixed.view(s, b, groups, -1).split([r * hn, hn, hn], dim=3)
    q = q.reshape(s, b, -1, hn)
    if frequencies is None:
        return q, k, v
    return *(_apply_rotary_pos_emb_bshd(t, frequencies, interleaved) for t in (q, k)), v


def case(shape, dtype=torch.float32):
    s, b, groups, r, hn, d = shape
    mixed = torch.randn(s, b, groups * (r + 2) * hn).to(dtype)
    frequencies = 100 * torch.randn(s, 1, 1, d) if d else None
    tables = (frequencies[:, 0, 0].cos(), frequencies[:, 0, 0].sin()) if d else (None, None)
    return mixed, frequencies, tables


@shapes
@pairings
def test_in_float32_all_bits_are_stocks(shape, interleaved):
    s, b, groups, r, _, _ = shape
    mixed, frequencies, tables = case(shape)
    mixed.requires_grad_()
    expected = stocks(mixed, groups, r, frequencies, interleaved)
    grads = [torch.randn_like(t) for t in expected]
    (gradient,) = torch.autograd.grad(expected, mixed, grads)
    got = ops.split_qkv(mixed.detach().clone(), groups, r, *tables, interleaved=interleaved)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(ops.join_qkv(*grads, *tables, interleaved=interleaved), gradient.view(s * b, -1))


@shapes
@pairings
def test_in_bf16_only_the_result_is_rounded(shape, interleaved):
    _, _, groups, r, _, _ = shape
    mixed, _, tables = case(shape, torch.bfloat16)
    exact = ops.split_qkv(mixed.float(), groups, r, *tables, interleaved=interleaved)
    got = ops.split_qkv(mixed.clone(), groups, r, *tables, interleaved=interleaved)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(got, exact, strict=True))
    back = ops.join_qkv(*got, *tables, interleaved=interleaved)
    exact_back = ops.join_qkv(*(t.float() for t in got), *tables, interleaved=interleaved)
    assert torch.equal(back, exact_back.bfloat16())


@pytest.mark.parametrize(("groups", "r", "in_place"), [(2, 1, True), (1, 3, True), (2, 2, False)])
def test_memory_is_that_of_the_product_or_new(groups, r, in_place):
    mixed, _, tables = case((4, 2, groups, r, 16, 8))
    before, memory = mixed.clone(), mixed.untyped_storage().data_ptr()
    for table in ((None, None), tables):
        assert torch.equal(mixed, before)
        parts = ops.split_qkv(mixed, groups, r, *table)
        assert [t.untyped_storage().data_ptr() == memory for t in parts] == [in_place] * 3
    assert torch.equal(mixed, before) != in_place


@pytest.mark.parametrize(("groups", "r"), [(2, 1), (1, 3), (3, 2)])
def test_each_value_is_behind_its_key_if_wanted(groups, r):
    """One view is then both, side by side: what context parallelism sends."""
    mixed, _, tables = case((4, 2, groups, r, 16, 8))
    plain = ops.split_qkv(mixed.clone(), groups, r, *tables)
    paired = ops.split_qkv(mixed.clone(), groups, r, *tables, paired=True)
    assert all(torch.equal(one, other) for one, other in zip(paired, plain, strict=True))
    pairs = _side_by_side(*paired[1:])
    assert pairs.data_ptr() == paired[1].data_ptr() and torch.equal(pairs, torch.cat(plain[1:], -1))
    apart = _side_by_side(*plain[1:])
    assert torch.equal(apart, pairs) and (apart.data_ptr() == plain[1].data_ptr()) == (1 in (groups, r))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_the_fp8_gradient_is_a_cast_of_the_float32_one(fmt, rows, columns):
    mixed, _, tables = case((5, 3, 2, 2, 16, 8), torch.bfloat16)
    grads = ops.split_qkv(mixed, 2, 2, *tables)
    exact = ops.join_qkv(*(t.float() for t in grads), *tables)
    scale, largest = torch.tensor(fmt.max / 3), torch.tensor(0.0)
    payload, payload_t = ops.quantize(exact, fmt, scale, transpose=True)
    got = ops.join_qkv(*grads, *tables, fmt=fmt, scale=scale, rows=rows, columns=columns, amax_out=largest)
    for wanted, one, other in zip((rows, columns), got, (payload, payload_t), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if wanted else one is None
    assert largest == exact.abs().max()
