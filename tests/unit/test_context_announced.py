"""In Megatron's own layers the linear behind context-parallel attention announces its backward pass, so that K and V
are under way before attention needs them. The other rank of two has zeros."""

import sys
from types import SimpleNamespace

import architecture
import pytest
import torch

from megatron_fp8.layers import context_parallel
from megatron_fp8.layers.context_exchange import Block

RECOMPUTE = "--recompute-granularity"
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
FP8, BF16 = "--fp8-gemm fp8", "--fp8-gemm bf16"
CASES = {  # the function that asks for K and V
    FP8: "announce",
    BF16: "announce",
    f"{FP8} --group-query-attention --num-query-groups 2 --position-embedding-type rope": "announce",
    f"{FP8} --fp8-activations --swiglu --disable-bias-linear": "announce",
    f"{FP8} {LATENT} --position-embedding-type rope": "announce",
    f"{FP8} {RECOMPUTE} full --recompute-method uniform --recompute-num-layers 1": "announce",
    f"{FP8} {RECOMPUTE} selective --recompute-modules mlp": "announce",
    # the linear sees the node of the recomputation instead
    f"{FP8} {RECOMPUTE} selective --recompute-modules core_attn": "backward",
    # K and V have no memory until the gradient of attention's output comes
    f"{FP8} {LATENT} --position-embedding-type rope {RECOMPUTE} selective --recompute-modules mla_up_proj": "backward",
}


class Zeros:
    """The exchange of the first of two ranks."""

    count = 1

    def __init__(self, pairs, group):
        self.pairs = pairs

    def blocks(self):
        yield Block(len(self.pairs) // 2, torch.zeros_like(self.pairs))

    def send(self, gradients):
        pass

    def add_received(self, dk, dv):
        pass


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


@pytest.mark.parametrize("case", CASES)
def test_what_asks_for_keys(case, monkeypatch):
    asked, begin = [], context_parallel._begin

    def noting(ctx):
        begin(ctx)
        if ctx.begun is not None:
            asked.append(sys._getframe(1).f_code.co_name)

    monkeypatch.setattr(context_parallel, "_begin", noting)
    monkeypatch.setattr(context_parallel, "Gathered", Zeros)
    model = architecture.build(case.split(), level=True)
    architecture.fill(model)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.context = SimpleNamespace(size=lambda: 2)
    found = architecture.run(model)
    assert asked and set(asked) == {CASES[case]} and len(asked) % len(model.decoder.layers) == 0
    assert all(value.isfinite().all() for value in found.values())
