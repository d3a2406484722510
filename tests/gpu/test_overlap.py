"""Overlapped training on two GPUs is bit for bit the waiting run's: twenty times, with memory under pressure and
launches delayed by chance; and each of three faults that such a race would be is found.
"""

import pytest
import torch
from overlapped import OVERLAP, digests, prepare
from test_training import FLAGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = "--train-iters 8 --ddp-bucket-size 4000000 --deterministic-mode"


@pytest.fixture(scope="module", params=["O1", "O3"])
def flags(request, tmp_path_factory):
    more = [*SIZES.split(), "--fp8-level", request.param]
    return prepare([*FLAGS, *more], tmp_path_factory.mktemp(request.param), gpu=True)


def test_twenty_overlapped_runs_are_the_waiting_run(flags):
    (waiting,) = digests(flags, 1, gpu=True)
    found = digests([*flags, *OVERLAP.split()], 20, gpu=True, PRESSURE="1")
    equal = sum(trial == waiting for trial in found)
    print(f"{flags[flags.index('--fp8-level') + 1]}: {equal} of {len(found)} overlapped runs equal the waiting run")
    assert equal == 20


@pytest.mark.parametrize("fault", ["sent", "landing", "gather"])
def test_a_race_is_found(flags, fault):
    (waiting,) = digests(flags, 1, gpu=True)
    assert waiting not in digests([*flags, *OVERLAP.split()], 3, gpu=True, PRESSURE="1", BREAK=fault)[1:]
