"""The collectives that gradients, weights and activations travel by: each started, not waited for, and counted.

FP8 travels as bytes: gloo has no FP8 types, and an all-to-all or a gather does not look inside.  `sent_bytes` counts
what left this rank in this step, by kind; a collective over R ranks keeps 1/R of its bytes at home.

No collective here waits.  It is started and its handle kept, and work goes on.  What needs several, one after the
other, is a generator of stages (`Stages`): it yields the handles of what it has started, and is resumed when they are
done; its last collective's handles come with its result.  So many buckets can be under way at once, without a stream
or a thread of our own.  A handle, NCCL's as gloo's, keeps what it sends and receives until it is waited for.  (Under
CUDA_DEVICE_MAX_CONNECTIONS=1, which tensor parallelism asks for, all streams share one queue of the hardware: a wait
between two stages on a stream of our own, or a second collective behind a first, would hold up the backward pass.)
"""

from collections import Counter
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

GRADS, WEIGHTS = "grad_reduce", "weight_gather"
KEYS, KEYS_GRADS = "cp_gather", "cp_sum"  # of context parallelism: K and V, their gradients
sent_bytes: Counter[str] = Counter()


def count(kind: str, numbytes: int, group) -> None:
    """Count a collective of `numbytes` in all, of which this rank keeps 1/R."""
    sent_bytes[kind] += numbytes * (group.size() - 1) // group.size()


def own_shard(buffer: torch.Tensor, group) -> torch.Tensor:
    """The view of `buffer` (R * n,) that this rank owns."""
    return buffer.chunk(group.size())[group.rank()]


def all_to_all(data: torch.Tensor, group, out: torch.Tensor | None = None, kind: str = GRADS):
    """Row j of `data` (R, ...), uint8, goes to rank j -> (what the ranks send, row i from rank i; handle)."""
    out = torch.empty_like(data) if out is None else out
    handle = dist.all_to_all_single(out, data, group=group, async_op=True)
    count(kind, data.nbytes, group)
    return out, handle


def exchange(data: torch.Tensor, group, kind: str, out: torch.Tensor | None = None):
    """Row j of `data` (R - 1, ...) goes to the j-th of the other ranks -> (row i from the i-th of them; handle)."""
    rows = [1] * group.size()
    rows[group.rank()] = 0
    return pass_rows(data, rows, rows, group, kind, out)


def pass_rows(
    data: torch.Tensor, sent: list[int], expected: list[int], group, kind: str, out: torch.Tensor | None = None
):
    """The next `sent[j]` rows of `data` go to rank j, none to this one -> (`expected[i]` from rank i; handle)."""
    out = data.new_empty(sum(expected), *data.shape[1:]) if out is None else out
    send, receive = data.view(torch.uint8), out.view(torch.uint8)
    handle = dist.all_to_all_single(receive, send, expected, sent, group=group, async_op=True)
    sent_bytes[kind] += data.nbytes
    return out, handle


def all_gather(row: torch.Tensor, group):
    """(n,) uint8 of every rank -> ((R, n), handle)."""
    gathered = row.new_empty(group.size(), row.numel())
    handle = dist.all_gather_into_tensor(gathered.view(-1), row, group=group, async_op=True)
    count(GRADS, gathered.nbytes, group)
    return gathered, handle


def all_gather_weights(buffer: torch.Tensor, group):
    """Give every rank all shards of `buffer` (R * n,), in place -> handle."""
    count(WEIGHTS, buffer.nbytes, group)
    data = buffer.view(torch.uint8)
    return dist.all_gather_into_tensor(data, own_shard(data, group), group=group, async_op=True)


Handles = list[Any]
Stages = Generator[Handles, None, tuple[Any, Any]]  # -> (result, the handles that it waits for)


def landed(result: Any) -> Stages:
    """Nothing to wait for."""
    yield from ()
    return result, []


class Flight:
    """Stages under way; the first is started at once."""

    def __init__(self, stages: Stages):
        self._stages = stages
        self._handles: Handles = []
        self._result: Any = None
        self.advance()

    def advance(self) -> None:
        """Start the next stage, when the one before is done; nothing where all are started."""
        if self._result is None:
            self._wait()
            try:
                self._handles = next(self._stages)
            except StopIteration as end:
                self._result, self._handles = end.value

    def land(self) -> Any:
        """The result, valid for what the current stream does next."""
        while self._result is None:
            self.advance()
        self._wait()
        return self._result

    def _wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles = []
