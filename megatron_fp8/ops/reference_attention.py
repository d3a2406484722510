"""Attention over two sets of keys, made of that over each: the reference for triton/attention.py, and the CPU's
implementation."""

import torch


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Attention over disjoint sets of keys -> that over their union, (s, b, h, d) contiguous in `dtype`.

        whole = log(exp(lse) + exp(part_lse))        out exp(lse - whole) + part exp(part_lse - whole)    in float32

    out: (s, b, h, d) of any strides; returned, and overwritten, if it is contiguous and has `dtype`.
    lse: (b, h, s) float32, natural logarithms of sums of exponentials; becomes the union's.
    part: (s', b, h, d) of any strides, s' <= s, of the last s' rows; the rows before have nothing to add.
    part_lse: (b, h, s') float32.
    """
    first = len(out) - len(part)
    before = lse[..., first:]
    whole = torch.logaddexp(before, part_lse)
    old, new = ((each - whole).permute(2, 0, 1).unsqueeze(-1).exp_() for each in (before, part_lse))
    keeps = out.dtype == dtype and out.is_contiguous()
    merged = out if keeps else out.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    merged[first:] = merged[first:] * old + part * new
    before.copy_(whole)
    return merged.to(dtype)
