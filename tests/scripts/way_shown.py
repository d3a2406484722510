"""Train, and print how much of the masters' way the E4M3 weights show: the sum of w m over that of m m, where w and m
are the changes of weight and master since the run began. Then how many masters began on their weight.

BF16_ONLY=1: draw within half an ulp of BF16 only, whatever the values came from.
"""

import functools
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training

from megatron_fp8.numerics import dither


def masters_and_weights(engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each weight's part in this rank's shard of its bucket, in float64."""
    engine.prepare_model_params_for_param_sync()
    found = []
    for bucket in (bucket for owned in engine.sets for bucket in owned.buckets):
        masters = bucket.masters().double()
        for i, lo, hi in bucket.pieces():
            found.append((masters[lo:hi], bucket._stored(i, lo, hi).dequantize().double()))
    return found


def train_step(stock):
    @functools.wraps(stock)
    def step(forward, data, model, optimizer, *args, **kwargs):
        if not began:
            began.extend(masters_and_weights(optimizer.engine))
        result = stock(forward, data, model, optimizer, *args, **kwargs)
        sums = torch.zeros(4, dtype=torch.float64)
        for (master, weight), (master_before, weight_before) in zip(
            masters_and_weights(optimizer.engine), began, strict=True
        ):
            way = master - master_before
            sums[0] += ((weight - weight_before) * way).sum()
            sums[1] += way.square().sum()
            sums[2] += (master_before == weight_before).sum()
            sums[3] += len(way)
        torch.distributed.all_reduce(sums)
        if torch.distributed.get_rank() == 0:
            print(f"shown: {sums[0] / sums[1]:.4f}; undrawn: {sums[2] / sums[3]:.4f}", flush=True)
        return result

    return step


if os.environ.get("BF16_ONLY"):
    dither._is_e4m3 = lambda values, scale: torch.zeros_like(values, dtype=torch.bool)
began: list[tuple[torch.Tensor, torch.Tensor]] = []
training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
