"""Cross-entropy over a vocabulary that may be split over ranks: the reference for triton/cross_entropy.py, and the
CPU's implementation.

For a row x (V,) with target t:

    loss = log(sum_i e^(x_i - m)) - (x_t - m),      dx_i = (e^(x_i - m) / sum - [i = t]) dloss,      m = max_i x_i

All in FP32. With one rank the order of operations is stock Megatron's, so the bits are the same. Beside x, the backward
pass needs m and the sum of each row. m + log(sum) would be one number instead of two, but it is rounded at m's
magnitude: at |m| = 10^4 each probability would be wrong by 5e-4.

A rank has a shard of the columns and computes three numbers a row from it; the numbers of all ranks give the loss. A
target outside the vocabulary (an ignored token's -1) gets x_t - m = 0, as in stock.
"""

import torch


def cross_entropy_statistics(logits: torch.Tensor, target: torch.Tensor, first: int) -> torch.Tensor:
    """A shard's three numbers for each row, (3, n) float32: max of x, sum of e^(x - max), and x_t.

    Args:
        logits: (n, V/ranks), of any float type, contiguous.
        target: (n,) int64, an index into the whole vocabulary, contiguous.
        first: index of the shard's first column in the vocabulary.

    x_t is 0 if t is not in this shard. The sum is 0 if all of x is minus infinity, and NaN if x has a NaN or plus
    infinity.
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
    """The ranks' statistics (ranks, 3, n) -> (loss (n,), max and sum of the whole rows (2, n)), all float32.

    vocabulary: number of columns of all ranks together.
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
        dloss: (n,) float32, contiguous. If it is 0, the row's gradient is 0 even for logits that are not finite.
        out: of the logits' shape and type, contiguous.
    """
    top, total = normalizer
    gradient = (logits.float() - top[:, None]).exp_().div_(total[:, None])
    column, here = _own_column(logits, target, first)
    gradient.scatter_(1, column, gradient.gather(1, column) - here[:, None].float())
    gradient.mul_(dloss[:, None]).masked_fill_(dloss[:, None] == 0, 0)
    out.copy_(gradient)


def _own_column(logits: torch.Tensor, target: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's column in this shard (n, 1), or 0 if it is in another, and whether it is in this shard (n,)."""
    column = target - first
    here = (column >= 0) & (column < logits.shape[1])
    return column.masked_fill(~here, 0)[:, None], here
