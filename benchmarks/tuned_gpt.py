"""Tune a GPT on a file of token numbers (token_files.py), with or without a level, and measure each step (rank 0).

    TASK=sft TE=none torchrun --nproc-per-node 1 benchmarks/tuned_gpt.py <the flags of pretrain_gpt_fp8.py>

TASK: sft; lora, which has adapters on a frozen base (examples/lora.py); dpo, whose flags are dpo_gpt_fp8.py's.
TE: how Megatron finds Transformer Engine (profile_gpt.py). PAD, END: tokens that fill a sample and end a document.
WATCH=1: print what evaluations and updates give, the two lines at the end.

Prints a line `STEP {...}` for each step: milliseconds since the step before (the first: its own), GB (10^9 bytes) that
torch's allocator holds after it, and the most that it held since the step before (the first: since the start).

    HELDOUT {...}   of the samples evaluated since the last training step: {name: [sum, number]} of the logged values.
                    Megatron itself takes the mean of micro-batches' means.
    SHARE {...}     after every eighth step: the part of Adam's update that the masters take, over all these steps: the
                    sum of d u over that of u u. d is a master's change, u the one that Adam in FP32 makes of the same
                    states and gradients. A level's linears alone; an FP32 master takes 1. "shown": see way_shown.
"""

import functools
import json
import os
import runpy
import sys
import time

from profile_gpt import check_te, prepare_te
from stamp import ROOT

SCRIPTS = {"sft": "pretrain_gpt_fp8.py", "lora": "pretrain_gpt_fp8.py", "dpo": "dpo_gpt_fp8.py"}
LORA_RANK = 16
EVERY = 8  # steps between two whose updates are watched


def measure() -> None:
    """Let every step of Megatron's loop print its line."""
    import megatron.training.training as training
    import torch

    stock = training.train_step
    ended: list[float] = []

    @functools.wraps(stock)  # keeps its signature, which the hooks of some flags read
    def train_step(*args, **kwargs):
        began = ended[-1] if ended else time.perf_counter()
        result = stock(*args, **kwargs)
        torch.cuda.synchronize()
        ended.append(time.perf_counter())
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if int(os.environ.get("RANK", "0")) == 0:
            found = {"ms": round(1e3 * (ended[-1] - began), 2), "gb": held / 1e9, "gb_peak": most / 1e9}
            print("STEP", json.dumps(found), flush=True)
        return result

    training.train_step = train_step


def sum_held_out() -> None:
    """Let every evaluation print its sums."""
    import megatron.training.training as training

    stock = training.get_forward_backward_func
    sums: dict[str, list[float]] = {}

    @functools.wraps(stock)
    def get_forward_backward_func(*given, **names):
        schedule = stock(*given, **names)

        @functools.wraps(schedule)
        def run(*args, forward_only: bool, **kwargs):
            reports = schedule(*args, forward_only=forward_only, **kwargs)
            if not forward_only:
                sums.clear()
            elif any(reports):  # those of a reference are empty
                for name in reports[0]:
                    before = sums.get(name, [0.0, 0.0])
                    found = sum(report[name].double() for report in reports).tolist()
                    sums[name] = [a + b for a, b in zip(before, found, strict=True)]
                print("HELDOUT", json.dumps(sums), flush=True)
            return reports

        return run

    training.get_forward_backward_func = get_forward_backward_func


def masters_and_weights(engine) -> list:
    """(2, n) FP32 of each weight's part in this rank's shard of its bucket: masters, and weights as GEMMs read them."""
    import torch

    engine.prepare_model_params_for_param_sync()
    found = []
    for bucket in (bucket for owned in engine.sets for bucket in owned.buckets):
        masters = bucket.masters()
        for i, lo, hi in bucket.pieces():
            weight, start, _ = bucket.spans[i]
            read = weight.quantized().dequantize() if weight.fp8 else weight.dense()
            first = bucket.shard.start + lo - start
            found.append(torch.stack([masters[lo:hi], read.flatten()[first : first + hi - lo].float()]))
    return found


def way_shown(engine, began: list) -> tuple[float, float]:
    """(sum of w m, sum of m m): w and m are the changes of weight and master since `masters_and_weights` gave `began`.
    The first over the second is how much of the masters' way the weights show that GEMMs read."""
    shown = way = 0.0
    for now, before in zip(masters_and_weights(engine), began, strict=True):
        master, weight = now.double() - before.double()
        shown += (weight * master).sum().item()
        way += master.square().sum().item()
    return shown, way


def watch_updates() -> None:
    """Let the engine's Adam print the share of its updates that the masters take, and how much of it weights show."""
    import megatron.training.training as training
    import torch

    from megatron_fp8.engine import bucket
    from megatron_fp8.engine.bucket_states import read_average
    from megatron_fp8.numerics.scaled import ScaledTensor
    from megatron_fp8.ops.adam import adam_step as in_fp32
    from megatron_fp8.ops.adam_states import read_master

    stock, stock_step, sums = bucket.adam_step, training.train_step, [0.0, 0.0]
    watched: set[int] = set()
    began: list[torch.Tensor] = []

    @torch.no_grad()
    def adam_step(gradient, m, v, master, weight, hyper, grad_scale, scale=None, amax=None):
        if hyper.step % EVERY:
            stock(gradient, m, v, master, weight, hyper, grad_scale, scale, amax)
            return
        watched.add(hyper.step)
        before = read_master(master, weight).clone()
        exact, unused = before.clone(), before.bfloat16()
        averages = read_average(m, is_square=False).clone(), read_average(v, is_square=True).clone()
        in_fp32(gradient, *averages, exact, unused, hyper, grad_scale)
        stock(gradient, m, v, master, weight, hyper, grad_scale, scale, amax)
        if scale is not None:  # the one that the weight is written with now
            weight = ScaledTensor(weight.payload, scale.reciprocal())
        whole, taken = exact - before, read_master(master, weight) - before
        sums[0] += (taken.double() * whole).sum().item()
        sums[1] += whole.double().square().sum().item()

    @functools.wraps(stock_step)
    def train_step(forward_step, data, model, optimizer, *args, **kwargs):
        engine = getattr(optimizer, "engine", None)
        if engine is not None and not began:
            began.extend(masters_and_weights(engine))
        result = stock_step(forward_step, data, model, optimizer, *args, **kwargs)
        for step in watched:
            shown, way = way_shown(engine, began)
            print("SHARE", json.dumps({"step": step, "share": sums[0] / sums[1], "shown": shown / way}), flush=True)
        watched.clear()
        return result

    bucket.adam_step, training.train_step = adam_step, train_step


if __name__ == "__main__":
    task = os.environ["TASK"]
    prepare_te(os.environ["TE"])
    from megatron_fp8.plugin import install

    install()
    check_te(os.environ["TE"])
    import token_files

    token_files.install(int(os.environ["PAD"]), int(os.environ["END"]))
    if task == "lora":
        sys.path.insert(0, str(ROOT / "examples"))
        import lora

        lora.install(LORA_RANK)
    measure()
    if os.environ.get("WATCH"):
        sum_held_out()
        watch_updates()
    runpy.run_path(str(ROOT / SCRIPTS[task]), run_name="__main__")
