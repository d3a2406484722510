"""Asynchronous collectives for gradients, weights and activations, with a count of the bytes that they send.

FP8 is sent as bytes, because gloo has no FP8 types; an all-to-all or a gather does not need the type. `sent_bytes`
counts the bytes that left this rank in this step, by kind. In a collective over R ranks, 1/R of the bytes stay on the
rank.

No collective here waits: it returns a handle. An operation of several collectives in sequence is a generator of stages
(`Stages`). It yields the handles of the collectives that it has started, and is resumed when they are done; it returns
its result with the handles of its last collectives. So many buckets can be in flight at once, without a stream or a
thread of our own. A handle, of NCCL or gloo, keeps its buffers alive until it is waited for. (With
CUDA_DEVICE_MAX_CONNECTIONS=1, which tensor parallelism needs, all streams share one hardware queue. A wait between two
stages on a stream of our own, or a second collective behind a first, would then block the backward pass.)
"""

from collections import Counter
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

GRADS, WEIGHTS = "grad_reduce", "weight_gather"
KEYS, KEYS_GRADS = "cp_gather", "cp_sum"  # context parallelism: K and V; their gradients
sent_bytes: Counter[str] = Counter()


def count(kind: str, numbytes: int, group) -> None:
    """Count a collective of `numbytes`, of which 1/R stay on this rank."""
    sent_bytes[kind] += numbytes * (group.size() - 1) // group.size()


def own_shard(buffer: torch.Tensor, group) -> torch.Tensor:
    """The view of `buffer` (R * n,) that this rank owns."""
    return buffer.chunk(group.size())[group.rank()]


def all_to_all(data: torch.Tensor, group, out: torch.Tensor | None = None, kind: str = GRADS):
    """Send row j of `data` (R, ...), uint8, to rank j -> (received, with row i from rank i; handle)."""
    out = torch.empty_like(data) if out is None else out
    handle = dist.all_to_all_single(out, data, group=group, async_op=True)
    count(kind, data.nbytes, group)
    return out, handle


def exchange(data: torch.Tensor, group, kind: str, out: torch.Tensor | None = None):
    """Send row j of `data` (R - 1, ...) to the j-th other rank -> (received, with row i from the i-th; handle)."""
    rows = [1] * group.size()
    rows[group.rank()] = 0
    return pass_rows(data, rows, rows, group, kind, out)


def pass_rows(
    data: torch.Tensor, sent: list[int], expected: list[int], group, kind: str, out: torch.Tensor | None = None
):
    """Send sent[j] rows of `data`, in order, to rank j -> (received, with expected[i] rows from rank i; handle).

    sent and expected are 0 for this rank.
    """
    out = data.new_empty(sum(expected), *data.shape[1:]) if out is None else out
    send, receive = data.view(torch.uint8), out.view(torch.uint8)
    handle = dist.all_to_all_single(receive, send, expected, sent, group=group, async_op=True)
    sent_bytes[kind] += data.nbytes
    return out, handle


def all_gather(row: torch.Tensor, group):
    """Gather `row` (n,) uint8 from every rank -> ((R, n), handle)."""
    gathered = row.new_empty(group.size(), row.numel())
    handle = dist.all_gather_into_tensor(gathered.view(-1), row, group=group, async_op=True)
    count(GRADS, gathered.nbytes, group)
    return gathered, handle


def all_gather_weights(buffer: torch.Tensor, group):
    """All-gather the ranks' shards of `buffer` (R * n,), in place -> handle."""
    count(WEIGHTS, buffer.nbytes, group)
    data = buffer.view(torch.uint8)
    return dist.all_gather_into_tensor(data, own_shard(data, group), group=group, async_op=True)


Handles = list[Any]
Stages = Generator[Handles, None, tuple[Any, Any]]  # returns (result, handles to wait for before its use)


def landed(result: Any) -> Stages:
    """Stages that return `result` at once."""
    yield from ()
    return result, []


class Flight:
    """Runs Stages; the constructor starts the first."""

    def __init__(self, stages: Stages):
        self._stages = stages
        self._handles: Handles = []
        self._result: Any = None
        self.advance()

    def advance(self) -> None:
        """Wait for the current stage and start the next; do nothing if all have started."""
        if self._result is None:
            while self._handles:
                self._handles.pop().wait()  # gloo's would hold what it has sent
            try:
                self._handles = next(self._stages)
            except StopIteration as end:
                self._result, self._handles = end.value

    def land(self) -> Any:
        """Run the remaining stages and return the result, ready for use on the current stream."""
        while self._result is None:
            self.advance()
        for handle in self._handles:
            handle.wait()
        self._handles = []
        return self._result
