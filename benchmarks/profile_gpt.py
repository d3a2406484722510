"""pretrain_gpt_fp8.py with one training step under torch's profiler (rank 0).

    PROFILE_STEP=8 torchrun --nproc-per-node 1 benchmarks/profile_gpt.py <the flags of pretrain_gpt_fp8.py>

Prints one line `PROFILE {...}`: GPU milliseconds by kind of kernel, busy time and span of the step, every way in
which the host waited for the GPU inside it, and, for each kind of collective, how long it ran and for how much of that
nothing else did: what is left of it on the step's critical path.  With TRACE=FILE.json.gz the trace itself is kept.
"""

import json
import os
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

KINDS = (  # (kind, pattern of kernel names), the first that matches
    ("communication", r"nccl"),
    ("attention", r"fmha|flash|cudnn_generated|cudnn.*sdpa|sdpa"),
    ("gemm", r"nvjet|gemm|cutlass|xmma|cublas"),
    ("cast and transpose", r"quant|cast|transpose|amax|_block|fp8|scale|_(tile|flat|add|sum)_kernel"),
    ("norm", r"norm|welford"),
    ("optimizer", r"adam|multi_tensor"),
    ("copy", r"memcpy|memset|copy|cat"),
)
COLLECTIVES = ("SendRecv", "ReduceScatter", "AllGather", "AllReduce")  # SendRecv: all-to-all, ours alone
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")


def summary(profile) -> dict:
    """Kernel time by kind in ms, busy and span in ms, and counts of host waits."""
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    intervals = []
    collectives: dict[str, list] = {name: [] for name in COLLECTIVES}
    compute = []
    for event in profile.events():
        if event.name in WAITS:
            waits[event.name] += 1
        if event.device_type.name == "CPU" or event.name.startswith("Optimizer."):  # a range, not a kernel
            continue
        if event.name.startswith("Memcpy DtoH"):
            waits["copy to host"] += 1
        kind = next((k for k, p in KINDS if re.search(p, event.name, re.I)), "elementwise")
        kinds[kind] += event.time_range.elapsed_us() / 1e3
        names[f"{kind}: {event.name[:90]}"] += event.time_range.elapsed_us() / 1e3
        interval = (event.time_range.start, event.time_range.end)
        intervals.append(interval)
        if kind == "communication":
            collectives.get(next((c for c in COLLECTIVES if c in event.name), ""), []).append(interval)
        else:
            compute.append(interval)
    busy = covered(intervals)
    span = max(stop for _, stop in intervals) - min(start for start, _ in intervals) if intervals else 0.0
    return {
        "ms": {k: round(v, 2) for k, v in kinds.most_common()},
        "busy": round(busy / 1e3, 2),
        "span": round(span / 1e3, 2),
        "waits": dict(sorted(waits.items())),
        "collectives": {
            name: {
                "kernels": len(own),
                "ms": round(covered(own) / 1e3, 2),
                "exposed_ms": round((covered(own + compute) - covered(compute)) / 1e3, 2),
            }
            for name, own in collectives.items()
            if own
        },
        "largest": {k: round(v, 2) for k, v in names.most_common(40)},
    }


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def install(step: int) -> None:
    """Profile the step-th call of Megatron's train_step."""
    import megatron.training.training as training
    import torch

    from megatron_fp8 import cpu

    if cpu.needed():
        return

    stock, calls = training.train_step, Counter()

    def train_step(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] != step or int(os.environ.get("RANK", "0")) != 0:
            return stock(*args, **kwargs)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            result = stock(*args, **kwargs)
            torch.cuda.synchronize()  # one cudaDeviceSynchronize of the count is this one
        if os.environ.get("TRACE"):
            profile.export_chrome_trace(os.environ["TRACE"])
        print("PROFILE", json.dumps(summary(profile)), flush=True)
        return result

    training.train_step = train_step


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    from megatron_fp8.plugin import install as install_plugin

    install_plugin()
    install(int(os.environ.get("PROFILE_STEP", "8")))
    runpy.run_path(str(root / "pretrain_gpt_fp8.py"), run_name="__main__")
