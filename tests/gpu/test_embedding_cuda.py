"""The kernels of a table's gradient: against the oracle, and the same bits each time."""

import pytest
import torch

from megatron_fp8 import ops
from megatron_fp8.ops import reference_embedding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def tokens(kind: str, n: int, vocabulary: int) -> torch.Tensor:
    if kind == "one":
        return torch.zeros(n, dtype=torch.int64, device="cuda")
    if kind == "few":
        return torch.randint(0, 3, (n,), device="cuda")
    if kind == "strangers":
        return torch.randint(-9, vocabulary + 9, (n,), device="cuda")
    return torch.randint(0, vocabulary, (n,), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["any", "few", "one", "strangers"])
@pytest.mark.parametrize(
    ("n", "vocabulary", "k"),
    [(1, 3, 16), pytest.param(33, 7, 520, marks=pytest.mark.smoke), (8192, 50304, 4096), (4097, 1000, 768)],
)
def test_against_the_oracle(n, vocabulary, k, kind, dtype):
    into, rows = torch.randn(vocabulary, k, device="cuda").to(dtype), tokens(kind, n, vocabulary)
    values = torch.randn(n, k, device="cuda").bfloat16()
    expected = into.double()
    present = (rows >= 0) & (rows < vocabulary)
    expected.index_add_(0, rows[present], values[present].double())
    again = into.clone()
    ops.add_rows(into, rows, values)
    rtol, atol = (1e-5, 1e-3) if dtype == torch.float32 else (1 / 256, 1e-3)
    torch.testing.assert_close(into.double(), expected, rtol=rtol, atol=atol)
    ops.add_rows(again, rows, values)
    assert torch.equal(into, again)
    if n < 5000 and vocabulary < 5000:
        cpu = torch.zeros(vocabulary, k)
        reference_embedding.add_rows(cpu, rows.cpu(), values.cpu())
        fresh = torch.zeros(vocabulary, k, device="cuda")
        ops.add_rows(fresh, rows, values)
        torch.testing.assert_close(fresh.cpu(), cpu, rtol=1e-5, atol=1e-4)
