"""--fp8-lm-head in Megatron's own loop: it learns as without, on every layout, and is refused where it cannot be."""

import pytest
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron

UNTIED = [*TINY_GPT, *"--train-iters 4 --lr-decay-iters 10 --global-batch-size 4".split()]
TIED = [flag for flag in UNTIED if flag != "--untie-embeddings-and-output-weights"]


def losses(nproc: int, *flags: str, base=UNTIED) -> list[float]:
    return run_megatron(nproc, [*base, "--fp8-level", "O3", *flags]).losses


@pytest.mark.parametrize("base", [pytest.param(UNTIED, marks=pytest.mark.slow), TIED], ids=["untied", "tied"])
def test_it_learns_as_without(base):
    without, with_it = losses(1, base=base), losses(1, "--fp8-lm-head", base=base)
    assert with_it != without
    assert with_it == pytest.approx(without, rel=3e-3)


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        pytest.param("--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2 --use-distributed-optimizer", marks=pytest.mark.slow),
    ],
)
def test_layouts(layout):
    assert losses(2, "--fp8-lm-head", *layout.split()) == pytest.approx(losses(2, *layout.split()), rel=3e-3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fp8-gemm bf16", "--fp8-lm-head: this run's GEMMs are BF16"),
        ("--make-vocab-size-divisible-by 1 --vocab-size 257", "a head of 257 rows .* is not a multiple of 16; use 16"),
    ],
)
def test_refusals(flags, told):
    with pytest.raises(RunFailed, match=told):
        losses(1, "--fp8-lm-head", *flags.split())
