"""Sharpness of a model in Megatron, from the loss's inputs, in training and evaluation. It changes nothing.

The probe needs the loss's inputs: logits (s, b, V/tp) of the last pipeline stage, labels and loss mask (b, s).

    hook                                   gives                  why this one
    GPTModel's forward pre-hook            labels, loss mask      torch's own; below DDP and Float16Module
    compute_language_model_loss,           labels, logits         multiplied by MuP's factor already, and not yet
      an attribute of the one model                               overwritten, as Transformer Engine's loss does

A forward hook on output_layer, torch's usual way, runs before MuP's factor. It also sees the logits of the layers for
multi-token prediction, which use the same output layer.  Those layers call compute_language_model_loss too, but with
shifted copies of the labels. Only the labels that entered the model are the next token's.

The hooks exist while the probe is entered, on the steps that measure; other steps are unchanged.  The probe does not
see runs that bypass the model's forward or replay it: --overlap-moe-expert-parallel-comm, and CUDA graphs of the full
iteration.

Only positions that the loss mask selects are counted.  Tensor-parallel ranks all get the same numbers; `reduce` sums
over data and context parallelism of the last stage.  If a sequence is cut for context parallelism, its last token is
the last of rank 0's part.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.utils import unwrap_model

from ..rebind import Hook, Rebound, When
from .logit_sharpness import Search, Sharpness, Statistics, closed_form, lbfgsb

LAST = ("closed_form", "lbfgsb")
_LOSS = Hook(
    *("megatron.core.models.gpt.gpt_model.GPTModel", "compute_language_model_loss", "monitor.sharpness_probe"),
    *("self labels logits", When("during the steps and evaluations whose sharpness is measured")),
    "Sees the logits and labels of the loss.",
    of_object=True,
)
HOOKS = (_LOSS,)


class SharpnessProbe:
    """A context that collects statistics of the logits' sharpness from every next-token loss of a model.

    Args:
        chunks: the model chunks of this rank, as Megatron wraps them or bare. They must get `labels` and `loss_mask` by
            keyword, as from Megatron's scripts.  Chunks without an output layer are ignored.
        iterations: of L-BFGS-B on the last token of each sequence; 0 switches it off.  It makes the host wait, so it is
            for evaluations, not for training.

    Attributes:
        tokens: Statistics of Sharpness's four quantities over all positions; None if no chunk has an output layer.
        last: Statistics of LAST, phi in % of last tokens by the two methods; None also if iterations is 0.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], iterations: int = 0):
        models = [unwrap_model(chunk) for chunk in chunks]
        self._models = [model for model in models if isinstance(model, LanguageModule) and model.post_process]
        self._iterations = iterations
        self._handles: list[Any] = []
        self._undo = Rebound()
        self._labels = self._mask = None
        self.tokens: Statistics | None = None
        self.last: Statistics | None = None
        if self._models:
            device = next(self._models[0].parameters()).device
            self.tokens = Statistics(Sharpness._fields, device)
            self.last = Statistics(LAST, device) if iterations else None

    def __enter__(self) -> "SharpnessProbe":
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._note, with_kwargs=True))
            self._undo.append(_LOSS.on(model, self._looking(model, model.compute_language_model_loss)))
        return self

    def __exit__(self, *raised: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._undo.put_back()

    def reduce(self) -> None:
        """Sum the statistics over the ranks of data and context parallelism, in place on each of them."""
        for statistics in filter(None, (self.tokens, self.last)):
            groups = self._models[0].pg_collection
            statistics.reduce(getattr(groups, "dp_cp_gtp_remat", None) or groups.dp_cp)  # as Megatron reduces its loss

    def _note(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._labels, self._mask = kwargs.get("labels"), kwargs.get("loss_mask")

    def _looking(self, model: torch.nn.Module, stock):
        def compute_language_model_loss(labels, logits):
            if labels is self._labels:
                self._observe(model, logits.detach(), labels, self._mask)
                self._labels = self._mask = None
            return stock(labels, logits)

        return compute_language_model_loss

    @torch.no_grad()
    def _observe(self, model, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> None:
        assert self.tokens is not None  # the model has an output layer
        groups, width = model.pg_collection, logits.shape[-1]
        valid = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask > 0
        tp = groups.tp if width < model.vocab_size else None
        found = closed_form(logits.reshape(-1, width), labels.t().reshape(-1), group=tp)
        self.tokens.add(torch.stack(found), valid.t().reshape(-1))
        if self.last is not None and groups.cp.rank() == 0:
            by_position = found.sharpness.view(logits.shape[:2])
            self._observe_last(gather_rows(logits[-1], tp), labels[:, -1], valid[:, -1], by_position[-1])

    def _observe_last(self, rows: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, closed: torch.Tensor):
        assert self.last is not None
        searches = [
            lbfgsb(row, target, iterations=self._iterations) if counts else Search(0.0, 0, False)
            for row, target, counts in zip(rows, targets.tolist(), valid.tolist(), strict=True)
        ]
        searched = torch.tensor([search.sharpness for search in searches], dtype=torch.float64, device=closed.device)
        self.last.add(torch.stack([closed.double(), searched]), valid)


def gather_rows(shard: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather rows (n, V/ranks) of vocabulary shards to (n, V) on every rank."""
    if group is None or group.size() == 1:
        return shard
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group)
    return torch.cat(parts, 1)
