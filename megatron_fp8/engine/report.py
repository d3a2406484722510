"""The memory and the traffic of a run, measured: bytes a parameter by kind, bytes sent a step.

Sizes are those of the tensors that exist on this rank, stock Megatron's and ours, divided by the number of parameters
on this rank.  A shard counts with its size here: at a data-parallel size of R, a sharded FP32 moment costs 4/R bytes.
Traffic: our collectives count themselves (comm/wire.py).  Stock has two a step over buffers of known size, a gradient
reduce-scatter and a weight all-gather (or one all-reduce without the distributed optimizer).  Tensor-parallel traffic
counts if it is our linears'; pipeline-parallel traffic does not count.

With the environment variable MEGATRON_FP8_REPORT=FILE rank 0 writes both as JSON when it exits.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ..comm.tensor import GATHERS, SUMS
from ..comm.wire import KEYS, KEYS_GRADS, sent_bytes
from .optimizer import EngineOptimizer


def write_at_exit(model_chunks, chain) -> None:
    """Arrange for the report of this process's last model, if MEGATRON_FP8_REPORT asks for it."""
    path = os.environ.get("MEGATRON_FP8_REPORT")
    if path and os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: Path(path).write_text(json.dumps(measure(model_chunks, chain), indent=1)))


def measure(model_chunks, chain) -> dict[str, dict[str, float]]:
    """{"bytes_per_param": {kind: bytes}, "wire_bytes_per_step": {kind: bytes}} of this rank.

    Args:
        model_chunks: the wrapped model chunks.
        chain: the ChainedOptimizer, stock's or ours, after at least one step.
    """
    params = {id(p): p for chunk in model_chunks for p in chunk.parameters()}
    held: Counter[str] = Counter()
    wire: Counter[str] = Counter(sent_bytes)
    engines = [part for part in chain.chained_optimizers if isinstance(part, EngineOptimizer)]
    ours = {id(weight.param) for engine in engines for bucket in engine.buckets for weight in bucket.weights}
    held["weight"] = sum(p.nbytes for i, p in params.items() if i not in ours)
    sharded = any(isinstance(part, DistributedOptimizer) for part in chain.chained_optimizers)
    for buffer in (b for chunk in model_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        held["grad"] += buffer.grad_data.nbytes
        kept = buffer.data_parallel_group.size()
        wire["grad_reduce"] += (1 if sharded else 2) * buffer.grad_data.nbytes * (kept - 1) // kept
        if sharded:
            wire["weight_gather"] += buffer.param_data.nbytes * (kept - 1) // kept
    for part in chain.chained_optimizers:
        if part.optimizer is None:
            continue
        if isinstance(part, EngineOptimizer):
            for bucket in part.buckets:
                for kind, tensors in bucket.buffers().items():
                    held[kind] += sum(t.nbytes for t in tensors)
            frozen = (weight for owned in part.sets for weight in owned.frozen)
            held["weight fp8 copy"] += sum(t.nbytes for weight in frozen for t in weight.cached_tensors())
        else:
            mains = (p for g in part.optimizer.param_groups for p in g["params"] if id(p) not in params)
            held["master"] += sum(p.nbytes for p in mains)
        for state in part.optimizer.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                held[kind] += state[kind].nbytes if kind in state else 0
    total = sum(p.numel() for p in params.values()) or 1  # a pipeline stage may have no parameter
    return {"bytes_per_param": {k: v / total for k, v in held.items()}, "wire_bytes_per_step": dict(wire)}


def summary(report: dict[str, dict[str, float]]) -> list[str]:
    """The report as two lines for the log."""
    held, wire = report["bytes_per_param"], dict(report["wire_bytes_per_step"])
    linears = {kind: wire.pop(kind) for kind in (GATHERS, SUMS) if kind in wire}
    attention = {kind: wire.pop(kind) for kind in (KEYS, KEYS_GRADS) if kind in wire}
    parts = ", ".join(f"{kind} {size:.2f}" for kind, size in held.items())
    sent = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in wire.items())
    lines = [
        f"bytes a parameter on this rank: {sum(held.values()):.2f} ({parts})",
        f"MB sent a step by this rank over data parallelism: {sum(wire.values()) / 1e6:.1f} ({sent})",
    ]
    for kinds, over in ((linears, "linears over tensor"), (attention, "attention over context")):
        if kinds:
            sent = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in kinds.items())
            lines.append(f"MB sent a step by this rank's {over} parallelism: {sent}")
    return lines
