"""The smallest and the largest number that a flag may have, for stock Megatron's flags and for our verbs' own.

Every parser checks its numbers here (flags/usage.py).  The least is 1 if Megatron divides by the number before it
checks it, or if nothing of size 0 can be built.  The most is larger than any real job needs, but memory, time and 64
bits can still handle it: a model of 10**19 layers is a typing error.
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
        """--hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels --moe-router-topk
        --moe-ffn-hidden-size --q-lora-rank --kv-lora-rank --v-head-dim""",
        1, _WIDTH,
    ),
    **_rows("--num-experts --fp8-amax-history-len", None, _WIDTH),
    **_rows(
        """--micro-batch-size --global-batch-size --seq-length --max-position-embeddings --vocab-size
        --make-vocab-size-divisible-by --mlp-chunks-for-training""",
        1, _MANY,
    ),
    **_rows("--padded-vocab-size --encoder-seq-length --decoder-seq-length", None, _MANY),
    **_rows(
        """--log-interval --tensorboard-log-interval --save-params-interval --save-dgrads-interval
        --save-activations-interval --check-weight-hash-across-dp-replicas-interval""",
        1, _64_BITS,  # a huge interval means never
    ),
    "--distributed-timeout-minutes": (None, 10**7),
    "--seed": (None, 2**32 - 10**6),  # numpy takes 32 bits, and Megatron adds to it for each pipeline stage
}  # fmt: skip
# Flags of our verbs. A training script may have flags of the same names with another meaning.
OF_VERBS = {
    **_rows("--gpus --nodes --ranks --jobs --processes", 1, _RANKS),
    **_rows("--rank --gpus-per-node", 0, _RANKS),
    **_rows("--timeout --steps --tasks-per-node --max-restarts --top", 1, _MANY),
}
_FINITE = 1e100  # float64 has room above it: what is computed from such a number is still finite


def beyond(names: Sequence[str], value: Any, of_verb: bool = False) -> str:
    """The remedy if a flag's value is too small, too large or NaN; "" if the value is accepted.

    names: the flag's option strings.  value: the parsed value; of a list, each number is checked.
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
