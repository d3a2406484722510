"""Multi-latent attention trains at every level and layout, as stock Megatron's Transformer Engine spec has it.

Stock's own spec without Transformer Engine cannot build it, so the oracle is its spec for that, over a stand-in
(stand_in_te.py).  Both start from the same weights, by the seed.
"""

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron

LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--attention-backend auto --train-iters 5"
)
COMPRESSED = f"{LATENT} --qk-layernorm --q-lora-rank 48"
EXACT = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"
# Megatron's kernel: torch's attention rounds elsewhere.
UNFUSED = "--attention-backend unfused --attention-softmax-in-fp32"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
nightly = pytest.mark.slow


def train(nproc: int, flags: str):
    return run_megatron(nproc, [*TINY_GPT, *flags.split()])


def stock(nproc: int, flags: str):
    script = str(ROOT / "tests/scripts/with_stand_in_te.py")
    flags = [*TINY_GPT, *flags.split(), "--transformer-impl", "transformer_engine"]
    return run_megatron(nproc, flags, script=script, cold=True)  # a warm process has imported Megatron without one


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(2, f"{COMPRESSED} --fp8-level O3 {TP} --sequence-parallel", id="O3 sequence parallel"),
        pytest.param(2, f"{COMPRESSED} --fp8-level O3 {PP}", id="O3 pipeline", marks=nightly),
        pytest.param(2, f"{LATENT} --fp8-level O3 --use-distributed-optimizer", id="O3 data", marks=nightly),
        pytest.param(2, f"{COMPRESSED} --fp8-level O2 {TP}", id="O2 tensor parallel", marks=nightly),
        pytest.param(1, f"{LATENT} --fp8-level O1", id="O1", marks=nightly),
    ],
)
def test_trains(nproc, flags):
    run = train(nproc, f"{flags} --global-batch-size 4")
    assert [line for line in run.lines if "--multi-latent-attention: the down projections stay in BF16" in line]
    assert run.losses[0] > 5.4 and run.losses[-1] < run.losses[0] - 0.1


@nightly
@pytest.mark.parametrize("model", [LATENT, COMPRESSED], ids=["", "queries compressed"])
def test_computes_what_stock_does_in_every_layout(model):
    layouts = [(1, ""), (2, f"{TP} --sequence-parallel")]
    for nproc, layout in [*layouts, (2, TP), (2, PP)] if model == COMPRESSED else layouts:
        flags = f"{model} {UNFUSED} {layout}"
        ours, theirs = train(nproc, f"{flags} {EXACT}"), stock(nproc, flags)
        assert ours.losses[0] == theirs.losses[0]
        assert ours.losses == pytest.approx(theirs.losses, abs=1.5e-4)
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, abs=2e-3)


@nightly
def test_resumes_bit_for_bit_and_elsewhere(tmp_path):
    flags = f"{COMPRESSED} --fp8-level O3 --use-distributed-optimizer --train-iters 6"
    tensor = f"{flags} {TP} --sequence-parallel"
    whole = train(2, tensor)
    train(2, f"{tensor} --save {tmp_path} --save-interval 3 --exit-interval 3")
    again = train(2, f"{tensor} --load {tmp_path}")
    assert again.losses[::2] == whole.losses[3::2]
    assert again.losses[1] == pytest.approx(sum(whole.losses[3:5]) / 2, abs=1e-6)  # stock's second line after a start
    assert again.grad_norms == whole.grad_norms[3:]
    elsewhere = train(2, f"{flags} {PP} --load {tmp_path}")
    assert elsewhere.losses[::2] == pytest.approx(whole.losses[3::2], abs=0.02)
