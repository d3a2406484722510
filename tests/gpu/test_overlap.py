"""Overlapped training on two GPUs is bit for bit the waiting run's: twenty times, with memory under pressure and
launches delayed by chance; and each of three faults that such a race would be is found.
"""

import pytest
import torch
from launch import RunFailed
from overlapped import OVERLAP, digests, prepare
from test_training import FLAGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = "--train-iters 8 --lr-warmup-iters 2 --ddp-bucket-size 4000000 --deterministic-mode"


@pytest.fixture(scope="module", params=["O1", "O3"])
def level(request, tmp_path_factory):
    """(name, flags of an overlapped run, digests of the waiting run)."""
    more = [*SIZES.split(), "--fp8-level", request.param]
    flags = prepare([*FLAGS, *more], tmp_path_factory.mktemp(request.param), gpu=True)
    return request.param, [*flags, *OVERLAP.split()], *digests(flags, 1, gpu=True)


def test_twenty_overlapped_runs_are_the_waiting_run(level):
    name, flags, waiting = level
    found = digests(flags, 20, gpu=True, PRESSURE="1")
    equal = sum(trial == waiting for trial in found)
    print(f"{name}: {equal} of {len(found)} overlapped runs equal the waiting run")
    assert equal == 20


@pytest.mark.parametrize("fault", ["sent", "landing", "gather"])
def test_a_race_is_found(level, fault):
    _, flags, waiting = level
    try:
        found = digests(flags, 3, gpu=True, PRESSURE="1", LATE="1", BREAK=fault)
    except RunFailed as failed:  # Megatron ends a run whose loss is not a number
        assert "nan" in str(failed).lower()
    else:
        assert any(trial != waiting for trial in found)
