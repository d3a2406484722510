"""benchmarks/real_text.py's verdict: a gap beside the spread of stock's seeds."""

import pytest
from launch import ROOT


@pytest.fixture
def gaps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import real_text

    def of(**losses: list[float]) -> list[str]:
        return real_text.gaps([
            {"arm": arm, "seed": seed, "heldout_loss": f"{loss}"}
            for arm, found in losses.items() for seed, loss in enumerate(found, 1)
        ])  # fmt: skip

    return of


def test_a_gap_means_something_beyond_the_seeds_spread(gaps):
    lines = gaps(O0=[2.0, 2.1, 2.3], O1=[2.2, 1.9], O3=[2.31, 2.1], O2=[float("nan")])
    assert lines[0] == "O0: 3 seeds spread over 0.3000, 2.0000 to 2.3000"
    assert [line.split() for line in lines[1:]] == [
        ["O1", "+0.2000", "-0.2000", "inside", "the", "noise"],
        ["O2", "+nan", "OUTSIDE", "the", "noise"],
        ["O3", "+0.3100", "+0.0000", "OUTSIDE", "the", "noise"],
    ]


def test_without_stock_it_says_so(gaps):
    assert gaps(O3=[2.0]) == gaps(O0=[float("nan")], O3=[2.0]) == ["no run of O0 to compare with: add O0 to --arms"]
