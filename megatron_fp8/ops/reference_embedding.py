"""The gradient of an embedding table in plain PyTorch: the reference for triton/embedding.py, and the CPU's
implementation."""

import torch


def add_rows(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """into[rows[i]] += values[i] for all i: into (V, K) float32 or BF16, rows (n,) int64, values (n, K).

    The values of one row are summed in float32, in order of i, and the sum is added to `into` with one rounding, so the
    result is deterministic. A row number outside 0 .. V - 1 is ignored.
    """
    present = (rows >= 0) & (rows < into.shape[0])
    rows, values = rows[present], values[present].float()
    found, place = rows.unique(return_inverse=True)
    sums = torch.zeros(len(found), into.shape[1], device=into.device).index_add_(0, place, values)
    into[found] = (into[found].float() + sums).to(into.dtype)
