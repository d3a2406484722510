"""Run pretrain_gpt_fp8.py with one training step under torch's profiler (rank 0).

    PROFILE_STEP=8 torchrun --nproc-per-node 1 benchmarks/profile_gpt.py <the flags of pretrain_gpt_fp8.py>

Prints one line `PROFILE {...}`: GPU milliseconds by kind of kernel (kinds.py), busy time and span of the step, every
wait of the host for the GPU in it, the number of kernels and of ATen calls, and the host's own time. For each kind of
collective it has the time that it ran, and the part of that in which nothing else ran, which is its share of the step's
critical path.  The profiler slows the host, so compare host times with each other, not with a step's.
TRACE=FILE.json.gz keeps the trace itself; with {rank} in the name, every rank is profiled and keeps its own.

The environment variable TE=repaired, unrepaired or none sets how Megatron finds Transformer Engine (`prepare_te`).
CAP_GB=80 limits torch's allocator to 80 GB (10^9 bytes) on each GPU.  With FETCH_KEYS=1 --cp-comm-type p2p fetches keys
and values of any size.  FIRST_TOKENS=8192 cuts the first step's sequences to so many tokens.  PEAK_AFTER=2 prints
`PEAK held peak`, each rank's GB, when the backward pass of the last two layers of the second step is done. With
PEAK_ENDS=1 the run ends there (`look_at_peak`).
"""

import functools
import importlib.util
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

from kinds import COMMUNICATION, clean, kind_of

COLLECTIVES = ("SendRecv", "ReduceScatter", "AllGather", "AllReduce")  # SendRecv: our all-to-all
SYNCHRONISES = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
WAITS = (*SYNCHRONISES, "aten::item")
STEP = "the profiled train_step"
RANGES = (STEP, "Optimizer.", "nccl:")  # names that are not kernels
FULL_QUEUE_US = 200  # a launch takes 5; one that takes this long waits until the GPU's queue has room


def summary(profile) -> dict:
    """Kernel time by kind in ms, busy and span in ms, and counts of kernels, ATen calls and host waits.

    The host's own time is the range STEP without its waits for the GPU, in a call that synchronises or in a launch into
    a full queue. If one thread waited, the others are assumed to have waited for it.
    """
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    intervals = []
    collectives: dict[str, list] = {name: [] for name in COLLECTIVES}
    compute = []
    host_waited = []
    step = (0.0, 0.0)
    kernels = aten_calls = 0
    for event in profile.events():
        if event.name in WAITS:
            waits[event.name] += 1
        interval = (event.time_range.start, event.time_range.end)
        if event.device_type.name == "CPU":
            aten_calls += event.name.startswith("aten::")
            full_queue = "Launch" in event.name and interval[1] - interval[0] > FULL_QUEUE_US
            if event.name == STEP:
                step = interval
            elif event.name in SYNCHRONISES or full_queue:
                host_waited.append(interval)
            continue
        if event.name.startswith(RANGES):  # torch gives a range the time of the kernels in it
            continue
        kernels += not event.name.startswith(("Memcpy", "Memset"))
        if event.name.startswith("Memcpy DtoH"):
            waits["copy to host"] += 1
        kind = kind_of(event.name)
        kinds[kind] += (interval[1] - interval[0]) / 1e3
        names[f"{kind}: {clean(event.name)[:150]}"] += (interval[1] - interval[0]) / 1e3
        intervals.append(interval)
        if kind == COMMUNICATION:
            collectives.get(next((c for c in COLLECTIVES if c in event.name), ""), []).append(interval)
        else:
            compute.append(interval)
    host_waited = [(max(start, step[0]), min(stop, step[1])) for start, stop in host_waited]
    busy = covered(intervals)
    span = max(stop for _, stop in intervals) - min(start for start, _ in intervals) if intervals else 0.0
    return {
        "ms": {k: round(v, 2) for k, v in kinds.most_common()},
        "busy": round(busy / 1e3, 2),
        "span": round(span / 1e3, 2),
        "kernels": kernels,
        "aten_calls": aten_calls,
        "host_ms": round((step[1] - step[0] - covered(host_waited)) / 1e3, 2),
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
        "largest": {k: round(v, 2) for k, v in names.most_common(60)},
    }


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of the intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def prepare_te(state: str) -> None:
    """Set Transformer Engine to "repaired", "unrepaired" (as Megatron finds it) or "none". Call before importing
    Megatron. "none" also hides apex's weight gradients.

    If apex is not installed, ours replaces its weight gradients in FP32 (gemm/fused_wgrad.py), so that stock's LM head
    accumulates in its GEMM, as with apex.

    megatron-core 0.19.2 imports `_SplitAlongDim` from transformer_engine.pytorch.attention.  TE has renamed it and
    Megatron swallows the ImportError. So torch splits QKV and concatenates its gradient, which costs TE 8 ms of a step
    of 479.  The repair puts the old name back, in this process only: no installed file changes, and a TE that was
    repaired on disk can be measured unrepaired too.
    """
    from megatron_fp8.gemm import fused_wgrad

    if state == "none":
        for name in ("transformer_engine", fused_wgrad.NAME):
            sys.modules[name] = None  # makes an import fail, installed or not
        return
    import transformer_engine.pytorch.attention as attention
    from transformer_engine.pytorch.utils import SplitAlongDim

    vars(attention).pop("_SplitAlongDim", None)
    if state == "repaired":
        attention._SplitAlongDim = SplitAlongDim
    if fused_wgrad.NAME not in sys.modules and importlib.util.find_spec(fused_wgrad.NAME) is None:
        sys.modules[fused_wgrad.NAME] = fused_wgrad.MODULE


