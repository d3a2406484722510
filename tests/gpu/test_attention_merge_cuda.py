"""The kernel that merges attention over two sets of keys, against FP64.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import ops
from megatron_fp8.ops.reference_attention import merge_attention as plain

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.attention import merge_attention
else:
    merge_attention = ops.merge_attention

SHAPES = [  # s, rows of the part, b, h, d
    (64, 64, 1, 2, 16),
    (70, 35, 2, 3, 24),
    pytest.param((33, 1, 1, 1, 128), marks=pytest.mark.smoke),
    pytest.param((4096, 2048, 2, 32, 128), marks=on_gpu_only),
    pytest.param((16384, 16384, 1, 32, 128), marks=on_gpu_only),
]
TYPES = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32),
         (torch.float32, torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("seen_as", ["contiguous", "by heads", "by widths"])
@pytest.mark.parametrize(("of_out", "dtype"), TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("merge", [merge_attention, plain], ids=["kernel", "reference"])
def test_merged(merge, shape, of_out, dtype, seen_as):
    s, rows, b, h, d = shape
    first = s - rows

    def made(length, dtype):
        order = {"contiguous": (0, 1, 2, 3), "by heads": (2, 0, 1, 3), "by widths": (0, 1, 3, 2)}[seen_as]
        sizes = [(b, h, length, d), (length, b, h, d), (length, b, d, h)][(seen_as != "by heads") + (order[3] == 2)]
        t = torch.randn(sizes, device=DEVICE).to(dtype)
        return t.permute(order)

    out, part = made(s, of_out), made(rows, torch.bfloat16)
    assert out.shape == (s, b, h, d) and part.shape == (rows, b, h, d)
    lse, of_part = (10 * torch.randn(b, h, n, device=DEVICE) for n in (s, rows))
    of_part[..., -1] += 300  # exp of the difference alone is infinite
    whole = torch.logaddexp(lse.double()[..., first:], of_part.double())
    old, new = ((x.double() - whole).exp().permute(2, 0, 1)[..., None] for x in (lse[..., first:], of_part))
    expected = out.double()
    expected[first:] = expected[first:] * old + part.double() * new
    keeps = out.dtype == dtype and out.is_contiguous()
    held = out.data_ptr()
    merged = merge(out, lse, part, of_part, dtype)
    assert merged.dtype == dtype and merged.is_contiguous() and (merged.data_ptr() == held) == keeps
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(merged.double(), expected, rtol=tolerance, atol=tolerance / 10)
    torch.testing.assert_close(lse[..., first:].double(), whole, rtol=1e-6, atol=1e-5)
