"""Logs if a run pads its vocabulary to another size than the checkpoint, because the loss then changes.

Megatron pads it to a multiple of --make-vocab-size-divisible-by (N) times --tensor-model-parallel-size.  Rows that the
checkpoint does not have keep their initial values: their logits are near 0, and no target names them.  They take part
in the softmax: with V rows of logits near 0 the loss is ln V, with V' rows ln V'.  Stock does the same.
"""

import math
from argparse import Namespace


def other_padding(saved: Namespace | None, args: Namespace) -> str:
    """The log line; "" if the sizes are equal or unknown."""
    old, new = getattr(saved, "padded_vocab_size", None), getattr(args, "padded_vocab_size", None)
    if saved is None or not old or not new or old == new:
        return ""
    said = (
        f"the vocabulary is padded to {new} rows, the checkpoint's to {old}: the first loss differs by up to about "
        f"ln({new}/{old}) = {math.log(new / old):+.4f}, as in stock"
    )
    ranks = args.tensor_model_parallel_size
    if old % ranks or (getattr(args, "vocab_size", None) or old) > old:
        return said
    return f"{said}; --make-vocab-size-divisible-by {_multiple(saved, old, ranks)} keeps {old}"


def _multiple(saved: Namespace, old: int, ranks: int) -> int:
    """A --make-vocab-size-divisible-by that pads to the old size: the saved run's multiple, if the ranks divide it."""
    then = getattr(saved, "make_vocab_size_divisible_by", 0) * getattr(saved, "tensor_model_parallel_size", 1)
    return then // ranks if then and then % ranks == 0 and old % then == 0 else old // ranks
