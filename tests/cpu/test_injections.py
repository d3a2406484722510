"""NaN and infinity put into gradients, activations, losses, weights, moments and masters of a run (injected.py): each
is skipped, or ends the run before anything of it is saved, on all ranks; and a run that stands still ends."""

import re

import pytest
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

TOOLS = {"PYTHONPATH": script_path()}
UNCHECKED = "--no-check-for-nan-in-loss-and-grad --lr-decay-iters 1000".split()
nightly = pytest.mark.slow


def saving(folder) -> list[str]:
    """A run that saves at every step."""
    few = "--micro-batch-size 4 --train-iters 9 --save-interval 1"
    return [*TINY_GPT, *UNCHECKED, *few.split(), "--save", str(folder)]


@pytest.mark.parametrize(
    ("flags", "seed", "count"),
    [
        ("--fp8-level O3 --use-distributed-optimizer", 1, 10),
        pytest.param("--fp8-level O1 --use-distributed-optimizer", 2, 40, marks=nightly),
        pytest.param("--fp8-level O2 --use-distributed-optimizer", 3, 40, marks=nightly),
        pytest.param("--fp8-level O3 --fp8-grad-accum fp32", 4, 40, marks=nightly),
        pytest.param("--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel", 5, 40, marks=nightly),
        pytest.param("--fp8-level O2 --pipeline-model-parallel-size 2", 6, 40, marks=nightly),
        pytest.param("--fp8-level O3 --fp8-on-spike log --fp8-grad-accum bf16", 7, 40, marks=nightly),
    ],
)
def test_every_injection_is_skipped_or_ends_the_run(flags, seed, count):
    """Ten kinds in turn, in every second step from the third on."""
    run = run_megatron(
        2,
        [*TINY_GPT, *UNCHECKED, *flags.split(), "--train-iters", str(2 * count + 3)],
        script=str(ROOT / "tests/scripts/injected.py"),
        env={**TOOLS, "SEED": str(seed)},
    )
    *_, last = (line for line in run.lines if "injected " in line)
    counts = [int(n) for n in re.findall(r": (\d+)", last)]
    assert len(counts) == 10 and sum(counts) >= count and min(counts) >= count // 10


@pytest.mark.parametrize(
    ("flags", "poison"),
    [
        ("--fp8-level O3", "nan"),
        pytest.param("--fp8-level O1 --pipeline-model-parallel-size 2", "inf", marks=nightly),
    ],
)
def test_a_run_that_skips_step_after_step_ends(flags, poison, tmp_path):
    """Every step from the third on is bad: the third in a row ends the run, before it is saved."""
    with pytest.raises(RunFailed) as failed:
        run_megatron(
            2,
            [*saving(tmp_path), *flags.split(), "--fp8-max-skipped-steps", "3"],
            script=str(ROOT / "tests/scripts/poisoned_for_good.py"),
            env={**TOOLS, "POISON": poison},
        )
    assert failed.value.code == 2
    said = [line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")]
    assert len(said) == 1 and said[0].startswith(
        "megatron_fp8: --fp8-max-skipped-steps 3: as many steps in a row were skipped (gradient norm "
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"  # two skipped steps are no mistake


@nightly
@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-level O1",
        "--fp8-level O3 --use-distributed-optimizer",
        "--fp8-level O1 --save-interval 7",  # seen by the next step
        "--fp8-level O3 checked --save-interval 7",  # by stock's check of the loss too, which is the default
    ],
)
def test_a_damaged_moment_is_not_saved(flags, tmp_path):
    """The checkpoint of a step before is the newest."""
    unknown = ("checked", *UNCHECKED[:1]) if "checked" in flags else ()
    with pytest.raises(RunFailed) as failed:
        run_megatron(
            2,
            [flag for flag in (*saving(tmp_path), *flags.split()) if flag not in unknown],
            script=str(ROOT / "tests/scripts/poisoned_for_good.py"),
            env={**TOOLS, "POISON": "nan", "POISON_AT": "moment"},
        )
    assert failed.value.code == 2
    said = [line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")]
    assert len(said) == 1 and "wrote weights or moments that are not finite, although its gradients were" in said[0]
    saved = tmp_path / "latest_checkpointed_iteration.txt"
    assert saved.read_text() == "2" if "--save-interval" not in flags else not saved.exists()
