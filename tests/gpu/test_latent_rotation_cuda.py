"""Megatron's Triton kernels for latent attention's rotation, in tiles of one size, against its torch functions.

They are Megatron's own code, which levels run without Transformer Engine. So the oracle is what Megatron computes with
--no-rope-fusion. tests/unit/test_triton_interpreter.py runs this file without a GPU too, but for BF16: the kernels
multiply it as it is, and the interpreter then multiplies its bits.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import hooks
from megatron_fp8.rebind import Rebound

pytestmark = [pytest.mark.usefixtures("fresh_random_data"), *([] if INTERPRETED else [pytest.mark.gpu])]
ROWS = [row for row in hooks.RUN if row.owner == hooks.LATENT_ROTATION]
RUN = SimpleNamespace(fp8=object(), on_cpu=False, args=SimpleNamespace(multi_latent_attention=True))
HALF = torch.float16 if INTERPRETED else torch.bfloat16
# s, b, heads, numbers of a head that are not rotated, rotated ones, a value's
SHAPES = [(5, 2, 16, 128, 64, 128), (3, 1, 4, 16, 16, 32), (2, 3, 12, 32, 8, 16)]


@pytest.fixture(autouse=True)
def tiles_of_one_size():
    rebound = Rebound()
    rebound.put(ROWS, RUN)
    assert len(ROWS) == 4 and len(rebound) == 4
    yield
    rebound.put_back()


def case(shape, dtype):
    s, b, n, d, turned, dv = shape
    angles = 100 * torch.randn(s, 1, 1, turned // 2)
    angles = torch.cat([angles, angles], -1)
    sizes = (s, b, n, d + turned), (s, b, n, d + dv), (s, b, 1, turned)
    made = [torch.randn(size).to(dtype).to(DEVICE).requires_grad_() for size in sizes]
    return made, angles.to(DEVICE)


def torchs(q, kv, key, angles, d, dv):
    """As MLASelfAttention.get_query_key_value_tensors without fusion."""
    turned = [_apply_rotary_pos_emb_bshd(t, angles, False, mla_rotary_interleaved=True) for t in (q[..., d:], key)]
    k, v = kv.split([d, dv], -1)
    return (
        torch.cat([q[..., :d], turned[0]], -1),
        torch.cat([k, turned[1].expand(-1, -1, q.shape[2], -1)], -1),
        v,
    )


def kernels(q, kv, key, angles, d, dv):
    cos, sin = (t.to(q.dtype).contiguous() for t in (angles.cos(), angles.sin()))
    turned = angles.shape[-1]
    query = fused.fused_apply_mla_rope_for_q(q * 1, cos, sin, d, turned)  # it is rotated where it lies
    return query, *fused.fused_apply_mla_rope_for_kv(kv, key, cos, sin, turned, d, dv)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_torchs(shape, dtype):
    inputs, angles = case(shape, dtype)
    sizes = shape[3], shape[5]
    expected, got = torchs(*inputs, angles, *sizes), kernels(*inputs, angles, *sizes)
    gradients = [torch.randn_like(t) for t in expected]
    right = torch.autograd.grad(expected, inputs, gradients)
    found = torch.autograd.grad(got, inputs, [g.clone() for g in gradients])
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip((*got, *found), (*expected, *right), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        largest = float(other.detach().abs().max())
        assert torch.allclose(one.float(), other.float(), rtol=bound, atol=bound * largest / 4)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(bad):
    (q, kv, key), angles = case(SHAPES[1], HALF)
    with torch.no_grad():
        q[1, 0, 2, -3], key[2, 0, 0, 1] = bad, bad
    query, k, _ = kernels(q, kv, key, angles, 16, 32)
    assert not query[1, 0, 2].isfinite().all() and query.isfinite().sum() >= query.numel() - 2
    assert not k[2, 0].isfinite().all() and k[:2].isfinite().all()


@on_gpu_only
def test_again_the_same_bits():
    inputs, angles = case((1024, 2, 16, 128, 64, 128), torch.bfloat16)
    made = kernels(*inputs, angles, 128, 128)
    gradients = [torch.randn_like(t) for t in made]
    first = torch.autograd.grad(made, inputs, [g.clone() for g in gradients])
    for _ in range(20):
        again = torch.autograd.grad(kernels(*inputs, angles, 128, 128), inputs, [g.clone() for g in gradients])
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
