"""What must not go wrong quietly: non-finite gradients, frozen inputs, resumed runs, BF16 checkpoints."""

import pytest
from launch import ROOT, RunFailed
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron, script_path

O1 = ["--fp8-level", "O1"]
TWO = ["--train-iters", "2", "--lr-decay-iters", "10"]
TOOLS = {"PYTHONPATH": script_path()}


nightly = pytest.mark.slow


@pytest.mark.parametrize(
    ("value", "rank", "at", "flags"),
    [
        pytest.param("nan", 0, "storage", "--fp8-grad-accum fp32", marks=nightly),
        pytest.param("inf", 1, "storage", "--fp8-grad-accum fp32 --use-distributed-optimizer", marks=nightly),
        pytest.param("-inf", 1, "storage", "--fp8-grad-accum fp32 --fp8-grad-reduce fp32", marks=nightly),
        pytest.param("nan", 1, "storage", "--fp8-grad-accum fp8 --use-distributed-optimizer", marks=nightly),
        pytest.param(
            "-inf", 0, "wgrad", "--fp8-grad-accum fp8 --use-distributed-optimizer --overlap-grad-reduce", marks=nightly
        ),
        ("inf", 1, "wgrad", "--fp8-grad-accum fp8 --fp8-grad-reduce shared"),
        pytest.param("nan", 0, "storage", "--fp8-grad-reduce shared --use-distributed-optimizer", marks=nightly),
        pytest.param("-inf", 1, "storage", "--fp8-grad-accum bf16 --fp8-grad-reduce shared", marks=nightly),
        pytest.param("nan", 0, "wgrad", "--fp8-grad-accum bf16 --use-distributed-optimizer", marks=nightly),
        pytest.param("nan", 1, "wgrad", "--fp8-grad-accum fp8 --fp8-grad-reduce fp32", marks=nightly),
    ],
)
def test_a_non_finite_gradient_skips_the_step_everywhere(value, rank, at, flags):
    run = run_megatron(
        2,
        [*TINY_GPT, *O1, *flags.split(), "--train-iters", "4"],
        script=str(ROOT / "tests/scripts/poisoned_gradient.py"),
        env={**TOOLS, "POISON": value, "POISONED_RANK": str(rank), "POISON_AT": at},
    )
    assert [step.skipped for step in run.steps] == [0, 0, 1, 0]
    for r in range(2):  # the ranks' lines may run into each other
        assert sum(line.count(f"rank {r}: skipped without a trace") for line in run.lines) == 1


def test_a_run_evaluates_after_a_first_step_that_was_skipped():
    """Stock waits for no weight yet then, and fails where it would stop waiting."""
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --train-iters 3"
    evaluates = "--eval-interval 1 --eval-iters 1 --split 8,1,1 --check-weight-hash-across-dp-replicas-interval 1"
    run = run_megatron(
        2,
        [*TINY_GPT, *O1, *flags.split(), *evaluates.split()],
        script=str(ROOT / "tests/scripts/poisoned_gradient.py"),
        env={**TOOLS, "POISON": "nan", "POISONED_RANK": "0", "POISON_AT": "storage", "POISON_STEP": "1"},
    )
    assert [step.skipped for step in run.steps] == [1, 1, 0]  # stock counts the first line in its second again
    assert len(run.validation_losses) >= 3
    assert run.validation_losses[0] > run.validation_losses[2]


@pytest.mark.parametrize("sharded", ["--use-distributed-optimizer", pytest.param("", marks=nightly)])
def test_a_run_is_saved_before_its_first_step_is_made_and_goes_on(sharded, tmp_path):
    """All steps so far were skipped, so torch's Adam had no state: the save ended the run."""
    flags = [*TINY_GPT, *O1, *f"{sharded} --global-batch-size 4 --train-iters 3 --save {tmp_path}".split()]
    poison = {"POISON": "nan", "POISONED_RANK": "0", "POISON_AT": "storage", "POISON_STEP": "1"}
    script = str(ROOT / "tests/scripts/poisoned_gradient.py")
    whole = run_megatron(2, [*flags, "--save-interval", "1"], script=script, env={**TOOLS, **poison})
    again = run_megatron(2, [*flags, "--save-interval", "9", "--load", str(tmp_path), "--ckpt-step", "1"])
    assert whole.steps[0].skipped and len(again.steps) == 2
    assert again.losses[0] == whole.losses[1] and again.grad_norms == whole.grad_norms[1:]


