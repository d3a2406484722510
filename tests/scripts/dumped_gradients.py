"""Train at a level; at the first step every rank saves the reduced gradients as the optimizer is to use them.

To the folder `DUMP`, one file a rank: {"ours": {weight: [(start, values (n,) FP32), ...]}, the part of each weight's
gradient that this rank owns; "stock": this rank's other gradients; "norms": {p: the chain's global p-norm}}.
"""

import math
import os
import runpy
import sys
from pathlib import Path

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.engine.chain import Fp8ChainedOptimizer

FOLDER = Path(os.environ["DUMP"])
step = Fp8ChainedOptimizer.step_with_ready_grads


def parts(engine) -> dict[str, list[tuple[int, torch.Tensor]]]:
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    (owned,) = engine.sets
    for bucket in owned.buckets:
        values = bucket.reduced.look() * owned.grad_scale
        for weight, start, end in bucket.spans:
            lo, hi = max(start, bucket.shard.start), min(end, bucket.shard.stop)
            if lo < hi:
                part = values[lo - bucket.shard.start : hi - bucket.shard.start].clone()
                found.setdefault(f"{weight.path}.{weight.layer_number}", []).append((lo - start, part))
    return found


def dumping_step(self):
    if self.engine.steps == 0:
        found = {
            "ours": parts(self.engine),
            "stock": [g.clone() for part in self.chained_optimizers[:-1] for g in part.get_grads_for_grad_norm()],
            "norms": {p: self.get_grad_norm(p) for p in (1.0, 3.0, math.inf, 2.0)},  # the last one clips
        }
        torch.save(found, FOLDER / f"{torch.distributed.get_rank()}.pt")
    return step(self)


Fp8ChainedOptimizer.step_with_ready_grads = dumping_step
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
