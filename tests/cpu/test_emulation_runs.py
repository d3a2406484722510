"""Runs with emulated GEMM operands, of Megatron's real loop."""

import pytest
from launch import RunFailed
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron

EXACT = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"


def losses(nproc: int, flags: str) -> list[float]:
    return run_megatron(nproc, [*TINY_GPT, *flags.split()]).losses


def test_bf16_emulated_is_bf16():
    few = " ".join(SIX_STEPS)
    assert losses(1, f"--fp8-emulate E8M7 --fp8-emulate-lm-head {few}") == losses(1, f"{EXACT} {few}")


@pytest.mark.slow
def test_from_and_until_which_step():
    plain = losses(1, EXACT)
    later = losses(1, "--fp8-emulate E8M2:truncate --fp8-emulate-from-step 4 --fp8-emulate-until-step 6")
    assert later[:3] == plain[:3] and abs(later[3] - plain[3]) > 1e-4
    recovered = [abs(a - b) for a, b in zip(later[6:], plain[6:], strict=True)]
    assert max(recovered) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["E8M3:stochastic", "weight=E4M3:nearest:tensor,gradient=E5M2:nearest:row"])
def test_recomputation_and_layouts(spec):
    """Recomputed operands have the noise of the first time; other layouts round the same numbers."""
    once = losses(1, f"--fp8-emulate {spec}")
    again = losses(1, f"--fp8-emulate {spec} --recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1")  # fmt: skip
    assert again == once
    assert losses(2, f"--fp8-emulate {spec} {TENSOR_PARALLEL}")[-1] < once[0] - 0.3


@pytest.mark.slow
def test_fewer_bits_train_worse():
    """The head's last layer, all of them, truncated: what E8M3 loses of the loss, E8M7 does not."""
    best = losses(1, EXACT)[-1]
    worse = [losses(1, f"--fp8-emulate {form}:truncate --fp8-emulate-lm-head")[-1] - best for form in ("E8M5", "E8M3")]
    assert worse[1] > worse[0] > -0.01 and worse[1] > 0.03


@pytest.mark.slow
def test_an_evaluation_alone_emulates_what_training_would(tmp_path):
    """--skip-train builds no optimizer, which counts the steps and checks the patterns."""
    data = "--split 80,20,0 --eval-iters 2 --train-iters 4 --lr-warmup-iters 1"
    coarse = "--fp8-emulate activation=E8M1 --fp8-emulate-from-step 4"
    there = [*TINY_GPT, *data.split(), *coarse.split()]
    trained = run_megatron(1, [*there, "--save", str(tmp_path), "--save-interval", "4"])
    alone = [*there, "--load", str(tmp_path), "--skip-train"]
    assert run_megatron(1, alone).validation_losses == trained.validation_losses
    earlier = run_megatron(1, [*alone, "--fp8-emulate-from-step", "5"]).validation_losses
    assert earlier != trained.validation_losses
    with pytest.raises(RunFailed, match=r"--fp8-emulate-layers none\.\*: matches none"):
        run_megatron(1, [*alone, "--fp8-emulate-layers", "none.*"])
