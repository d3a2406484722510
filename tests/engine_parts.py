"""Parts of the engine for tests without a model: a set of weights over one group, gradients that are known."""

from types import SimpleNamespace

import torch

from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.events import Events
from megatron_fp8.engine.owned_weight import OwnedWeight, Scratch
from megatron_fp8.engine.reductions import Local
from megatron_fp8.engine.set_parts import SetParts
from megatron_fp8.engine.weight_groups import WeightGroups
from megatron_fp8.flags.emulate import emulation_from_args
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import WeightScaling


def one_set(group) -> WeightGroups:
    """All weights, everything over `group`."""
    return WeightGroups("", lambda weight: True, group, group, group, group, group, 1.0, 0, "pp0.tp0")


def parts_of(group, config, weights=(), sharded=False, reduction=None, events=None) -> SetParts:
    """Parts of a set whose E4M3 weights, in the order of its buckets, are those of `weights` that config stores so."""
    stored = [weight for weight in weights if weight.storage == "fp8"]
    return SetParts(
        one_set(group), config, sharded, reduction or Local(), events or Events(), Scratch(), torch.device("cpu"),
        weight_scaling=WeightScaling(len(stored), E4M3, 0, group, "cpu") if stored else None,
        places={weight: i for i, weight in enumerate(stored)},
    )  # fmt: skip


class Known:
    """In place of an gemm.Product: `values`, in FP32, as a GEMM would hand them over."""

    def __init__(self, values: torch.Tensor):
        self.values = values

    def compute(self, dtype=torch.bfloat16, into=None, accumulate=False) -> torch.Tensor:
        if into is None:
            return self.values.to(dtype)
        product = self.values.to(into.dtype)
        return into.add_(product) if accumulate else into.copy_(product)


class OneWeight:
    """An owned weight (N, K) of `values`, alone in a bucket, with the events that its engine would give it.

    Gradients are stored in FP32; storage is "bf16" or "fp8", emulate a value of --fp8-emulate or None.
    """

    def __init__(self, values: torch.Tensor, group, emulate=None, storage="bf16", wgrad=True, activations=False):
        config = SimpleNamespace(
            gemm="bf16" if emulate else "fp8", forward_format=E4M3, grad_format=E5M2, margin=0, grad_accum="fp32",
            partition="even", weight=storage, exp_avg="fp32", exp_avg_sq="fp32", wgrad=wgrad, tp_gather="bf16",
            tp_reduce_scatter="bf16", master="remainder" if storage == "fp8" else "fp32", seed=1,
            keep_transpose_cache=False, activations=activations, draws_masters=True,
            emulate=emulation_from_args(SimpleNamespace(fp8_emulate=emulate)),
        )  # fmt: skip
        self.weight = OwnedWeight(torch.nn.Parameter(values.clone()), config)
        self.weight.path, self.weight.layer_number = "decoder.layers.mlp.linear_fc1", 3
        self.events = Events()
        self.bucket = Bucket([self.weight], parts_of(group, config, [self.weight], events=self.events))
        self.bucket.begin_step(0)
