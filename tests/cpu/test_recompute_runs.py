"""Recomputing activations changes no digit, with biases or none, whichever modules it is of."""

import pytest
from megatron_runs import TINY_GPT, run_megatron

nightly = pytest.mark.slow
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16"
EXPERTS = "--num-experts 2 --moe-ffn-hidden-size 64 --moe-layer-freq 2 --expert-tensor-parallel-size 1"
SHARED = "--moe-shared-expert-intermediate-size 64"
BIASES = [flag for flag in TINY_GPT if flag not in ("--disable-bias-linear", "--swiglu")] + ["--no-bias-gelu-fusion"]


@pytest.mark.parametrize(
    ("base", "nproc", "flags", "modules"),
    [
        pytest.param(BIASES, 1, "--fp8-level O3", "mlp", id="an MLP with biases"),  # stock hangs
        pytest.param(BIASES, 2, f"--fp8-level O1 {SP}", "core_attn layernorm mlp", id="O1 biases", marks=nightly),
        pytest.param(TINY_GPT, 1, "--fp8-level O3 --no-fp8-wgrad", "mlp", id="BF16 gradients", marks=nightly),
        pytest.param(TINY_GPT, 2, f"--fp8-level O2 {SP}", "core_attn layernorm mlp", id="O2", marks=nightly),
        pytest.param(BIASES, 2, f"--fp8-level O3 {SP}", "core_attn layernorm mlp", id="O3 biases", marks=nightly),
        pytest.param(BIASES, 2, f"--fp8-level O3 {SP} {EXPERTS}", "moe mlp", id="experts with biases", marks=nightly),
        pytest.param(
            TINY_GPT, 2, f"--fp8-level O3 {SP} {EXPERTS} {SHARED}", "moe shared_experts layernorm", id="experts",
            marks=nightly,
        ),
        pytest.param(
            BIASES, 2, f"--fp8-level O3 {SP} {LATENT}", "mla_up_proj layernorm mlp", id="latent", marks=nightly,
        ),
    ],
)  # fmt: skip
def test_recomputed_runs_have_the_same_losses(base, nproc, flags, modules):
    plain = [*base, *flags.split(), *"--train-iters 4 --global-batch-size 4".split()]
    recomputed = [*plain, "--recompute-granularity", "selective", "--recompute-modules", *modules.split()]
    kept, again = run_megatron(nproc, plain), run_megatron(nproc, recomputed)
    assert again.losses == kept.losses and len(kept.losses) == 4
    assert again.grad_norms == kept.grad_norms
