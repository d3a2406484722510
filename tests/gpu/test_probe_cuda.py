"""The probe's products and counts on a GPU are those of the CPU, up to the order of the sums."""

import pytest
import torch

from megatron_fp8.monitor.probe import compare, count_emulated, power_sums
from megatron_fp8.numerics.emulation import EmulatedFormat, emulate
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.ops import reference

pytestmark = pytest.mark.gpu


def cast(x, fmt):
    scale = compute_scale(reference.amax(x), fmt)
    return ScaledTensor(reference.quantize(x, fmt, scale), scale.reciprocal())


def to(operand, device):
    if isinstance(operand, ScaledTensor):
        return ScaledTensor(operand.payload.to(device), operand.scale_inv.to(device))
    return operand.to(device)


@pytest.mark.parametrize("shape", [(16, 16, 16), pytest.param((1040, 528, 272), marks=pytest.mark.smoke)])
def test_products(shape):
    m, k, n = shape
    dy, x = torch.randn(k, m).mul(1e-6).bfloat16(), torch.randn(k, n).mul(2).exp().bfloat16()
    q, r = cast(dy, E5M2), cast(x, E4M3)
    for read in ((ScaledTensor(q.payload.t(), q.scale_inv), r), (dy.t(), r)):  # a view that is transposed, as wgrad's
        expected = compare(read, (dy.t(), x))
        found = compare(tuple(to(o, "cuda") for o in read), (dy.cuda().t(), x.cuda()))
        assert found.is_cuda and found.cpu().tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_counts_and_moments():
    x = torch.randn(333, 65).mul(12).exp().bfloat16()
    how = EmulatedFormat.parse("E5M2")
    read, counts, on_gpu = emulate(x, how), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64).cuda()
    count_emulated(x, read, how, counts)
    count_emulated(x.cuda(), read.cuda(), how, on_gpu)
    assert on_gpu.tolist() == counts.tolist() and counts[1] > 0 < counts[2]
    assert power_sums(x.cuda()).tolist() == pytest.approx(power_sums(x).tolist(), rel=1e-9)
