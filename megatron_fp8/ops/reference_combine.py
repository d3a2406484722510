"""Sums of experts' results in plain PyTorch: the reference for triton/combine.py, and the CPU's implementation."""

import torch


def combine(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """out (T, K), out[t] the sum of rows[table[t, i]] over i, in float32, in the order of i, rounded once at the end.

    rows: (R', K), bf16, fp16 or fp32, of which those that the table does not name are not read. table: (T, k) int32; a
    number below 0 stands for no row. out has rows' type.
    """
    total = rows.new_zeros(table.shape[0], rows.shape[1], dtype=torch.float32)
    for at in table.long().unbind(1):
        total += torch.where((at >= 0)[:, None], rows[at.clamp(min=0)].float(), 0)
    return total.to(rows.dtype)
