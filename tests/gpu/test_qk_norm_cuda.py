"""ops.norm_rotate and ops.norm_rotate_backward on CUDA against reference_qk_norm.py on the CPU.

A result must lie between the roundings of v - e and v + e, as in test_norm_cuda.py: v is the reference's in float32,
and e a few units in the last place of float32 at the head's largest magnitude.
tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import math

import pytest
import torch
from test_norm_cuda import between, largest
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only, put, same
from test_qkv_cuda import on_device, put_all, tables

from megatron_fp8 import ops
from megatron_fp8.ops import reference_qk_norm

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
if INTERPRETED:
    from megatron_fp8.ops.triton.qk_norm import norm_rotate, norm_rotate_backward
else:
    norm_rotate, norm_rotate_backward = ops.norm_rotate, ops.norm_rotate_backward

EPS, UNITS = 1e-6, 4e-6  # e relative to the largest magnitude; float32's unit is 1.2e-7
# s, b, groups, query heads a group, size of a head, rotated numbers of a head
SHAPES = [
    pytest.param((7, 2, 2, 4, 128, 128), marks=pytest.mark.smoke),
    (5, 3, 2, 1, 64, 64),  # an odd number of rows
    (33, 1, 1, 1, 128, 128),
    (9, 2, 1, 3, 80, 80),
    (4, 3, 2, 2, 96, 48),
    (3, 3, 5, 1, 80, 20),  # more heads than a program takes, each rotated in part
    (2, 2, 1, 1, 16, 2),
    (1, 1, 2, 2, 24, 6),
    (5, 1, 1, 1, 256, 256),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def case(shape, dtype=torch.bfloat16, zero_centered=False):
    """(the QKV product's heads (s, b, groups, r + 2, hn), weight, cos, sin)."""
    s, b, groups, r, hn, d = shape
    heads = (3 * torch.randn(s, b, groups, r + 2, hn)).to(dtype)
    weight = (0.3 * torch.randn(hn) + (not zero_centered)).to(dtype)
    return heads, weight, *tables(s, d)


def check(heads, weight, cos, sin, dy=None, eps=EPS, **how) -> None:
    """q's and k's part of the product; dy: their gradient, None: random."""
    there, angles, gain = put(heads), put_all(cos, sin), put(weight)
    for part in (slice(0, -2), slice(-2, -1)):
        x, y = heads[..., part, :], heads[..., part, :].flatten(2, 3)
        exact = reference_qk_norm.norm_rotate(x.float(), weight, eps, cos, sin, **how)
        got = norm_rotate(there[..., part, :], gain, eps, *angles, **how)
        assert got.dtype == heads.dtype and got.is_contiguous()
        assert between(got, exact, UNITS * largest(exact.nan_to_num(), -1))
        gradient = torch.randn(y.shape).to(heads.dtype) if dy is None else dy
        dx, dweight = norm_rotate_backward(on_device(gradient), there[..., part, :], gain, eps, *angles, **how)
        right, sums = reference_qk_norm.norm_rotate_backward(
            gradient.float(), x.float(), weight.float(), eps, cos, sin, **how
        )
        rstd = (x.float().square().mean(-1) + eps).rsqrt().flatten(2, 3)[..., None]
        steepest = largest(gradient.float(), -1) * (weight.float().abs().max() + 1) * rstd * heads.shape[-1] ** 0.5
        assert dx.dtype == gradient.dtype and dx.is_contiguous() and between(dx, right, UNITS * steepest)
        terms = gradient.float().norm() * heads.shape[-1] ** 0.5
        assert dweight.dtype == weight.dtype and between(dweight, sums, UNITS * terms.expand_as(sums))


@shapes
@pairings
def test_agrees_with_the_reference(shape, interleaved):
    check(*case(shape), zero_centered=False, interleaved=interleaved)


@types
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
def test_any_type(dtype, zero_centered):
    check(*case((5, 3, 2, 2, 24, 12), dtype, zero_centered), zero_centered=zero_centered, interleaved=False)


def test_into_every_second_place():
    """A key with room for its value behind it, as context parallelism sends them."""
    s, b, groups, r, hn, d = 5, 2, 3, 2, 32, 32
    heads, weight, *angles = case((s, b, groups, r, hn, d))
    pairs = torch.full((s, b, groups, 2 * hn), 7.0, dtype=torch.bfloat16)
    there, how = put(pairs), {"zero_centered": False, "interleaved": False}
    place = there[..., :hn]
    keys = put(heads)[..., r : r + 1, :]
    got = norm_rotate(keys, put(weight), EPS, *put_all(*angles), **how, out=place)
    assert got.data_ptr() == there.data_ptr() and same(there[..., hn:], pairs[..., hn:])
    assert same(got.contiguous(), norm_rotate(keys, put(weight), EPS, *put_all(*angles), **how).cpu())


@pytest.mark.parametrize("layout", ["attention", "one number"])
def test_gradients_of_any_strides(layout):
    shape = (6, 2, 1, 3, 16, 16)
    dy = torch.randn(6, 2, 3, 16).bfloat16().permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    if layout == "one number":  # autograd's gradient of a sum has strides of zero
        dy = torch.ones((), dtype=torch.bfloat16).expand(6, 2, 3, 16)
    heads, weight, *angles = case(shape)
    x = heads[..., :3, :]
    how = {"zero_centered": False, "interleaved": True}
    there = put(heads)[..., :3, :], put(weight)
    strided = norm_rotate_backward(on_device(dy), *there, EPS, *put_all(*angles), **how)
    plain = norm_rotate_backward(put(dy.contiguous()), *there, EPS, *put_all(*angles), **how)
    assert all(same(one, other.cpu()) for one, other in zip(strided, plain, strict=True))
    right, _ = reference_qk_norm.norm_rotate_backward(dy, x, weight, EPS, *angles, **how)
    assert torch.allclose(strided[0].cpu().float(), right.float(), rtol=1e-2, atol=1e-3)


@pairings
@pytest.mark.parametrize("size", [0.0, 1e-30, 2.0**-130, 1e18], ids=str)
def test_heads_of_zeros_and_of_extreme_numbers(size, interleaved):
    heads, weight, *angles = case((5, 2, 2, 2, 32, 24))
    heads[1::2] *= size
    check(heads, weight, *angles, zero_centered=False, interleaved=interleaved)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_spoils_its_head_alone(bad):
    heads, weight, cos, sin = case((4, 2, 2, 2, 32, 32))
    heads[2, 1, 0, 1, 5] = bad
    there, how = put(heads)[..., :2, :], {"zero_centered": False, "interleaved": False}
    y = norm_rotate(there, put(weight), EPS, *put_all(cos, sin), **how).cpu()
    right = reference_qk_norm.norm_rotate(heads[..., :2, :], weight, EPS, cos, sin, **how)
    assert torch.equal(y.isnan(), right.isnan()) and y[2, 1, 1].isnan().any()
    y[2, 1, 1], right[2, 1, 1] = 0.0, 0.0
    assert torch.allclose(y.float(), right.float(), rtol=1e-2, atol=1e-2)
    gradient = torch.randn(y.shape).bfloat16()
    dx, dweight = norm_rotate_backward(put(gradient), there, put(weight), EPS, *put_all(cos, sin), **how)
    assert dweight.isnan().any() and dx[2, 1, 1].isnan().any() and dx.isnan().sum() <= 32


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen(bad):
    heads, weight, cos, sin = case((4, 2, 2, 2, 32, 32))
    gradient = torch.randn(4, 2, 4, 32).bfloat16()
    gradient[3, 0, 2, 7] = bad
    how = {"zero_centered": False, "interleaved": False}
    dx, dweight = norm_rotate_backward(
        put(gradient), put(heads)[..., :2, :], put(weight), EPS, *put_all(cos, sin), **how
    )
    assert not dweight.isfinite().all() and not dx[3, 0, 2].isfinite().all()
    assert dx.isfinite().sum() >= dx.numel() - 32


@on_gpu_only
@pytest.mark.parametrize("shape", [(4096, 2, 4, 8, 128, 128), (4096, 1, 8, 4, 128, 64)], ids=str)
def test_at_full_size_and_again(shape):
    """Like the reference on the same GPU, and fifty times the same bits."""
    s, b, groups, r, hn, d = shape
    heads = torch.randn(s, b, groups, r + 2, hn, dtype=torch.bfloat16, device=DEVICE)
    weight, angles = torch.rand(hn, dtype=torch.bfloat16, device=DEVICE) + 0.5, put_all(*tables(s, d))
    how = {"zero_centered": False, "interleaved": False}
    x, dy = heads[..., :r, :], torch.randn(s, b, groups * r, hn, dtype=torch.bfloat16, device=DEVICE)
    first = norm_rotate(x, weight, EPS, *angles, **how), *norm_rotate_backward(dy, x, weight, EPS, *angles, **how)
    right = (
        reference_qk_norm.norm_rotate(x, weight, EPS, *angles, **how),
        *reference_qk_norm.norm_rotate_backward(dy, x, weight, EPS, *angles, **how),
    )
    for got, wanted in zip(first, right, strict=True):
        assert torch.allclose(got.float(), wanted.float(), rtol=1e-2, atol=1e-2 * float(wanted.float().std()))
    for _ in range(50):
        again = norm_rotate(x, weight, EPS, *angles, **how), *norm_rotate_backward(dy, x, weight, EPS, *angles, **how)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@on_gpu_only
def test_offsets_past_2_31():
    s, b, groups, r, hn = 8192, 8, 64, 2, 144  # 2.4e9 elements
    heads = torch.randn(s, b, groups, r + 2, hn, dtype=torch.bfloat16, device=DEVICE)
    assert heads.numel() > 2**31
    weight, angles = torch.ones(hn, dtype=torch.bfloat16, device=DEVICE), put_all(*tables(s, hn))
    how = {"zero_centered": False, "interleaved": False}
    x, end = heads[..., :r, :], [t[-4:] for t in angles]
    y = norm_rotate(x, weight, EPS, *angles, **how)
    right = reference_qk_norm.norm_rotate(x[-4:], weight, EPS, *end, **how)
    assert torch.allclose(y[-4:].float(), right.float(), rtol=1e-2, atol=1e-2)
    dx, _ = norm_rotate_backward(y, x, weight, EPS, *angles, **how)
    right, _ = reference_qk_norm.norm_rotate_backward(y[-4:], x[-4:], weight, EPS, *end, **how)
    assert torch.allclose(dx[-4:].float(), right.float(), rtol=1e-2, atol=1e-2)
