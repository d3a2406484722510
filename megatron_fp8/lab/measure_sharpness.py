"""Sharpness of a model in Megatron: in training without touching the loss, and on a checkpoint by a forward pass.

What the probe needs is what the loss sees: logits (s, b, V/tp) of the last pipeline stage, labels and loss mask (b, s).

    hook                                   gives                  why this one
    GPTModel's forward pre-hook            labels, loss mask      torch's own; below DDP and Float16Module
    compute_language_model_loss,           labels, logits         multiplied by MuP's factor already, and not yet
      an attribute of the one model                               overwritten, as Transformer Engine's loss does

A forward hook on output_layer, torch's own way, comes before MuP's factor and also sees the logits of the layers for
multi-token prediction, which pass through the same output layer.  Those layers call compute_language_model_loss too,
but with shifted copies of the labels: only the labels that entered the model are the next token's.

Inactive, the probe is two Python calls a micro-batch.  It does not see what passes by the model's forward or replays
it: runs with --overlap-moe-expert-parallel-comm, and CUDA graphs of the full iteration.

Only positions that the loss mask lets count are counted.  Tensor-parallel ranks all get the same numbers; add them over
data and context parallelism of the last stage by `Statistics.reduce`.  The last token of a sequence cut for context
parallelism is the last of rank 0's part.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from .sharpness import EPSILON, Search, Sharpness, Statistics, closed_form, lbfgsb

LAST = ("lbfgsb", "closed_form")


class SharpnessProbe:
    """Sees the logits of a model's loss while `active`, and keeps statistics of their sharpness.

    Args:
        epsilon: the box's, see sharpness.py.
        iterations: of L-BFGS-B on the last token of each sequence; 0: not done.  It waits for the host: for a
            checkpoint, not for training.

    Attributes:
        active: whether the next micro-batches are looked at.  Set it on every rank alike.
        tokens: Statistics of Sharpness' four quantities over all positions; None before the first (and on stages
            without an output layer).
        last: Statistics of LAST, phi in % of last tokens by the two methods, on the CPU; None before the first.
    """

    def __init__(self, epsilon: float = EPSILON, iterations: int = 0):
        self.epsilon, self.iterations = epsilon, iterations
        self.active = False
        self._attached: list[tuple[torch.nn.Module, Any]] = []  # (model, handle of its pre-hook)
        self._labels = self._mask = None
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.tokens: Statistics | None = None
        self.last: Statistics | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Hook a model chunk, as Megatron wraps it or bare.  Does nothing to one without an output layer.

        The model must get `labels` and `loss_mask` by keyword, as it does from Megatron's scripts.
        """
        model = unwrap_model(model)
        if not model.post_process:
            return
        stock = model.compute_language_model_loss

        def compute_language_model_loss(labels, logits):
            if self.active and labels is self._labels:
                self._observe(model, logits.detach(), labels, self._mask)
                self._labels = self._mask = None
            return stock(labels, logits)

        self._attached.append((model, model.register_forward_pre_hook(self._note, with_kwargs=True)))
        model.compute_language_model_loss = compute_language_model_loss

    def detach(self) -> None:
        """Undo every `attach`."""
        for model, handle in self._attached:
            handle.remove()
            del model.compute_language_model_loss  # the class's is found again
        self._attached.clear()

    def _note(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.active:
            self._labels, self._mask = kwargs.get("labels"), kwargs.get("loss_mask")

    @torch.no_grad()
    def _observe(self, model, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> None:
        groups, width = model.pg_collection, logits.shape[-1]
        valid = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask > 0
        tp = groups.tp if width < model.vocab_size else None
        found = closed_form(logits.reshape(-1, width), labels.t().reshape(-1), self.epsilon, tp)
        if self.tokens is None:
            self.tokens = Statistics(Sharpness._fields, logits.device)
        self.tokens.add(torch.stack(found), valid.t().reshape(-1))
        if self.iterations and groups.cp.rank() == 0:
            by_position = found.sharpness.view(logits.shape[:2])
            self._observe_last(gather_rows(logits[-1], tp), labels[:, -1], valid[:, -1], by_position[-1])

    def _observe_last(self, rows: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, closed: torch.Tensor):
        searches = [
            lbfgsb(row, target, self.epsilon, self.iterations) if counts else Search(0.0, 0, False)
            for row, target, counts in zip(rows, targets.tolist(), valid.tolist(), strict=True)
        ]
        searched = torch.tensor([search.sharpness for search in searches], dtype=torch.float64)
        if self.last is None:
            self.last = Statistics(LAST)
        self.last.add(torch.stack([searched, closed.double().cpu()]), valid.cpu())


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Rows (n, V/ranks) of the vocabulary's shards, made whole: (n, V) on every rank."""
    if group is None or group.size() == 1:
        return shard
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group)
    return torch.cat(parts, 1)


@torch.no_grad()
def measure(
    model: torch.nn.Module, batches: Iterable[Mapping[str, torch.Tensor | None]], iterations: int = 0
) -> SharpnessProbe:
    """The sharpness of a model without pipeline stages over micro-batches; dropout is off meanwhile.

    With pipeline stages: attach a probe to every chunk, set it active, and run Megatron's own evaluation.

    Args:
        model: as Megatron wraps it or bare.
        batches: what pretrain_gpt_fp8.get_batch returns: "tokens", "position_ids", "labels" and "loss_mask" (b, s),
            "attention_mask".
        iterations: of L-BFGS-B on last tokens, see SharpnessProbe.

    Returns the probe, detached, with `tokens` and `last` of this rank's batches.
    """
    probe = SharpnessProbe(iterations=iterations)
    probe.attach(model)
    probe.active = True
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
            model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    finally:
        model.train(was_training)
        probe.active = False
        probe.detach()
    return probe
