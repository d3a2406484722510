"""Train at a level; at the third step one rank's weight gradient is poisoned.  The step must leave no trace.

Every rank compares every bit of its state before and after that step, and fails the run if one changed.
`POISON` is the value, `POISONED_RANK` the rank.
"""

import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron_fp8.engine.optimizer import EngineOptimizer, Fp8ChainedOptimizer

VALUE, RANK = float(os.environ["POISON"]), int(os.environ["POISONED_RANK"])
calls = {"reduce": 0, "step": 0}
finalize, step = EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step


def poisoned_finalize(self, num_tokens):
    calls["reduce"] += 1
    if calls["reduce"] == 3 and torch.distributed.get_rank() == RANK:
        self.groups[0].weights[1].main_grad[3, 5] = VALUE
    finalize(self, num_tokens)


def state(chain) -> list[torch.Tensor]:
    """All that a step may change: weights, masters, moments, scales."""
    tensors = [p for chunk in chain.model_chunks for p in chunk.parameters()]
    for part in chain.chained_optimizers:
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [t for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors += [chain.engine.scaling.amax_history, chain.engine.scaling.scale]
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
    return result


EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step = poisoned_finalize, checked_step
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