def test_a_step_over_stocks_threshold_is_skipped_and_told():
    """OptimizerConfig.grad_norm_skip_threshold: on all ranks, also where a stage's rank has no parameter of stock's."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --disable-bias-linear".split()
    flags = [*TINY_GPT, *layout, "--fp8-level", "O3", "--fp8-log-interval", "1", "--fp8-on-spike", "log"]
    flags += ["--micro-batch-size", "4", "--global-batch-size", "4"]
    run = run_megatron(
        4,
        [*flags, "--train-iters", "4"],
        script=str(ROOT / "tests/scripts/norm_threshold.py"),
        env={**TOOLS, "THRESHOLD": "1"},  # without it the norms are 0.91, 1.08, 1.05 and 0.88
    )
    skipped = [step.skipped for step in run.steps]
    assert skipped[0] == 0 and sum(skipped) >= 1
    assert sum("calls {'begin_step': 4, 'judge': 4, 'end_step': 4}" in line for line in run.lines) == 4


def test_a_frozen_embedding_stops_no_weight_gradient():
    script = str(ROOT / "tests/scripts/frozen_embedding.py")
    run = run_megatron(1, [*TINY_GPT, *O1, "--train-iters", "3"], script=script, env=TOOLS)
    assert sum("smallest gradient norm" in line for line in run.lines) == 3


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(
            2, "--use-distributed-optimizer --fp8-amax-history-len 4 --fp8-amax-compute-algo max", marks=nightly
        ),
        pytest.param(1, "--fp8-recipe tensorwise", marks=nightly),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(nproc, flags, tmp_path):
    flags = [*TINY_GPT, *O1, *flags.split()]
    whole = run_megatron(nproc, flags)
    save = ["--save", str(tmp_path), "--save-interval", "5", "--exit-interval", "5"]
    first = run_megatron(nproc, [*flags, *save])
    rest = run_megatron(nproc, [*flags, "--load", str(tmp_path)])
    assert first.grad_norms + rest.grad_norms == whole.grad_norms
    resumed, expected = first.losses + rest.losses, list(whole.losses)
    del resumed[6], expected[6]  # stock logs the mean of a resumed run's first two losses there
    assert resumed == expected


@nightly
def test_a_resumed_run_may_change_its_amax_history(tmp_path):
    flags = [*TINY_GPT, *O1, "--fp8-amax-compute-algo", "max"]
    save = ["--save", str(tmp_path), "--save-interval", "5", "--exit-interval", "5"]
    first = run_megatron(1, [*flags, "--fp8-amax-history-len", "4", *save])
    for length in ("2", "8"):
        rest = run_megatron(1, [*flags, "--fp8-amax-history-len", length, "--load", str(tmp_path)])
        assert len(rest.losses) == 5 and rest.losses[0] < first.losses[0] - 0.2


@pytest.mark.parametrize(
    ("nproc", "flags", "form"),
    [
        pytest.param(1, [], "torch", marks=nightly),  # the names of the local spec; also test_changed_resumes.py
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"], "torch_dist"),  # of the TE spec
    ],
)
def test_a_stock_checkpoint_loads_at_o1(nproc, flags, form, tmp_path):
    """Weights only (--finetune), across tensor-parallel sizes: the loss goes on from where stock left it."""
    save = ["--save", str(tmp_path), "--save-interval", "6", "--ckpt-format", form]
    stock = run_megatron(1, [*TINY_GPT, *SIX_STEPS, *save])
    load = ["--load", str(tmp_path), "--finetune", *TWO, *O1]
    ours = run_megatron(nproc, [*TINY_GPT, *load, *flags])
    assert ours.losses[0] == pytest.approx(stock.losses[-1], abs=0.1)
    assert ours.losses[0] < stock.losses[0] - 0.25


def test_an_o1_checkpoint_loads_in_stock(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "6"]
    ours = run_megatron(2, [*TINY_GPT, *SIX_STEPS, *O1, *save])
    stock = run_megatron(1, [*TINY_GPT, "--load", str(tmp_path), "--finetune", *TWO])
    assert stock.losses[0] == pytest.approx(ours.losses[-1], abs=0.1)
    assert stock.losses[0] < ours.losses[0] - 0.25


def test_a_pretrained_checkpoint_is_read_as_one_that_is_loaded(tmp_path):
    """Alone, without --load and --save: verified, found without its tracker, refused in one line."""
    folder = tmp_path / "first"
    few = [*TINY_GPT, "--fp8-level", "O3", "--global-batch-size", "4"]
    start = [*few, *TWO]
    run_megatron(1, [*start, "--save", str(folder), "--save-interval", "2"])
    pretrained = [*start, "--pretrained-checkpoint", str(folder)]
    loaded = run_megatron(1, [*start, "--load", str(folder), "--finetune"])
    assert run_megatron(1, pretrained).losses == loaded.losses
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert run_megatron(1, pretrained).losses == loaded.losses
    file = max(folder.glob("iter_0000002/*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunFailed, match=rf"--pretrained-checkpoint {folder}: iter_0000002/{file.name} is damaged"):
        run_megatron(1, pretrained)
    for extra in ([], ["--load", str(tmp_path / "none")]):
        with pytest.raises(RunFailed, match=r"No checkpoint found in .*; give a folder that --save wrote") as failed:
            run_megatron(1, [*start, *extra, "--pretrained-checkpoint", str(tmp_path)])
        assert f"megatron_fp8: --pretrained-checkpoint {tmp_path}: " in str(failed.value)
        assert "Traceback" not in str(failed.value)


def test_a_step_that_failed_is_made_again_from_its_checkpoint(tmp_path):
    """Stock makes a step with a bad loss twice; if it stays so, it saves, ends, and wants another GPU to judge."""
    run = [*TINY_GPT, "--fp8-level", "O3", "--save", str(tmp_path), "--save-interval", "100"]
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*run, *"--error-injection-rate 3 --error-injection-type correct_result".split()])
    assert failed.value.code == 16 and "successfully saved checkpoint from iteration       1" in str(failed.value)
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*run, "--load", str(tmp_path)])
    assert failed.value.code == 16 and "Got rescheduled on the same GPU" in str(failed.value), str(failed.value)
