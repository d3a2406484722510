"""Mixtures of experts in Megatron's real loop at a level: shared experts are linears of the engine."""

import re

from megatron_runs import TINY_GPT, run_megatron

MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none"
SHARED = f"{MOE} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 64"
FP8_OFF = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"


def train(flags: str, ranks: int = 1, steps: int = 4):
    few = ["--train-iters", str(steps), "--lr-decay-iters", "10", "--fp8-log-exact"]
    run = run_megatron(ranks, [*TINY_GPT, *few, *flags.split()], timeout=300)
    assert len(run.losses) == steps
    return run


def exact(run, what: str = "lm loss") -> list[str]:
    """With all digits."""
    return re.findall(rf"exact {what} ([^\s;]+)", "\n".join(run.lines))


def linears(run) -> tuple[int, int]:
    """(in FP8, all) of the level's line."""
    return tuple(map(int, re.search(r"the GEMMs of (\d+) of (\d+) linears", "\n".join(run.lines)).groups()))


def test_shared_experts_are_linears_and_train_as_stocks():
    """Two layers of two attention linears, a dense MLP's two, a shared expert's two."""
    assert linears(train(f"{SHARED} --fp8-level O3", steps=1)) == (8, 8)
    stock, ours = train(SHARED), train(f"{SHARED} {FP8_OFF}")
    assert exact(ours)[:2] == exact(stock)[:2] != []


def test_a_shared_expert_of_stocks_is_loaded_and_goes_back(tmp_path):
    """Stock saves two steps, a level goes on, and its weights are stock's again."""
    save = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save-interval 2"
    whole = train(f"{SHARED} {save} --save {tmp_path / 'stock'}", steps=4)
    ours = f"{SHARED} {FP8_OFF} --use-distributed-optimizer --load {tmp_path / 'stock'} --ckpt-step 2"
    again = run_megatron(1, [*TINY_GPT, *f"{ours} --train-iters 4 --lr-decay-iters 10".split(), "--fp8-log-exact"])
    assert exact(again)[0] == exact(whole)[2] and len(again.losses) == 2
