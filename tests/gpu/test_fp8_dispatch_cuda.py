"""Rows sent to experts in FP8 against rows sent in BF16, on two GPUs and on four: all losses have the same digits."""

import re

import pytest
import torch
from megatron_runs import TINY_GPT, run_megatron

pytestmark = pytest.mark.gpu
# Two experts a token: the sum of two rows does not depend on the order in which stock's atomics add them.
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none "
MOE += "--fp8-experts --moe-grouped-gemm --moe-token-dispatcher-type alltoall --use-distributed-optimizer "
MOE += "--fp8-log-exact --train-iters 6 --lr-decay-iters 10"


@pytest.mark.parametrize("way", ["forward", "both"])
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--fp8-level O3 --expert-model-parallel-size 2", 2),
        ("--fp8-level O1 --expert-model-parallel-size 2 --overlap-grad-reduce --overlap-param-gather", 2),
        ("--fp8-level O3 --expert-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe", 2),
        ("--fp8-level O3 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--fp8-level O3 --expert-model-parallel-size 4", 4),
    ],
)
def test_all_digits_are_those_of_bf16(way, flags, ranks):
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    wide, narrow = (
        run_megatron(ranks, [*TINY_GPT, *f"{MOE} {flags} {more}".split()], gpu=True, timeout=120)
        for more in ("", f"--fp8-dispatch {way}")
    )
    exact = [re.findall(r"exact (?:lm loss|grad norm) ([^\s;]+)", "\n".join(run.lines)) for run in (wide, narrow)]
    assert exact[0] == exact[1] and len(exact[0]) >= 6
