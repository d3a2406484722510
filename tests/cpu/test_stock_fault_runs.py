"""Stock Megatron ends in a traceback at each entry of flags/stock_faults.py; a level gives one line."""

import pytest
from launch import RunFailed
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron, script_path

REJECTED = """
import runpy
from launch import ROOT
import megatron.core.tensor_parallel.random
from megatron_fp8.plugin import install
install()
import megatron.training.training as training
stock = training.train_step
def train_step(forward_step_func, data_iterator, model, *rest, **kwargs):
    for weight in model[0].parameters():
        weight.data.fill_(float("nan"))
    return stock(forward_step_func, data_iterator, model, *rest, **kwargs)
training.train_step = train_step
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
"""

FAULTS = [
    ("--full-validation --eval-interval 1", "TypeError: 'int' object is not subscriptable"),
    ("--no-pad-vocab-size", "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'"),
    ("--phase-transition-iterations 2", "TypeError: '<=' not supported between instances of 'NoneType' and 'int'"),
    ("--phase-transition-iterations 2,x", "ValueError: invalid literal for int() with base 10: 'x'"),
    ("--position-embedding-type mrope --mrope-section 4 2 2", "IndexError: too many indices for tensor of dimension 2"),
    # Its weights are NaN or zero here, as the memory is: NaN from the first loss on.
    ("--no-initialization", "TypeError: expected str, bytes or os.PathLike object, not NoneType"),
    *(
        pytest.param(f"{flags} --num-experts 4", traceback, marks=pytest.mark.slow)
        for flags, traceback in [
            ("--moe-layer-freq 0", "ZeroDivisionError: "),
            ("--moe-input-jitter-eps 0", "ValueError: Expected parameter low "),
            ("--moe-router-topk 2 --moe-router-group-topk 1 --moe-router-num-groups 4", "selected index k out"),
        ]
    ),
    # A check of Megatron's, in its own code: no traceback, but a remark that helps no user.
    ("--use-sharp", "data parallel group with CP (with GTP_remat) is not initialized"),
]


def ends(flags: str, level: str) -> list[str]:
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*TINY_GPT, *SIX_STEPS, *flags.split(), "--fp8-level", level])
    return str(failed.value).splitlines()


def test_a_command_without_data():
    without = [flag for flag in TINY_GPT if flag != "--mock-data"]
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*without, *SIX_STEPS, "--fp8-level", "O3"])
    assert "Traceback" not in str(failed.value)
    assert "megatron_fp8: --data-path is missing: give the training data, or add --mock-data\n" in str(failed.value)


@pytest.mark.parametrize(("flags", "traceback"), FAULTS)
def test_a_level_says_in_one_line_what_stock_fails_at(flags, traceback):
    assert traceback in "\n".join(ends(flags, "O0"))  # if Megatron no longer fails, the entry can go
    said = ends(flags, "O1")
    flag = flags.split()[0]
    assert sum(line.startswith(f"megatron_fp8: {flag}") for line in said) == 1, said
    assert not any("Traceback" in line for line in said), said


def test_without_padding_at_a_size_that_is_named():
    flags = "--fp8-level O1 --no-pad-vocab-size --padded-vocab-size 256".split()
    run = run_megatron(1, [*TINY_GPT, *SIX_STEPS, *flags, "--train-iters", "3"])
    assert run.losses[-1] < run.losses[0]


def test_an_evaluation_with_another_micro_batch_size_on_tensor_parallel_ranks():
    """Stock's other ranks expect training's size, and end in a traceback (flags/stock_faults.py)."""
    flags = "--fp8-level O3 --tensor-model-parallel-size 2 --eval-interval 2 --eval-iters 1 --split 9,1,0"
    each = [*TINY_GPT, *SIX_STEPS, *flags.split(), "--train-iters", "2"]
    same, larger = (run_megatron(2, [*each, *f"--eval-micro-batch-size {n}".split()]) for n in (2, 8))
    assert same.losses == larger.losses
    assert larger.validation_losses == pytest.approx(same.validation_losses, abs=1e-5)
    assert len(same.validation_losses) >= 2


def test_a_loss_that_megatron_rejects_without_a_folder_to_save_to(tmp_path):
    """Stock saves the step for a second look, to None."""
    script = tmp_path / "script.py"
    script.write_text(REJECTED)
    flags = [*TINY_GPT, *SIX_STEPS, "--fp8-level", "O3", "--train-iters", "2"]
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, flags, script=str(script), env={"PYTHONPATH": script_path()})
    said = str(failed.value).splitlines()
    line = "megatron_fp8: --save: not given, and Megatron wants to save this step"
    assert sum(text.startswith(line) for text in said) == 1, said
    assert not any("Traceback" in line for line in said), said
    run_megatron(1, [*flags, "--no-check-for-nan-in-loss-and-grad", "--fp8-max-skipped-steps", "0"],
                 script=str(script), env={"PYTHONPATH": script_path()})  # fmt: skip
