"""A run with flags in files equals the run with typed flags, bit for bit, at a level and in stock."""

import pytest
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron

from megatron_fp8.flags.command import flags_of

FEW = [*TINY_GPT]
FEW[FEW.index("--train-iters") + 1] = "3"
FEW[FEW.index("--global-batch-size") + 1] = "4"


@pytest.fixture
def files(tmp_path):
    """FEW in two files, with values that the second file and the command line must override."""
    lines = [f"  {flag}: {' '.join(values) or 'true'}" for flag, values in flags_of(FEW)]
    one, two = tmp_path / "model.yaml", tmp_path / "recipe.yaml"
    one.write_text("\n".join(["ENV_VARS: {OMP_NUM_THREADS: 7}", "MODEL_ARGS:", *lines, "  --qk-layernorm: true"]))
    two.write_text("MODEL_ARGS:\n  --qk-layernorm: false\n  --hidden-size: 128\n  --fp8-level: O1\n")
    return ["--args-file", str(one), str(two)]


def test_files_are_the_command_line(files):
    flags = ["--hidden-size", "64"]
    for level in ("O3", "O0"):
        by_files = run_megatron(1, [*files, *flags, "--fp8-level", level])
        typed = run_megatron(1, [*FEW, "--fp8-level", level])
        assert len(typed.losses) == 3
        assert by_files.losses == typed.losses and by_files.grad_norms == typed.grad_norms
    said = [line for line in by_files.lines if line.startswith("[fp8]")]
    assert any(f": {len(list(flags_of(FEW))) - 1} flags, 0 v" in line for line in said), said
    assert "[fp8] OMP_NUM_THREADS: the environment's value is used, not the files'" in said


def test_a_mistake_in_a_file_is_one_line(files, tmp_path):
    """For stock's script too, run by its own command."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("MODEL_ARGS:\n  --num-layers: two\n")
    with pytest.raises(RunFailed) as failure:
        run_megatron(1, [*files, str(wrong)], script=["-m", "megatron_fp8", "pretrain_gpt_fp8.py"])
    line = f"megatron_fp8: {wrong}: --num-layers two: use a whole number"
    assert failure.value.code == 2 and line in str(failure.value)