def check_te(state: str) -> None:
    """Raise unless Megatron's attention finds Transformer Engine, and splits QKV, as the state says."""
    from megatron.core.transformer import attention

    found = "none" if not attention.HAVE_TE else "unrepaired" if attention.SplitAlongDim is None else "repaired"
    if found != state:
        raise RuntimeError(f"Transformer Engine is {found} for Megatron's attention, and was to be {state}")


def cap_memory(gb: float) -> None:
    """Limit torch's allocator to `gb` GB of this rank's GPU."""
    import torch

    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0"))
        share = gb * 1e9 / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def shorten_first_step(tokens: int) -> None:
    """Cut the first step's sequences to so many tokens. The optimizer then has its states, and kernels are compiled,
    before the first step of whole sequences."""
    from megatron.core import utils
    from megatron.training import training

    stock_step, stock_split, calls = training.train_step, utils.get_batch_on_this_cp_rank, Counter()

    @functools.wraps(stock_step)
    def train_step(*args, **kwargs):
        calls["steps"] += 1
        return stock_step(*args, **kwargs)

    def split(batch, *args, **kwargs):  # pretrain_gpt_fp8.py calls it for each micro-batch, (batch, sequence)
        if calls["steps"] == 1:
            batch = {key: value if value is None else value[:, :tokens].contiguous() for key, value in batch.items()}
        return stock_split(batch, *args, **kwargs)

    training.train_step, utils.get_batch_on_this_cp_rank = train_step, split


def look_at_peak(layers: int, ends: bool) -> None:
    """In the second step, print each rank's memory once the backward pass of its last `layers` layers is done.

    With full recomputation, which is required, the step's peak lies before that. The logits are gone then, and each
    further layer frees its input. The gradients' memory and the optimizer's states are there since the first step.

    ends: end the process there. A layer's recomputation and backward pass take 3.5 times as long as its forward pass,
    so with 32 layers three quarters of the step are saved.
    """
    import torch
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import training

    stock_step, calls = training.train_step, Counter()

    def recomputed(*args) -> None:
        if not torch.is_grad_enabled() or calls["printed"]:
            return  # its first forward pass keeps nothing
        calls["printed"] += 1
        torch.cuda.synchronize()
        print("PEAK", torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9, flush=True)
        if ends:
            torch.distributed.barrier()  # a rank that is gone could not receive what the others still send
            os._exit(0)

    @functools.wraps(stock_step)
    def train_step(forward_step, data, model, *args, **kwargs):
        calls["steps"] += 1
        if calls["steps"] == 2:
            get_attr_wrapped_model(model[-1], "decoder").layers[-1 - layers].register_forward_pre_hook(recomputed)
        return stock_step(forward_step, data, model, *args, **kwargs)

    training.train_step = train_step


def install(step: int) -> None:
    """Profile call number `step` of Megatron's train_step."""
    import megatron.training.training as training
    import torch

    from megatron_fp8 import cpu

    if cpu.needed():
        return

    stock, calls = training.train_step, Counter()
    trace, rank = os.environ.get("TRACE", ""), os.environ.get("RANK", "0")

    @functools.wraps(stock)  # keeps its signature, which the hooks of some flags read
    def train_step(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] != step or (rank != "0" and "{rank}" not in trace):
            return stock(*args, **kwargs)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            with torch.profiler.record_function(STEP):
                result = stock(*args, **kwargs)
            torch.cuda.synchronize()  # this adds one cudaDeviceSynchronize to the count
        if trace:
            profile.export_chrome_trace(trace.replace("{rank}", rank))
        if rank == "0":
            print("PROFILE", json.dumps(summary(profile)), flush=True)
        return result

    training.train_step = train_step


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    te = os.environ.get("TE")
    if te:
        prepare_te(te)
    from megatron_fp8.plugin import install as install_plugin

    install_plugin()
    if te:
        check_te(te)
    if os.environ.get("CAP_GB"):
        cap_memory(float(os.environ["CAP_GB"]))
    if os.environ.get("FETCH_KEYS"):
        from megatron_fp8.layers import context_parallel

        context_parallel.FETCHED_ABOVE = 0
    if os.environ.get("FIRST_TOKENS"):
        shorten_first_step(int(os.environ["FIRST_TOKENS"]))
    if os.environ.get("PEAK_AFTER"):
        look_at_peak(int(os.environ["PEAK_AFTER"]), ends=bool(os.environ.get("PEAK_ENDS")))
    install(int(os.environ.get("PROFILE_STEP", "8")))
    runpy.run_path(str(root / "pretrain_gpt_fp8.py"), run_name="__main__")
