"""--fp8-loss-chunks N: the LM head and the loss in at most N parts of the tokens (layers/loss_chunks.py)."""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, value_of, whole

LOSS_CHUNKS = Flag(
    "--fp8-loss-chunks",
    "Compute the LM head and the loss in at most N parts of a micro-batch's tokens (of 16 of a rank's rows, or a "
    "multiple), and again in the backward pass: the logits of one part and their gradient exist at a time, so 2 parts "
    "save nothing. The head's forward product runs twice. Default 1: at once.",
    whole(1, "at once"),
)
ROWS = 16  # what FP8's weight gradient asks for
_NEEDS = {  # flags that need the logits whole, or the head's forward pass once
    "--fp8-emulate-lm-head": "would round other numbers when it is computed again",
    "--fp8-sharpness-interval": "reads all logits",
    "--fp8-sharpness-eval": "reads all logits",
    "--logits-save-dir": "keeps all logits",
    "--logits-load-dir": "reads all logits",
    "--config-logger-dir": "logs all logits",
    "--mtp-num-layers": "has losses of its own, whose logits would stay whole",
    "--defer-embedding-wgrad-compute": "keeps the input of each forward pass of the head",
    "--overlap-moe-expert-parallel-comm": "does not call the model's forward pass",
}


def rows_of_part(rows: int, chunks: int) -> int:
    """Rows of a part if a rank has `rows`, in at most `chunks` parts: a multiple of 16, fewer in the last one."""
    size = -(-rows // chunks)
    return min(rows, size + -size % ROWS)


def loss_chunks(args: Namespace) -> int:
    """N; 1 without the flag. Raises UserError of one line: flag, value, remedy."""
    chunks = LOSS_CHUNKS.given(args) or 1
    if chunks > 1:
        for flag, why in _NEEDS.items():
            if value := value_of(args, flag):
                shown = flag if value is True else f"{flag} {value}"
                raise UserError(f"{LOSS_CHUNKS.name} {chunks}: {shown} {why}; remove one")
    return chunks
