"""The LM head and the loss in parts of the tokens (`--fp8-loss-chunks N`).

The logits are the largest tensor of most steps: 2 bytes for each token and row of the vocabulary, on the rank that has
the head. Llama 3 has 128,256 rows, so they take as much as 31 activations of its 8B's width. With N parts one part's
logits exist at a time:

    forward     for each part: logits = head(hidden); loss of each token; the logits are dropped
    backward    for each part: logits again; their gradient; the gradients of hidden and of the head's weight

The price is the head's forward product, which runs twice: a third more of the head's GEMMs. The numbers are those of
the whole, but for the order in which the weight's gradient adds up (in BF16, a rounding for each part, if it is not
added to main_grad: --no-gradient-accumulation-fusion). With --fp8-lm-head each part has scales of its own.

A part is a range of the rows that this rank has. Under sequence parallelism the head gathers them from all ranks, so
its logits are of a range of each rank's rows, and the labels are picked alike. A part's rows on a rank are a multiple
of 16, which FP8's weight gradient asks for.

Megatron's GPTModel takes an `output_processor` in place of its head and loss, and torch's checkpoint runs a part again.
torchtune's chunked output and Liger's fused linear cross-entropy are the same idea; Liger makes the gradients in the
forward pass, which needs one factor for all tokens, and Megatron's loss masks give each token its own.
"""

import functools
import inspect

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ..flags.loss_chunks import rows_of_part


def in_chunks(model, chunks: int) -> None:
    """Let a GPTModel that has a head compute head and loss in at most `chunks` parts, if it is called with labels."""
    signature = inspect.signature(model.forward)
    told = False

    def give_processor(model, given, named):
        nonlocal told
        call = signature.bind(*given, **named).arguments
        if call.get("labels") is not None and call.get("output_processor") is None:
            named = named | {"output_processor": functools.partial(_losses, chunks)}
        elif call.get("labels") is None and torch.is_grad_enabled() and not told:  # a framework has its own loss
            told = True
            if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:  # always of the last stage
                print(f"[fp8] --fp8-loss-chunks {chunks}: no effect, training asks the model for logits", flush=True)
        return given, named

    model.register_forward_pre_hook(give_processor, with_kwargs=True)


def _losses(
    chunks: int, *, hidden_states, output_layer, output_weight, labels, runtime_gather_output,
    compute_language_model_loss, scale_logits, **_,
) -> torch.Tensor:  # fmt: skip
    """The loss of each token, (b, s) float32.

    hidden_states: (s, b, h), or under sequence parallelism this rank's (s / ranks, b, h). labels: (b, s) int64.
    """

    def of_part(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return compute_language_model_loss(labels, scale_logits(logits))

    def of_part_again(hidden, labels):  # nothing is drawn at random, and a graph cannot ask for the generator's state
        return checkpoint(of_part, hidden, labels, use_reentrant=False, preserve_rng_state=False)

    run = of_part_again if torch.is_grad_enabled() else of_part
    rows = len(hidden_states)
    labels = labels.reshape(len(labels), -1, rows)  # (b, ranks, rows)
    size = rows_of_part(rows, chunks)
    losses = []
    for hidden, of_hidden in zip(hidden_states.split(size), labels.split(size, dim=2), strict=True):
        loss = run(hidden, of_hidden.flatten(1))
        losses.append(loss.view(of_hidden.shape))
    return torch.cat(losses, dim=2).flatten(1)
