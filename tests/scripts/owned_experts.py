"""Train with owned experts, and say of each what became of it: a line of JSON for each of its weights.

    owned_experts.py [FLAGS]      FP8_TEST_ONLY=1  routes every token to expert 1;  =1,0  from step 2 on to expert 0
                                  FP8_TEST_NAN=2,3  makes expert 3's gradients of fc1 NaN in step 2

    {"rank", "key", "digest": of the weight, "start": that before the first step, "m", "v": largest magnitudes of the
     moments, "gradients": how many were taken, "scales": of its casts, "bytes": of all experts' engine, "numel"}
"""

import atexit
import hashlib
import json
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.global_vars import get_args

from megatron_fp8.engine.optimizer import EngineOptimizer
from megatron_fp8.engine.owned_weight import OwnedWeight
from megatron_fp8.gemm import Product
from megatron_fp8.numerics.scaled import ScaledTensor

ONLY, NAN = os.environ.get("FP8_TEST_ONLY"), os.environ.get("FP8_TEST_NAN")
build, route, take = EngineOptimizer.__init__, TopKRouter.forward, OwnedWeight.take_gradient
starts: dict[OwnedWeight, str] = {}
taken: dict[OwnedWeight, int] = {}


def only_one(self, *args, **kwargs):
    probs, chosen = route(self, *args, **kwargs)
    column = torch.zeros_like(chosen)
    now = [*map(int, ONLY.split(","))][: 1 + get_args().curr_iteration]
    column[:, now[-1]] = True
    return probs.sum(1, keepdim=True) * column, column


def take_gradient(self, product):
    taken[self] = taken.get(self, 0) + 1
    if NAN and self.path.endswith("linear_fc1") and [self.step, self.expert] == [*map(int, NAN.split(","))]:
        product = Product(ScaledTensor(product.a.payload, torch.tensor(torch.nan), product.a.columns), product.b)
    take(self, product)


def digest(weight: OwnedWeight) -> str:
    return hashlib.sha256(weight.dense().detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def built(self, *args):
    build(self, *args)
    for weight in self.sets[0].weights:
        starts[weight] = digest(weight)
    atexit.register(say, self)


def say(engine):
    (owned, _), rank = engine.sets, torch.distributed.get_rank()
    kept = [t for bucket in owned.buckets for tensors in bucket.buffers().values() for t in tensors]
    total, numel = sum(t.nbytes for t in kept), sum(weight.param.numel() for weight in owned.weights)
    for bucket in owned.buckets:
        for i, lo, hi in bucket.pieces():
            weight = bucket.weights[i]
            moments = [bucket.read(name)[lo:hi].abs().max().item() for name in ("exp_avg", "exp_avg_sq")]
            scaling = weight.casts.scaling
            scales = [] if scaling is None else [scaling.scale[slot].item() for slot in weight.casts.slots]
            line = {
                "rank": rank, "key": weight.key, "digest": digest(weight), "start": starts[weight],
                "m": moments[0], "v": moments[1], "gradients": taken.get(weight, 0), "scales": scales,
                "bytes": total, "numel": numel,
            }  # fmt: skip
            print(f"expert {json.dumps(line)}\n", end="", flush=True)


EngineOptimizer.__init__, OwnedWeight.take_gradient = built, take_gradient
if ONLY:
    TopKRouter.forward = only_one
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
