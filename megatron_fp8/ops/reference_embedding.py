"""A table's gradient in plain PyTorch: the oracle for ops/triton/embedding.py, and what runs on the CPU."""

import torch


def add_rows(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """into[rows[i]] += values[i] for all i: into (V, K) float32 or BF16, rows (n,) int64, values (n, K).

    Values of one row are added to one another in float32, in their order, and their sum is added to `into`, rounded
    once; so the result depends on nothing else. What is not in 0 .. V - 1 is left out.
    """
    present = (rows >= 0) & (rows < into.shape[0])
    rows, values = rows[present], values[present].float()
    found, place = rows.unique(return_inverse=True)
    sums = torch.zeros(len(found), into.shape[1], device=into.device).index_add_(0, place, values)
    into[found] = (into[found].float() + sums).to(into.dtype)
