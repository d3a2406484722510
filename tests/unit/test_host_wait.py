"""Whether the GPU waits for its host (monitor/host_wait.py), from events whose answers are given."""

from types import SimpleNamespace

import pytest
import torch
from engine_parts import OneWeight, parts_of

from megatron_fp8.engine.bank import Bank
from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.events import Events
from megatron_fp8.engine.owned_weight import GRAD, INPUT, OwnedWeight
from megatron_fp8.flags import graphs
from megatron_fp8.monitor.host_wait import FIRST, HostWait
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling
from megatron_fp8.ops.groups import groups_of

ANSWERS = [True, True, True, False]


@pytest.mark.parametrize(("answers", "waits"), [(ANSWERS, True), ([not a for a in ANSWERS], False)])
def test_the_share_of_looks(answers, waits, monkeypatch):
    events, shares, asked = Events(), [], []

    class Event:
        def record(self):
            pass

        def query(self):
            asked.append(True)
            return answers[(len(asked) - 1) % len(answers)]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    looking = HostWait(events, shares.append)
    for _ in range(6):
        for begin in events.begin_step:
            begin()
        for _ in range(5):  # weights
            for look in events.launched:
                look()
        for end in events.end_step:
            end()
    assert len(asked) == 2 * 4 and not events.launched  # not in the first two, which compile, nor after the end
    assert shares == [looking.share] == [0.75 if waits else 0.25]
    assert looking.wanted() == waits
    lines = graphs.advice(looking.share, SimpleNamespace(micro_batch_size=1))
    assert lines == [
        "the GPU waits for its host: it was idle at 75% of the checks; --fp8-step-graph on, "
        "or a --micro-batch-size above 1, helps"
    ] * waits


def test_a_step_that_is_run_again_is_no_end_of_the_looks_missed(monkeypatch):
    """No step becomes a graph while it observes, so it must end."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
    events, shares = Events(), []
    HostWait(events, shares.append)
    for runs in (1, 1, 1, 2, 1):  # Megatron repeats the fourth step because of its loss
        for _ in range(runs):
            for begin in events.begin_step:
                begin()
            for _ in range(5):
                for look in events.launched:
                    look()
        for end in events.end_step:
            end()
    assert shares == [1.0] and not events.launched


def test_experts_still_run_together_while_it_looks(group, monkeypatch):
    """The looks end after four steps; one by one, each of them would take several times as long."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
    config = OneWeight(torch.randn(16, 128), group, storage="fp8").weight.config
    weights = [OwnedWeight(torch.nn.Parameter(torch.randn(16, 128).bfloat16()), config) for _ in range(3)]
    parts = parts_of(group, config, weights)
    Bucket(weights, parts)
    scaling = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
    scaling.update()
    for weight in weights:
        weight.casts.scaling = scaling
    bank, looking = Bank(weights), HostWait(parts.events, lambda share: None)
    groups = groups_of(torch.tensor([5, 0, 3]), 8, torch.device("cpu"))
    for _ in range(FIRST):
        for begin in parts.events.begin_step:
            begin()
    assert parts.events.launched and bank.ready
    dy = bank.cast(torch.randn(8, 16).bfloat16(), GRAD, groups, rows=False, columns=True, training=True)
    x = bank.cast(torch.randn(8, 128).bfloat16(), INPUT, groups, rows=False, columns=True, training=True)
    for _ in range(3):
        bank.take_gradients(dy, x)
    assert looking._looks == 2  # one launch of all experts' gradients is one look
