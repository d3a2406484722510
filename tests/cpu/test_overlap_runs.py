"""Overlapped runs are bit for bit the waiting one's, with the host stumbling at every collective.

What a CPU cannot show, a kernel that is not waited for, tests/gpu/test_overlap.py does by the same script.
"""

import pytest
from megatron_runs import TINY_GPT
from overlapped import OVERLAP, digests, prepare


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=pytest.mark.slow)])
def test_trials_are_equal_and_a_fault_shows(level, tmp_path):
    flags = prepare([*TINY_GPT, "--fp8-level", level, "--ddp-bucket-size", "4000", "--train-iters", "6"], tmp_path)
    (waiting,) = digests(flags, 1)
    overlapped = [*flags, *OVERLAP.split()]
    assert digests(overlapped, 3, PRESSURE="1") == [waiting] * 3
    assert waiting not in digests(overlapped, 2, PRESSURE="1", BREAK="sent")
