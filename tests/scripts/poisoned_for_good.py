"""Train; from the third step on rank 1's gradients hold POISON in every step, or, with POISON_AT=moment, in the third
step one of its first moments does."""

import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.engine import bucket_states
from megatron_fp8.engine.optimizer import EngineOptimizer

VALUE, MOMENT = float(os.environ["POISON"]), os.environ.get("POISON_AT") == "moment"
finalize = EngineOptimizer.finalize_grads
calls = []


def put(payload: torch.Tensor) -> None:
    if payload.dtype.itemsize == 1:
        payload.view(torch.uint8).view(-1)[7] = 0x7F  # NaN
    else:
        payload.view(-1)[7] = VALUE


def poisoned(self, num_tokens):
    calls.append(self)
    here = torch.distributed.get_rank() == 1
    if here and MOMENT and len(calls) == 3:
        put(bucket_states.tensors(self.buckets[0].exp_avg)["payload"])
    if here and not MOMENT and len(calls) >= 3:
        put(self.buckets[0].grads.tensors[0])
    finalize(self, num_tokens)


EngineOptimizer.finalize_grads = poisoned
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
