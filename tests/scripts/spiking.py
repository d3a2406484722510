"""Train with spikes: at the iterations SPIKE_AT (as "20,24"), the losses, or the input of one linear, are multiplied.

SPIKE_IN names the linear, "loss" by default; SPIKE_BY is the factor.  Every rank says after each step
"rank R iteration N: applied A, changed C, BF16 NAMES": whether the step was made, how many tensors of its state it
changed, and which of its linears will not compute in FP8.
"""

import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_fp8.engine.chain import Fp8ChainedOptimizer
from megatron_fp8.engine.owned_weight import INPUT, OwnedWeight
from megatron_fp8.layers.linear import _OwnedLinear
from megatron_fp8.monitor.writers import current_iteration
from megatron_fp8.ops import source

AT = {int(word) for word in os.environ["SPIKE_AT"].split(",")}
IN, BY = os.environ.get("SPIKE_IN", "loss"), float(os.environ["SPIKE_BY"])
loss, step = GPTModel.compute_language_model_loss, Fp8ChainedOptimizer.step
product, cast = _OwnedLinear._forward_impl, OwnedWeight.cast


def spiking_loss(self, labels, logits):
    found = loss(self, labels, logits)
    return found * BY if IN == "loss" and current_iteration() in AT else found


def spikes(weight) -> bool:
    return weight.name == IN and current_iteration() in AT


def spiking_product(self, input, *args, **kwargs):
    if not self.owned.fp8 and spikes(self.owned):
        input = input * BY
    return product(self, input, *args, **kwargs)


def spiking_cast(self, x, role, *args, **kwargs):
    if role == INPUT and spikes(self):
        x = source.values(x) * BY
    return cast(self, x, role, *args, **kwargs)


def state(chain) -> list[torch.Tensor]:
    """All that a step may change: weights, masters, moments, scales, and what seeds the noise."""
    tensors = [p for chunk in chain.model_chunks for p in chunk.parameters()]
    for part in chain.chained_optimizers:
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [t for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors += [t for kind in map(dict.values, (b.buffers() for b in chain.engine.buckets)) for ts in kind for t in ts]
    for scaling in (owned.scaling for owned in chain.engine.sets if owned.scaling is not None):
        tensors += [scaling.amax_history, scaling.scale]
    tensors.append(torch.tensor(chain.engine.steps))
    return [t.detach().clone().reshape(-1).view(torch.uint8) for t in tensors]


def told_step(self):
    before = state(self)
    result = step(self)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, state(self), strict=False))
    bf16 = [w.name for bucket in self.engine.buckets for w in bucket.weights if not w.fp8]
    rank = torch.distributed.get_rank()
    print(f"\nrank {rank} iteration {current_iteration()}: applied {result[0]}, changed {changed}, BF16 {sorted(bf16)}")
    sys.stdout.flush()
    return result


GPTModel.compute_language_model_loss = spiking_loss
_OwnedLinear._forward_impl, OwnedWeight.cast = spiking_product, spiking_cast
Fp8ChainedOptimizer.step = told_step
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
