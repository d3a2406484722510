"""Train, and print how much of the masters' way the weights show that GEMMs read (tuned_gpt.way_shown). Then how many
masters began on their weight.

BF16_ONLY=1: draw within half an ulp of BF16 only, whatever the values came from.
"""

import functools
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from tuned_gpt import masters_and_weights, way_shown

from megatron_fp8.numerics import dither


def train_step(stock):
    @functools.wraps(stock)
    def step(forward, data, model, optimizer, *args, **kwargs):
        if not began:
            began.extend(masters_and_weights(optimizer.engine))
        result = stock(forward, data, model, optimizer, *args, **kwargs)
        undrawn = sum((master == weight).sum().item() for master, weight in began)
        count = sum(masters.numel() for masters, _ in began)
        sums = torch.tensor([*way_shown(optimizer.engine, began), undrawn, count], dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        if torch.distributed.get_rank() == 0:
            print(f"shown: {sums[0] / sums[1]:.4f}; undrawn: {sums[2] / sums[3]:.4f}", flush=True)
        return result

    return step


if os.environ.get("BF16_ONLY"):
    dither._is_e4m3 = lambda values, scale: torch.zeros_like(values, dtype=torch.bool)
began: list[torch.Tensor] = []
training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
