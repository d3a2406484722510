"""Train at a level; at the third step one rank's weight gradient is poisoned.  The step must leave no trace.

Every rank compares every bit of its state before and after that step, and fails the run if one changed.
`POISON` is the value, `POISONED_RANK` the rank.  `POISON_AT`: "storage", where it is written into the stored gradient
just before the reduction (FP8 has no infinity: it stores NaN), or "wgrad", where the step's second micro-batch brings
it, so that it passes through the addition too.
"""

import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.engine.gradients import GradSlot, GradStore
from megatron_fp8.engine.optimizer import EngineOptimizer, Fp8ChainedOptimizer

VALUE, RANK, AT = float(os.environ["POISON"]), int(os.environ["POISONED_RANK"]), os.environ["POISON_AT"]
PLACE = 3 * 64 + 5  # in a weight's gradient
calls = {"reduce": 0, "step": 0}
finalize, step, add = EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step, GradSlot.add


def now(where: str) -> bool:
    return where == AT and calls["reduce"] == 2 and torch.distributed.get_rank() == RANK


def poison(store: GradStore, place: int) -> None:
    (stored,) = store.tensors
    if store.storage == "fp8":
        stored[divmod(place, store.numel // store.shards)] = 0x7F
    else:
        stored[place] = VALUE


def poisoned_add(self, wgrad):
    if now("wgrad") and self.adds == 1:

        def poisoned(out=None, accumulate=False, dtype=None):
            value = wgrad(out=out, accumulate=accumulate, dtype=dtype)
            value.view(-1)[PLACE] = VALUE
            return value

        return add(self, poisoned)
    return add(self, wgrad)


def poisoned_finalize(self, num_tokens):
    if now("storage"):
        slot = self.buckets[0].weights[1].grad
        poison(slot.store, slot.start + PLACE)
    calls["reduce"] += 1
    finalize(self, num_tokens)


def state(chain) -> list[torch.Tensor]:
    """All that a step may change: weights, masters, moments, scales, mu, and what seeds the noise."""
    tensors = [p for chunk in chain.model_chunks for p in chunk.parameters()]
    for part in chain.chained_optimizers:
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [t for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors += [chain.engine.scaling.amax_history, chain.engine.scaling.scale]
    if chain.engine.shared_scale is not None:
        tensors.append(chain.engine.shared_scale.mu)
    tensors.append(torch.tensor(chain.engine.steps))
    return [t.detach().clone().view(-1).view(torch.uint8) for t in tensors]


def checked_step(self):
    calls["step"] += 1
    before = state(self)
    result = step(self)
    after = state(self)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=calls["step"] > 1))
    if calls["step"] == 3:
        assert result[0] is False, "the poisoned step was not skipped"
        assert changed == 0, f"{changed} tensors changed in the skipped step"
        print(f"rank {torch.distributed.get_rank()}: skipped without a trace", flush=True)
    else:
        assert result[0] is True and changed > 0
        assert self.engine.scaling.scale.isfinite().all()
        assert self.engine.shared_scale is None or self.engine.shared_scale.mu.isfinite().all()
    return result


EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step = poisoned_finalize, checked_step
GradSlot.add = poisoned_add
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
