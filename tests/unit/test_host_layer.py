"""The host's cost of a layer, alone and as one of two tensor-parallel ranks. The ceilings are the counts when they were
set; more needs a reason. `pytest -s` prints the present counts, and the least time on this CPU."""

import pytest
import torch.distributed as dist
from host_layer import Layer, counts, fake_groups, microseconds
from test_host_calls import launches  # noqa: F401 (fixture)

from megatron_fp8.layers import parallel

NEVER, ALWAYS = 1 << 60, 0  # whether a product of gathered, or summed, rows is cut in two
CEILINGS = {  # {(ranks, SPLIT_FROM): launches, ATen calls, our Python functions, all Python functions, C functions}
    # One Python call a layer asks whether attention's backward pass waits for other ranks' keys (function.announce).
    (1, NEVER): (30, 74, 419, 559, 468),
    (2, NEVER): (32, 98, 449, 647, 539),
    (2, ALWAYS): (38, 130, 517, 749, 661),
}


@pytest.fixture(scope="module")
def groups():
    yield fake_groups()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks, splits_from", CEILINGS, ids=("alone", "two ranks", "two ranks, split"))
def test_a_layers_calls(groups, launches, monkeypatch, ranks, splits_from):  # noqa: F811
    monkeypatch.setattr(parallel, "SPLIT_FROM", splits_from)
    layer = Layer(groups[0], groups[ranks - 1])
    layer.step()
    launches.clear()
    layer.step()
    found = {"launches": len(launches), **counts(layer.step)}
    print(f"\n{ranks} ranks, split from {splits_from}: {found}, {microseconds(layer.step):.0f} us")
    most = dict(zip(found, CEILINGS[ranks, splits_from], strict=True))
    assert all(found[name] <= most[name] for name in most), (found, most)
    assert launches.count("gemm") >= 12  # those of four linears; else nothing was counted
