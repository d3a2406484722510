"""A micro-batch that has no token to learn from: its loss is 0, and a line says what is wrong with the data.

Megatron logs the quotient of two sums over a step's micro-batches and data-parallel ranks:

    loss = sum of losses / sum of counts            all micro-batches are empty: 0 / 0 = NaN, in stock too

So an empty micro-batch counts as 2^-126, the smallest normal FP32 number. A step of such alone has the loss
0 / 2^-126 = 0. In any other sum 2^-126 vanishes, because counts are whole numbers: no bit changes.

Stock divides gradients by at least 1, so those of such a step are 0. It is a step all the same: moments decay. Without
--calculate-per-token-loss an empty micro-batch adds 0 to the mean over micro-batches, which makes gradients smaller.
"""

import functools

import torch

LEAST = torch.finfo(torch.float32).tiny
LINE = (
    "[fp8] --data-path: a micro-batch has no answer token: nothing is learnt from it, and a step of such alone has the "
    "loss 0; give each sample an assistant's message that --sft-tokenizer-prompt-format counts (a pair: two), within "
    "--seq-length"
)


def counted(number: torch.Tensor) -> torch.Tensor:
    """A micro-batch's number of tokens or pairs, as a sum of a step's counts needs it: FP32, above 0."""
    return number.float().clamp(min=LEAST)


def tell(loss_mask: torch.Tensor) -> None:
    """Print LINE, once in a process, if a micro-batch has no token that counts. loss_mask: on the host, any shape."""
    if not loss_mask.any():
        _print_once()


@functools.cache
def _print_once() -> None:
    print(LINE, flush=True)


def forget() -> None:
    """Print LINE once more, if a later run in this process has such a micro-batch."""
    _print_once.cache_clear()
