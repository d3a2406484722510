"""gemm/timing.py: the order and the length of the calls' turns, with a stand-in for CUDA events."""

import pytest

from megatron_fp8.gemm import timing


class Time:
    def __init__(self, at: float):
        self.at = at

    def elapsed_time(self, end) -> float:
        return end.at - self.at


@pytest.fixture
def ran(monkeypatch) -> list[tuple[str, int]]:
    """(name, number of runs) of every launch, on a GPU that was idle before the first and slows down with each."""
    order, now = [], [0.0]

    def launch(call, count):
        start = now[0]
        now[0] += count * (len(order) + 1 if order else 0.5)
        order.append((call(), count))
        return Time(start), Time(now[0])

    monkeypatch.setattr(timing, "_launch", launch)
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "FLUSH", 16)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    return order


CALLS = {"a": lambda: "A", "b": lambda: "B"}


def test_a_gpu_that_slows_down_slows_all_equally(ran):
    found = timing.in_turns(CALLS, 4)
    assert "".join(who for who, _ in ran) == "ABBAABBA" and {count for _, count in ran} == {1}
    assert found == {"a": 4.5, "b": 4.5}  # medians of 0.5, 4, 5, 8 and of 2, 3, 6, 7


def test_under_load_no_call_gets_an_idle_gpu(ran):
    found = timing.under_load(CALLS, {"a": 1.0, "b": 50.0, "c": 1.0})
    assert ran == [("A", 150), ("A", 150), ("B", 3), ("B", 3), ("A", 150)]
    assert found == {"a": 3.5, "b": 3.5}  # means of 2, 5 and of 3, 4
