"""The kernels of an embedding table's gradient: against the reference, and the same bits each time.

tests/unit/test_triton_interpreter.py runs this file without a GPU too, through Triton's interpreter.
"""

import pytest
import torch
from test_ops_cuda import DEVICE, INTERPRETED, on_gpu_only

from megatron_fp8 import ops
from megatron_fp8.ops import reference_embedding

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if INTERPRETED:
    from megatron_fp8.ops.triton.embedding import add_rows
else:
    add_rows = ops.add_rows

# A chunk has 32 tokens. Sizes around multiples of it; runs of one token, of whole chunks, and across chunks.
TOKENS = {
    "any": lambda n, vocabulary: torch.randint(0, vocabulary, (n,)),
    "few": lambda n, vocabulary: torch.randint(0, 3, (n,)),
    "one": lambda n, vocabulary: torch.zeros(n, dtype=torch.int64),
    "chunks": lambda n, vocabulary: torch.arange(n) // 32 % vocabulary,
    "borders": lambda n, vocabulary: (torch.arange(n) + 16) // 32 % vocabulary,
    "strangers": lambda n, vocabulary: torch.randint(-3, vocabulary + 3, (n,)),
}
# (kind, n, vocabulary, k, dtype)
CASES = [("any", *size, torch.float32) for size in [(1, 3, 16), (31, 7, 16), (32, 7, 20), (33, 7, 520)]]
CASES += [("one", n, 2, 8, torch.float32) for n in (32, 63, 64, 65)]
CASES += [(kind, 130, 5, 8, torch.float32) for kind in TOKENS]
CASES += [("few", 130, 5, 8, torch.bfloat16), pytest.param("any", 33, 7, 520, torch.bfloat16, marks=pytest.mark.smoke)]
CASES += [
    pytest.param(kind, *size, dtype, marks=on_gpu_only)
    for kind in TOKENS
    for size in [(8192, 50304, 4096), (4097, 1000, 768)]
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("kind", "n", "vocabulary", "k", "dtype"), CASES, ids=str)
def test_against_the_reference(kind, n, vocabulary, k, dtype):
    into, values = torch.randn(vocabulary, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).bfloat16()
    rows = TOKENS[kind](n, vocabulary).to(DEVICE)
    expected = into.double()
    present = (rows >= 0) & (rows < vocabulary)
    expected.index_add_(0, rows[present], values[present].double())
    again = into.clone()
    add_rows(into, rows, values)
    rtol, atol = 1e-5 if dtype == torch.float32 else 1 / 256, 1e-5 if n < 1000 else 1e-3
    torch.testing.assert_close(into.double(), expected, rtol=rtol, atol=atol)
    if INTERPRETED:
        return
    add_rows(again, rows, values)
    assert torch.equal(into, again)
    if n < 5000 and vocabulary < 5000:
        cpu = torch.zeros(vocabulary, k)
        reference_embedding.add_rows(cpu, rows.cpu(), values.cpu())
        fresh = torch.zeros(vocabulary, k, device=DEVICE)
        add_rows(fresh, rows, values)
        torch.testing.assert_close(fresh.cpu(), cpu, rtol=1e-5, atol=1e-4)
