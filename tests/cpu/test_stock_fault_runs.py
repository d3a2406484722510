"""Stock Megatron ends in a traceback at each entry of flags/stock_faults.py; a level gives one line."""

import pytest
from launch import RunFailed
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron

FAULTS = [
    ("--full-validation --eval-interval 1", "TypeError: 'int' object is not subscriptable"),
    ("--no-pad-vocab-size", "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'"),
    ("--phase-transition-iterations 2", "TypeError: '<=' not supported between instances of 'NoneType' and 'int'"),
    ("--phase-transition-iterations 2,x", "ValueError: invalid literal for int() with base 10: 'x'"),
    ("--position-embedding-type mrope --mrope-section 4 2 2", "IndexError: too many indices for tensor of dimension 2"),
]


def ends(flags: str, level: str) -> list[str]:
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*TINY_GPT, *SIX_STEPS, *flags.split(), "--fp8-level", level])
    return str(failed.value).splitlines()


@pytest.mark.parametrize(("flags", "traceback"), FAULTS)
def test_a_level_says_in_one_line_what_stock_fails_at(flags, traceback):
    assert traceback in ends(flags, "O0")  # if Megatron no longer fails, the entry can go
    said = ends(flags, "O1")
    flag = flags.split()[0]
    assert sum(line.startswith(f"megatron_fp8: {flag}") for line in said) == 1, said
    assert not any("Traceback" in line for line in said), said


def test_without_padding_at_a_size_that_is_named():
    flags = "--fp8-level O1 --no-pad-vocab-size --padded-vocab-size 256".split()
    run = run_megatron(1, [*TINY_GPT, *SIX_STEPS, *flags])
    assert run.losses[-1] < run.losses[0]
