"""A transformer layer's linears as a GPU's host runs them, for counts: on the CPU, where kernels are not launched.

    x -> norm, QKV -> split, (attention left out) -> proj -> norm, fc1 -> SwiGLU, fc2          and backward

in a step that is not the first, weights in E4M3, alone or as one of two tensor-parallel ranks under sequence
parallelism. The two ranks' group is torch's "fake" one, of one process; what its collectives copy does not count. Left
out are stock's own part of a layer, attention, and what a launch itself costs.
"""

import cProfile
import gc
import pstats
import time

import torch
import torch.distributed as dist
from engine_parts import OneWeight
from torch.profiler import ProfilerActivity, profile

from megatron_fp8.layers.linear import product
from megatron_fp8.layers.mlp import ActivationCast
from megatron_fp8.layers.norm import NormCast, NormKind
from megatron_fp8.layers.parcel import Calls, Parcel, carried
from megatron_fp8.layers.self_attention import Rotary, SplitQkv
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

S, B, K, F, HEADS = 32, 2, 64, 128, 4  # tokens, micro-batch, width, feed-forward, heads of K / HEADS


class Layer:
    """One rank's layer; alone: the group of this rank; ranks: the tensor-parallel group."""

    def __init__(self, alone, ranks):
        parts = ranks.size()
        shapes = {"qkv": (3 * K, K), "proj": (K, K), "fc1": (2 * F, K), "fc2": (K, F)}
        ones = {name: OneWeight(torch.randn(shape).bfloat16(), alone, storage="fp8") for name, shape in shapes.items()}
        scaling = DelayedScaling([E4M3, E5M2] * len(ones), 4, "max", 0, "cpu")
        scaling.update()
        for i, one in enumerate(ones.values()):
            one.weight.casts.scaling, one.weight.casts.slots = scaling, (2 * i, 2 * i + 1)
            one.weight.config.tp_gather = "fp8"
        self.weights = {name: one.weight for name, one in ones.items()}
        self.calls = {name: Calls(weight) for name, weight in self.weights.items()}
        self.group, self.parallel = ranks, parts > 1
        self.anchor = torch.zeros(0, requires_grad=True)
        self.gain = torch.ones(K, dtype=torch.bfloat16, requires_grad=True)
        self.x = torch.randn(S // parts, B, K).bfloat16().requires_grad_()
        self.kind = NormKind(True, 1e-5, False)

    def parcel(self, name: str) -> Parcel:
        sum_y = self.parallel and name in ("proj", "fc2")
        return Parcel(self.calls[name].plan(self.group, self.parallel, False, training=True, sum_y=sum_y))

    def normed(self, name: str, x: torch.Tensor):
        normed, x = NormCast.apply(self.parcel(name), x, self.gain, None, self.kind)
        return product(normed, self.anchor, carried(normed)), x

    def forward(self) -> torch.Tensor:
        mixed, x = self.normed("qkv", self.x)
        q, _, _ = SplitQkv.apply(mixed, HEADS, 1, Rotary(), False, carried(mixed))
        x = product(q.reshape(*q.shape[:2], K), self.anchor, self.parcel("proj"), residual=x)
        h, x = self.normed("fc1", x)
        activated = ActivationCast.apply(self.parcel("fc2"), h, None, "swiglu", carried(h))
        return product(activated, self.anchor, carried(activated), residual=x)

    def step(self) -> None:
        y = self.forward()
        torch.autograd.grad(y, (self.x, self.gain), torch.ones_like(y))


def counts(run) -> dict[str, int]:
    """Calls in one of `run`: of ATen; of Python functions of ours, of all, and of C functions."""
    watched = cProfile.Profile()
    watched.enable()
    run()
    watched.disable()
    calls = pstats.Stats(watched).stats
    return {
        "ATen": aten_calls(run),
        "ours": sum(figures[1] for where, figures in calls.items() if "/megatron_fp8/" in where[0]),
        "Python": sum(figures[1] for where, figures in calls.items() if where[0] != "~"),
        "C": sum(figures[1] for where, figures in calls.items() if where[0] == "~"),
    }


def aten_calls(run, inside: bool = False) -> int:
    """Calls of ATen in one of `run`, by torch's profiler. Not those that ATen itself makes for one, unless
    `inside`, nor those of a collective: the fake group's copies."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.name.startswith("aten::") and (inside or not _inside(event.cpu_parent)) for event in seen.events())


def _inside(event) -> bool:
    while event is not None and not event.name.startswith(("aten::", "c10d::")):
        event = event.cpu_parent
    return event is not None


def microseconds(run, times: int = 300) -> float:
    """The least of several calls, without garbage collection."""
    gc.disable()
    least = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began)
    gc.enable()
    return 1e6 * least


def fake_groups():
    """(this rank alone, one of two ranks) of a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return dist.new_group([0]), dist.group.WORLD
