"""A vocabulary that a run pads to another size than its checkpoint's.

Megatron pads it to a multiple of --make-vocab-size-divisible-by (N) times --tensor-model-parallel-size.  Rows that the
checkpoint has not stay as they were initialised: logits near 0, which no target ever names.  They take their share of
the softmax: of V rows with logits near 0, V' rows have a loss of ln V' in place of ln V.  Stock does the same.
"""

import math
from argparse import Namespace


def other_padding(saved: Namespace | None, args: Namespace) -> str:
    """The line that says so; empty where the sizes are the same, or not known."""
    old, new = getattr(saved, "padded_vocab_size", None), getattr(args, "padded_vocab_size", None)
    if saved is None or not old or not new or old == new:
        return ""
    said = (
        f"the vocabulary is padded to {new} rows, the checkpoint's to {old}: the loss begins up to about "
        f"ln({new}/{old}) = {math.log(new / old):+.4f} off, as in stock"
    )
    ranks = args.tensor_model_parallel_size
    if old % ranks or (getattr(args, "vocab_size", None) or old) > old:
        return said
    return f"{said}; --make-vocab-size-divisible-by {_multiple(saved, old, ranks)} keeps {old}"


def _multiple(saved: Namespace, old: int, ranks: int) -> int:
    """What pads to the old size: the same multiple as then, where the ranks divide it."""
    then = getattr(saved, "make_vocab_size_divisible_by", 0) * getattr(saved, "tensor_model_parallel_size", 1)
    return then // ranks if then and then % ranks == 0 and old % then == 0 else old // ranks
