"""How small and how large a number of the command line may be, stock's flags and the verbs' own alike.

Every parser asks here (flags/usage.py).  Least is 1 for what is divided by before Megatron has looked at it.  Most is
what no job has, and what memory, time and 64 bits still hold: a model of 10**19 layers is a slip of the finger.
"""

import math
from collections.abc import Sequence
from typing import Any

_RANKS, _LAYERS, _WIDTH, _MANY, _64_BITS = 10**5, 10**4, 10**6, 10**9, 2**63 - 1


def _rows(words: str, least: int | None, most: int) -> dict[str, tuple[int | None, int]]:
    return dict.fromkeys(words.split(), (least, most))


BOUNDS = {
    **_rows(
        """--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --expert-model-parallel-size --expert-tensor-parallel-size --data-parallel-size
        --num-distributed-optimizer-instances""",
        1, _RANKS,
    ),
    **_rows(
        "--num-layers --num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage", 1, _LAYERS,
    ),
    **_rows("--recompute-num-layers --mtp-num-layers --encoder-num-layers", None, _LAYERS),
    **_rows(
        "--hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels", 1,
        _WIDTH,
    ),
    **_rows("--num-experts --moe-router-topk --moe-ffn-hidden-size --fp8-amax-history-len", None, _WIDTH),
    **_rows(
        """--micro-batch-size --global-batch-size --seq-length --max-position-embeddings --vocab-size
        --make-vocab-size-divisible-by --mlp-chunks-for-training""",
        1, _MANY,
    ),
    **_rows("--padded-vocab-size --encoder-seq-length --decoder-seq-length", None, _MANY),
    **_rows(
        """--log-interval --tensorboard-log-interval --save-params-interval --save-dgrads-interval
        --save-activations-interval --check-weight-hash-across-dp-replicas-interval""",
        1, _64_BITS,  # a number that is never reached switches off
    ),
    "--distributed-timeout-minutes": (None, 10**7),
    "--seed": (None, 2**32 - 10**6),  # numpy's, to which Megatron adds the pipeline stage's
}  # fmt: skip
# The verbs' own; a training script may have flags of these names that mean something else.
OF_VERBS = {
    **_rows("--gpus --nodes --ranks --jobs --processes", 1, _RANKS),
    **_rows("--rank --gpus-per-node", 0, _RANKS),
    **_rows("--timeout --steps --tasks-per-node --max-restarts --top", 1, _MANY),
}
_FINITE = 1e100  # what is left of it is still finite


def beyond(names: Sequence[str], value: Any, of_verb: bool = False) -> str:
    """What to do about a flag's value that is too small or too large, or not a number; "" for what is taken.

    names: the flag's, as its parser has them.  value: what the parser made of the word; a list's numbers each count.
    of_verb: the parser is a verb's, not a training run's.
    """
    if isinstance(value, list | tuple):
        return next((said for one in value if (said := beyond(names, one, of_verb))), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if math.isnan(value):
        return "not a number; give one, or remove it"
    others = (None, _64_BITS if isinstance(value, int) else math.inf if math.isinf(value) else _FINITE)
    table = BOUNDS | OF_VERBS if of_verb else BOUNDS
    least, most = next((table[name] for name in names if name in table), others)
    if least is not None and value < least:
        return f"use {least} or more"
    return f"too large; use at most {most:.15g}" if abs(value) > most else ""
