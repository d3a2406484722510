"""Train, and put NaN or infinity somewhere in every second step: SEED chooses where, on which rank, in which
micro-batch.  Each rank compares every bit of its state before and after, and fails the run where it is not as expected:

    gradient, stored, stock, activation, loss, weight    the step is skipped, and changes nothing
    value                                                of the loss alone, its gradient finite: the step is made
    m, v, master                                         no checkpoint may be saved after it; the next step ends the run

What the last would end goes on here from the state before.  Rank 0 prints how many there were of each.
"""

import math
import os
import random
import runpy
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core.utils import get_model_config, unwrap_model

from megatron_fp8.engine import bucket_states
from megatron_fp8.engine.chain import Fp8ChainedOptimizer
from megatron_fp8.engine.grad_store import GradSink
from megatron_fp8.engine.optimizer import EngineOptimizer
from megatron_fp8.errors import PassingError

SKIPPED = ("gradient", "stored", "stock", "activation", "loss", "weight")
TAKEN, ENDED = ("value",), ("m", "v", "master")
KINDS = [*SKIPPED, *TAKEN, *ENDED]
FIRST = 3  # step


@dataclass
class Injection:
    kind: str
    value: float
    rank: int
    micro_batch: int
    at: float  # of what there is to choose from, 0 to 1

    @property
    def here(self) -> bool:
        return torch.distributed.get_rank() == self.rank

    def choose(self, things):
        return things[int(self.at * len(things))]

    def put(self, x: torch.Tensor) -> None:
        """Into one element of x, which E4M3 codes hold as NaN."""
        x = x.detach()
        at = int(self.at * x.numel())
        if x.dtype.itemsize == 1:
            x.view(torch.uint8).view(-1)[at] = 0x7F
        else:
            x.view(-1)[at] = self.value


class Plan:
    def __init__(self, seed: int):
        self.draw, self.step, self.now, self.micro_batch = random.Random(seed), 0, None, 0
        self.counts, self.kinds, self.watched = Counter(), [], False
        self.before, self.undo, self.sinks = [], [], []

    def begin(self) -> None:
        self.step += 1
        self.micro_batch, self.now = 0, None
        if self.step >= FIRST and (self.step - FIRST) % 2 == 0:
            self.kinds = self.kinds or self.draw.sample(KINDS, len(KINDS))
            kind, draw = self.kinds.pop(), self.draw
            value = draw.choice([math.nan, math.inf, -math.inf] if kind != "v" else [math.nan, math.inf])
            if kind == "value":
                value = abs(value)
            self.now = Injection(kind, value, draw.randrange(2), draw.randrange(2), draw.random())

    def due(self, kind: str) -> Injection | None:
        """The injection of that kind that is due on this rank now, in this micro-batch."""
        now = self.now
        return now if now is not None and now.kind == kind and now.here else None


plan = Plan(int(os.environ["SEED"]))


class Poisoned:
    def __init__(self, product, injection):
        self.product, self.injection = product, injection

    def compute(self, **epilogue) -> torch.Tensor:
        value = self.product.compute(**epilogue)
        self.injection.put(value)
        return value


def all_tensors(chain) -> list[torch.Tensor]:
    found = [p.data for chunk in chain.model_chunks for p in chunk.parameters()]
    for part in chain.chained_optimizers:
        found += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        found += [t for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    for bucket in chain.engine.buckets:
        found += [bucket.weight, bucket.largest]
        for name in ("master", "exp_avg", "exp_avg_sq"):
            found += bucket_states.tensors(getattr(bucket, name)).values()
    return found


def attributes(chain) -> list[tuple[object, str]]:
    """What a step replaces."""
    scalings = [s for owned in chain.engine.sets for s in (owned.scaling, owned.weight_scaling) if s is not None]
    names = ("scale", "scale_inv", "amax", "amax_history", "warm")
    return [(chain.engine, "steps"), *((s, name) for s in scalings for name in names if hasattr(s, name))]


def snapshot(chain):
    return [(t, t.clone()) for t in all_tensors(chain)], [
        (owner, name, value.clone() if isinstance(value := getattr(owner, name), torch.Tensor) else value)
        for owner, name in attributes(chain)
    ]


def changed(taken) -> int:
    def same(a, b) -> bool:
        if not isinstance(a, torch.Tensor):
            return a == b
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))

    tensors, attrs = taken
    # An amax of activations is forgotten when the next step begins.
    told = [(getattr(o, n), v) for o, n, v in attrs if n != "amax"]
    return sum(not same(a, b) for a, b in [*tensors, *told])


def restore(chain, taken) -> None:
    tensors, attrs = taken
    for tensor, old in tensors:
        tensor.copy_(old)
    for owner, name, old in attrs:
        if isinstance(old, torch.Tensor) and name == "amax":
            getattr(owner, name).copy_(old)
        elif name not in ("scale", "scale_inv"):
            setattr(owner, name, old)
    for owner, name, old in attrs:
        if name == "scale":
            owner._set(old)
    for bucket in chain.engine.buckets:
        bucket._changed()


