"""examples/core_loop.py whose ranks share every sequence (context parallelism). WAY: TransformerConfig.cp_comm_type, a
word for all layers, as Megatron's own parser gives it and frameworks do."""

import os
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
RANKS = "torch.distributed.get_world_size()"
CHANGES = {
    "hidden_dropout=0.0,": f"hidden_dropout=0.0, context_parallel_size={RANKS}, cp_comm_type={os.environ['WAY']!r},",
    "initialize_model_parallel()": f"initialize_model_parallel(context_parallel_size={RANKS})",
    "batches(torch.distributed.get_rank())": "batches(0)",  # all have the same sequences
    "    losses = model(": "    tokens, labels, places = parts(tokens, labels, places)\n    losses = model(",
    # A schedule multiplies a loss by the ranks of a sequence, though gradients are averaged over them.
    "return loss, {": f"return loss / {RANKS}, {{",
    "        if torch.distributed.get_rank() == 0:": "        loss = mean_of_ranks(loss)\n"
    "        if torch.distributed.get_rank() == 0:",
}
source = (ROOT / "examples/core_loop.py").read_text()
for old, new in CHANGES.items():
    assert source.count(old) == 1, old
    source = source.replace(old, new)


def parts(*tensors):
    """This rank's two chunks of each (b, s)."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(dict(enumerate(tensors)), is_hybrid_cp=False, cp_group=group)
    return batch.values()


def mean_of_ranks(number: float) -> float:
    total = torch.tensor(number)
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


names = {"__name__": "__main__", "parts": parts, "mean_of_ranks": mean_of_ranks}
exec(compile(source, "core_loop.py", "exec"), names)
