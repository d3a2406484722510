"""What every rank knows is asked of nobody; where a rank may know otherwise, all ask."""

import pytest
import torch
from megatron.core.rerun_state_machine import RerunStateMachine

from megatron_fp8.engine.step_end import SameEverywhere
from megatron_fp8.monitor.loss_checks import LateChecks


class Group:
    """Stock's two functions, over this rank and one other; counts what is reduced."""

    def __init__(self, other: bool):
        self.other, self.asked = other, []

    def logical_and(self, input, group=None):
        self.asked.append((input, group))
        return input and self.other

    def largest(self, stat, group=None):
        self.asked.append((stat, group))
        return max(stat, 7.0)


@pytest.mark.parametrize(("here", "other"), [(True, True), (True, False), (False, True)])
def test_a_group_is_asked_once_and_always_where_one_rank_has_no_chain_of_ours(here, other):
    same, stock = SameEverywhere(), Group(other)
    taken, largest = same.logical_and(stock.logical_and), same.largest(stock.largest)
    same.here = here
    first, norm = taken(True, group="mp"), largest(3.1, group="mp")
    assert stock.asked[0] == (here, "mp")
    if here and other:
        assert first is True and norm == torch.tensor(3.1).item() != 3.1  # FP32, as from the GPU
        assert taken(False, group="mp") is False and largest(None, group="mp") is None and len(stock.asked) == 1
    else:
        assert (first, norm) == (other, 7.0) and taken(False, group="mp") is False
        assert stock.asked[1:] == [(True, "mp"), (3.1, "mp"), (False, "mp")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_is_alone_asks_itself(ranks, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    asked = []
    reduce_any = LateChecks().reduce_any(lambda machine, value: asked.append(value))
    machine = RerunStateMachine()
    found = [reduce_any(machine, value) for value in (True, False, [False, True])]
    assert found == ([True, False, (False, True)] if ranks == 1 else [None] * 3)
    assert asked == ([] if ranks == 1 else [True, False, [False, True]])