def with_injections(stock):
    def train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
        if not plan.watched:
            watch(model, optimizer)
        plan.begin()
        if injection := plan.due("weight"):
            weights = [w for bucket in optimizer.engine.buckets for w in bucket.weights]
            plan.undo = snapshot(optimizer)
            injection.put(injection.choose(weights).param.data)
        elif plan.now is not None and plan.now.kind == "weight":
            plan.undo = snapshot(optimizer)
        return stock(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)

    return train_step


def watch(model, optimizer) -> None:
    plan.watched = True
    config = get_model_config(model[0])
    finalize = config.finalize_model_grads_func

    def finalize_model_grads(chunks, *args, **kwargs):
        if injection := plan.due("stock"):
            injection.put(injection.choose([p for c in chunks for p in c.parameters() if p.requires_grad]).main_grad)
        return finalize(chunks, *args, **kwargs)

    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        gpt = unwrap_model(chunk)
        gpt.register_forward_hook(after_model)
        count = len(gpt.decoder.layers)
        for i, layer in enumerate(gpt.decoder.layers):
            layer.register_forward_hook(lambda module, args, out, i=i, count=count: after_layer(out, i, count))


def after_layer(out, i: int, count: int):
    injection = plan.due("activation")
    if injection is None or plan.micro_batch != injection.micro_batch or i != int(injection.at * count):
        return None
    hidden = out[0].clone()
    injection.put(hidden)
    return (hidden, *out[1:])


def after_model(module, args, out):
    """Of a stage, a micro-batch: on the last one its losses."""
    plan.micro_batch += 1
    injection = plan.now
    if injection is None or injection.kind not in ("loss", "value") or not module.post_process:
        return None
    if plan.micro_batch - 1 != injection.micro_batch or (not injection.here and module.pre_process):
        return None  # one stage alone has losses, whichever rank was drawn
    return out * injection.value if injection.kind == "loss" else out + injection.value


def take(stock):
    def poisoned(self, product):
        injection = plan.due("gradient")
        if injection is not None and self is injection.choose(plan.sinks) and self.adds == injection.micro_batch:
            product = Poisoned(product, injection)
        return stock(self, product)

    return poisoned


def finalize_grads(stock):
    def poisoned(self, num_tokens):
        if injection := plan.due("stored"):
            injection.put(injection.choose([b.grads.tensors[0] for b in self.buckets]))
        return stock(self, num_tokens)

    return poisoned


def zero_grad(stock):
    def begin(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        plan.sinks = [w.sink for bucket in self.buckets for w in bucket.weights]

    return begin


def step(stock):
    def checked(self):
        now, expected_end = plan.now, plan.before
        if expected_end:
            try:
                stock(self)
            except PassingError:
                restore(self, expected_end)
                plan.before = []
                return False, 0.0, None
            raise AssertionError("the step after a damaged one was made")
        taken = snapshot(self)
        if now is not None and now.kind in ENDED:
            damage(self, now)
        result = stock(self)
        if now is None:
            assert result[0] is True and changed(taken) > 0
            return result
        plan.counts[now.kind] += 1
        if now.kind in SKIPPED:
            assert result[0] is False, f"{now} was not skipped"
            assert not changed(taken), f"{changed(taken)} tensors changed in the skipped step of {now}"
            if now.kind == "weight":
                restore(self, plan.undo)
        else:
            assert result[0] is True, f"{now} was skipped"
        if now.kind in TAKEN:
            assert all(t.float().isfinite().all() for t, _ in taken[0] if t.is_floating_point())
        if now.kind in ENDED:
            plan.before = taken
            try:
                self.refuse_damage()
            except PassingError:
                pass
            else:
                raise AssertionError(f"a checkpoint would be saved after {now}")
        if torch.distributed.get_rank() == 0:
            print("injected", sum(plan.counts.values()), dict(sorted(plan.counts.items())), flush=True)
        return result

    return checked


def damage(chain, injection: Injection) -> None:
    if not injection.here:
        return
    bucket = injection.choose(chain.engine.buckets)
    _, lo, hi = injection.choose(bucket.pieces())
    name = {"m": "exp_avg", "v": "exp_avg_sq", "master": "master"}[injection.kind]
    part = bucket_states.tensors(bucket.part(name, lo, hi))
    payload = next(iter(part.values()))
    # Beside a remainder, always finite, it is the weight, after the passes that read it.
    injection.put(bucket.weight[bucket.shard][lo:hi] if payload.dtype == torch.int16 else payload)


training.train_step = with_injections(training.train_step)
Fp8ChainedOptimizer.step = step(Fp8ChainedOptimizer.step)
EngineOptimizer.finalize_grads = finalize_grads(EngineOptimizer.finalize_grads)
EngineOptimizer.zero_grad = zero_grad(EngineOptimizer.zero_grad)
GradSink.take = take(GradSink.take)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
