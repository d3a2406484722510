"""Which class sums the gradients, by flag and group; what the paper's remembers, and the others do not."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from engine_parts import Known, OneWeight, one_set
from megatron.core.parallel_state import create_group
from torch._C._distributed_c10d import FakeProcessGroup

from megatron_fp8.comm.shared import SharedScale
from megatron_fp8.comm.wire import Flight
from megatron_fp8.engine import reductions
from megatron_fp8.engine.reductions import Block, Fp32, Local, Reduction, Shared, reduction
from megatron_fp8.numerics.auto_scaling import ScalingRule


@pytest.mark.parametrize(
    "flag, ranks, kind",
    [("block", 1, Local), ("fp32", 1, Local), ("shared", 1, Shared), ("block", 4, Block), ("fp32", 4, Fp32),
     ("shared", 4, Shared)],
)  # fmt: skip
def test_the_flag_and_the_group_choose(flag, ranks, kind, group):
    fp8 = SimpleNamespace(grad_reduce=flag, grad_scaling=ScalingRule("auto"), grad_reduce_hierarchy="off")
    weights = [OneWeight(torch.randn(16, 16).bfloat16(), group).weight for _ in range(2)]
    of = one_set(FakeProcessGroup._create_internal(0, ranks))
    found = reduction(fp8, weights, of, True, torch.device("cpu"))
    assert type(found) is kind and isinstance(found, Reduction)
    assert found.adapts is (found.shared is not None) is (flag == "shared")


def test_groups_of_nodes_wait_as_long_as_megatrons(group, monkeypatch):
    """And are made by Megatron's function, which lists them for --distributed-timeout-seconds-after-init."""
    made = []
    monkeypatch.setattr(reductions, "node_groups", lambda data, ranks, make: made.append((ranks, make)))
    fp8 = SimpleNamespace(grad_reduce="block", grad_reduce_hierarchy="2", timeout_minutes=77)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    reduction(fp8, [], one_set(FakeProcessGroup._create_internal(0, 4)), True, torch.device("cpu"))
    ((ranks, make),) = made
    assert (ranks, make.func) == (2, create_group) and make.keywords["timeout"] == timedelta(minutes=77)


def test_what_stays_from_step_to_step(group):
    one = OneWeight(torch.randn(16, 16).bfloat16(), group)
    shared = Shared(SharedScale(ScalingRule("auto"), [256] * 3, group, group, False, "cpu"), [one.weight])
    mu = shared.mu(3, torch.device("cpu"))
    assert mu.tolist() == shared.shared.mu.tolist() and mu is not shared.shared.mu
    shared.load_mu(torch.tensor([0.0, 0.25, 0.0]))  # 0 is none: of a run that summed otherwise
    assert shared.shared.mu.tolist() == [mu[0], 0.25, mu[2]]
    assert Local().mu(3, torch.device("cpu")).tolist() == [0.0] * 3 and not Local().adapts


@pytest.mark.parametrize("kind", [Local, Shared])
def test_a_bucket_starts_it_and_reads_the_sum(kind, group):
    one = OneWeight(torch.randn(16, 16).bfloat16(), group)
    gradient = torch.randn(16, 16)
    one.weight.take_gradient(Known(gradient))
    how = Local() if kind is Local else Shared(
        SharedScale(ScalingRule("pre"), [256], group, group, False, "cpu"), [one.weight]
    )  # fmt: skip
    found = Flight(how.start(one.bucket)).land().look()[:256].view(16, 16)
    assert (found - gradient).abs().max() <= (0 if kind is Local else 2**-4 * gradient.abs().max())
