"""Whether the GPU waits for its host (monitor/host_wait.py), from events whose answers are given."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8.engine.events import Events
from megatron_fp8.flags import graphs
from megatron_fp8.monitor.host_wait import HostWait

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
            for look in events.gradient_added:
                look(None)
        for end in events.end_step:
            end()
    assert len(asked) == 2 * 4 and not events.gradient_added  # not in the first two, which compile, nor after the end
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
                for look in events.gradient_added:
                    look(None)
        for end in events.end_step:
            end()
    assert shares == [1.0] and not events.gradient_added
