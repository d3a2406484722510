"""The language model's loss: it keeps the logits as they are, and in the backward pass makes them their gradient.

Stock keeps e^(x - max) in FP32 and makes several passes over it: 4 bytes a logit beside the logits' 2, and 4 more for a
moment while the gradient is made. Here autograd keeps the logits, the targets and two numbers a row.

In place.  A GPT does not read its logits again after the loss: the head's gradients need the logits' gradient alone.
But other code may read them: a script that kept them, a second loss on them, the node that made them (if it saved its
output). So their memory is written only if nothing else holds it. The holders are counted: those of the tensor, of its
Python object and of its storage (views and detached tensors). Nor is it written if the graph is retained for a second
backward pass. In these cases the gradient gets new memory. The version counter is moved on as well: a holder that the
counts missed raises an error in autograd.

Tensor parallel.  One all-gather of three numbers a row replaces stock's two or three all-reduces. All are bound by
latency (8,192 rows are 96 KiB a rank). No pass waits in its middle for the maximum of all ranks, and every rank adds
the same numbers in the same order.
"""

import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from .. import ops


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The loss of each position, (s, b) float32.

    Args:
        logits: (s, b, V/ranks), this rank's shard of the vocabulary in the order of ranks, of any float type.
        target: (s, b) int64, numbered over the whole vocabulary.
        group: the tensor-parallel group that shares the vocabulary.
    """
    return _CrossEntropy.apply(logits, target, group)


def fused(stock: Callable) -> Callable:
    """Replaces Megatron's fused_vocab_parallel_cross_entropy."""

    @functools.wraps(stock)
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group):
        return cross_entropy(vocab_parallel_logits, target, tp_group)

    return fused_vocab_parallel_cross_entropy


def unfused(stock: Callable) -> Callable:
    """Replaces Megatron's vocab_parallel_cross_entropy."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    @functools.wraps(stock)
    def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
        if label_smoothing:  # a GPT has none: this is a script's own loss
            return stock(vocab_parallel_logits, target, label_smoothing, tp_group)
        return cross_entropy(vocab_parallel_logits, target, tp_group or get_tensor_model_parallel_group())

    return vocab_parallel_cross_entropy


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        logits = logits.contiguous()  # if it is a copy, only we hold it, and it may be overwritten too
        # A view of every second target, for example, stays strided when it is flattened: the kernels cannot read it.
        rows, labels = logits.view(-1, logits.shape[-1]), target.reshape(-1).contiguous()
        ranks, columns = group.size(), rows.shape[1]
        ctx.first = group.rank() * columns
        statistics = ops.cross_entropy_statistics(rows, labels, ctx.first)
        if ranks > 1:
            own, statistics = statistics, statistics.new_empty(ranks * 3, len(rows))
            dist.all_gather_into_tensor(statistics, own, group=group)
        loss, normalizer = ops.cross_entropy_loss(statistics.view(ranks, 3, -1), labels, ranks * columns)
        ctx.save_for_backward(logits, labels, normalizer)
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, labels, normalizer = ctx.saved_tensors
        in_place = _only_ours(logits)
        gradient = logits.detach() if in_place else torch.empty_like(logits)
        rows = (-1, logits.shape[-1])
        dloss = dloss.reshape(-1).contiguous()  # the gradient of a sum is one number, expanded
        ops.cross_entropy_gradient(
            logits.view(rows), labels, ctx.first, normalizer, dloss, out=gradient.view(rows)
        )
        if in_place:
            increment_version(logits)
        return gradient, None, None


def _only_ours(saved: torch.Tensor) -> bool:
    """Whether the backward pass that has just unpacked `saved` is its only holder, now and later.

    The numbers are torch 2.11's. The tensor is held by the node that saved it and by its Python object. That object is
    held by the caller's variable, ours, getrefcount's and the tensor. The storage is held by the tensor and by the
    object asked for here. Each further holder raises a count, so with another torch the gradient at worst gets new
    memory.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    storage = saved.untyped_storage()
    return saved._use_count() <= 2 and sys.getrefcount(saved) <= 4 and torch._C._storage_Use_Count(storage._cdata) <= 2
