"""Train at a level; at step 3, or POISON_STEP, one rank's weight gradient is poisoned.  It must leave no trace.

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
from megatron_fp8.engine.chain import Fp8ChainedOptimizer
from megatron_fp8.engine.grad_store import GradSink, GradStore
from megatron_fp8.engine.optimizer import EngineOptimizer

VALUE, RANK, AT = float(os.environ["POISON"]), int(os.environ["POISONED_RANK"]), os.environ["POISON_AT"]
STEP = int(os.environ.get("POISON_STEP", "3"))
PLACE = 3 * 64 + 5  # in a weight's gradient
calls = {"reduce": 0, "step": 0}
finalize, step, take = EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step, GradSink.take


def now(where: str) -> bool:
    return where == AT and calls["reduce"] == STEP - 1 and torch.distributed.get_rank() == RANK


def poison(store: GradStore, place: int) -> None:
    (stored,) = store.tensors
    if store.storage == "fp8":
        stored[divmod(place, store.numel // store.shards)] = 0x7F
    else:
        stored[place] = VALUE


class Poisoned:
    """A product with one element exchanged."""

    def __init__(self, product):
        self.product = product

    def compute(self, **epilogue) -> torch.Tensor:
        value = self.product.compute(**epilogue)
        value.view(-1)[PLACE] = VALUE
        return value


def poisoned_take(self, product):
    return take(self, Poisoned(product) if now("wgrad") and self.adds == 1 else product)


def poisoned_finalize(self, num_tokens):
    if now("storage"):
        sink = self.buckets[0].weights[1].sink
        poison(sink.store, sink.start + PLACE)
    calls["reduce"] += 1
    finalize(self, num_tokens)


def state(chain) -> list[torch.Tensor]:
    """All that a step may change: weights, masters, moments, scales, mu, and what seeds the noise."""
    tensors = [p for chunk in chain.model_chunks for p in chunk.parameters()]
    for part in chain.chained_optimizers:
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [t for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    (owned,) = chain.engine.sets
    tensors += [owned.scaling.amax_history, owned.scaling.scale]
    if owned.reduction.shared is not None:
        tensors.append(owned.reduction.shared.mu)
    tensors += [torch.tensor(chain.engine.steps), torch.tensor(owned.scaling.warm)]
    return [t.detach().clone().view(-1).view(torch.uint8) for t in tensors]


def checked_step(self):
    calls["step"] += 1
    before = state(self)
    result = step(self)
    after = state(self)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=calls["step"] > 2))
    if calls["step"] == STEP:
        assert result[0] is False, "the poisoned step was not skipped"
        assert changed == 0, f"{changed} tensors changed in the skipped step"
        print(f"rank {torch.distributed.get_rank()}: skipped without a trace", flush=True)
    else:
        assert result[0] is True and changed > 0
        (owned,) = self.engine.sets
        assert owned.scaling.scale.isfinite().all()
        assert owned.reduction.shared is None or owned.reduction.shared.mu.isfinite().all()
    return result


EngineOptimizer.finalize_grads, Fp8ChainedOptimizer.step = poisoned_finalize, checked_step
GradSink.take = poisoned_take
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
