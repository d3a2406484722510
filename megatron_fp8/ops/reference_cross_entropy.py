"""Cross-entropy over a vocabulary that several ranks may share: the oracle for ops/triton/cross_entropy.py, and what
runs on the CPU.  Of a row x (V,) with target t,

    loss = log(sum_i e^(x_i - m)) - (x_t - m),      dx_i = (e^(x_i - m) / sum - [i = t]) dloss,      m = max_i x_i

in FP32 and, with one rank, in the order in which stock Megatron computes it: the same bits. What the backward pass
needs of a row beside x is m and the sum. Their logarithm, m + log(sum), would be one number instead of two, but is
rounded at m's magnitude: at |m| = 10^4 each probability would be wrong by 5e-4.

A rank has a shard of the columns, of which it makes three numbers a row; those of all ranks make the loss. A target
that no rank has (an ignored token's -1) has x_t - m = 0, as in stock.
"""

import torch


def cross_entropy_statistics(logits: torch.Tensor, target: torch.Tensor, first: int) -> torch.Tensor:
    """What a shard of the vocabulary knows of each row, (3, n) float32: max of x, sum of e^(x - max), and x_t.

    Args:
        logits: (n, V/ranks), of any float type, contiguous.
        target: (n,) int64, numbered over the whole vocabulary, contiguous.
        first: the number of the shard's first column.

    x_t is 0 where t is not of this shard, the sum 0 where all of x is minus infinity, and NaN where x has a NaN or
    plus infinity.
    """
    x = logits.float()
    largest = x.amax(1)
    total = (x - largest.masked_fill(largest == -torch.inf, 0)[:, None]).exp_().sum(1)
    column, here = _own_column(logits, target, first)
    predicted = x.gather(1, column)[:, 0].masked_fill(~here, 0)
    return torch.stack([largest, total, predicted])


def cross_entropy_loss(
    statistics: torch.Tensor, target: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' statistics (ranks, 3, n) -> (loss (n,), and of the whole rows max and sum (2, n)), float32.

    vocabulary: columns of all ranks together.
    """
    largest, total, predicted = statistics.unbind(1)
    top = largest.amax(0)
    total = (total * (largest - top).exp()).sum(0)
    known = (target >= 0) & (target < vocabulary)
    below = (predicted.sum(0) - top).masked_fill(~known, 0)
    return total.log() - below, torch.stack([top, total])


def cross_entropy_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    first: int,
    normalizer: torch.Tensor,
    dloss: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be the logits themselves.

    Args:
        logits, target, first: as in `cross_entropy_statistics`.
        normalizer: (2, n), as `cross_entropy_loss` returns it.
        dloss: (n,) float32, contiguous. Where it is 0, so is the row, whatever the logits are.
        out: of the logits' shape and type, contiguous.
    """
    top, total = normalizer
    gradient = (logits.float() - top[:, None]).exp_().div_(total[:, None])
    column, here = _own_column(logits, target, first)
    gradient.scatter_(1, column, gradient.gather(1, column) - here[:, None].float())
    gradient.mul_(dloss[:, None]).masked_fill_(dloss[:, None] == 0, 0)
    out.copy_(gradient)


def _own_column(logits: torch.Tensor, target: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 1) the target's column in this shard, 0 where it is not of it, and (n,) where it is."""
    column = target - first
    here = (column >= 0) & (column < logits.shape[1])
    return column.masked_fill(~here, 0)[:, None], here
