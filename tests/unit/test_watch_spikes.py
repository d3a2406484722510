"""The rolling detectors: spikes and rises against numpy, and how often noise is taken for one."""

import math

import numpy as np
import pytest

from megatron_fp8.flags.watch import LEAST_WINDOW
from megatron_fp8.monitor.spikes import Series, fit

SIGMA = 7.0


def rng():
    return np.random.default_rng()


def spikes(values, window=128, sigma=SIGMA, floor=0.0):
    series = Series(sigma, window, floor)
    return [i for i, value in enumerate(values) if series.spike(float(value))]


@pytest.mark.parametrize("n", [3, 16, 17, 128])
def test_the_line_is_least_squares(n):
    values = rng().normal(5, 2, n) + rng().normal() * np.arange(n)
    line = fit(values.tolist())
    steps = np.arange(n)
    (slope, start), covariance = np.polyfit(steps, values, 1, cov="unscaled")
    residuals = values - (start + slope * steps)
    variance = residuals @ residuals / (n - 2)
    place = np.array([n, 1.0])  # where the next value lies; the line's variance there adds to the value's own
    assert line.length == n
    assert (line.first, line.last) == pytest.approx((start, start + slope * (n - 1)))
    assert line.expected == pytest.approx(start + slope * n)
    assert line.deviation == pytest.approx(math.sqrt(variance * (1 + place @ covariance @ place)))
    assert line.slope_deviations == pytest.approx(slope / math.sqrt(variance * covariance[0, 0]))


def test_a_line_without_noise():
    for values, slope in (([2.0] * 20, 0.0), ([0.0] * 20, 0.0), ([float(i) for i in range(20)], math.inf)):
        line = fit(values)
        assert line.deviation == pytest.approx(0, abs=1e-9)
        assert line.slope_deviations == slope or line.slope_deviations > 1e9


@pytest.mark.parametrize("trend", [0.0, -0.02, 0.02])
def test_a_spike_is_found_where_it_is_on_a_trend(trend):
    values = 4 + trend * np.arange(200) + rng().normal(0, 0.02, 200)
    for at in (LEAST_WINDOW, 60, 199):
        planted = values.copy()
        planted[at] += 0.4
        assert spikes(planted) == [at]
        planted[at] -= 0.8  # below: good news
        assert spikes(planted) == []


def test_a_falling_loss_hides_no_spike():
    """A rolling mean and deviation would hide it: earlier losses were higher than the spike."""
    values = 4 - 0.02 * np.arange(100) + rng().normal(0, 0.01, 100)
    values[90] += 0.5
    assert values[90] < values[:90].mean()
    assert spikes(values) == [90]


def test_nothing_is_judged_before_there_is_a_history():
    values = [1.0 + 0.01 * (i % 3) for i in range(LEAST_WINDOW)]
    values[LEAST_WINDOW - 1] = 50.0
    assert spikes(values) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_at_once_and_leaves_no_trace(value):
    values = (3 + rng().normal(0, 0.02, 60)).tolist()
    values[40] = 4.0
    assert spikes(values) == [40]
    assert spikes([value, *values[:30], value, *values[30:]]) == [0, 31, 42]
    series = Series(SIGMA, 128)
    series.spike(value)
    assert not series.values and str(series.spike(value)) == f"spike {value}, not finite"


def test_the_text():
    series = Series(SIGMA, 32)
    for i in range(40):
        series.spike(2.0 + 0.01 * (-1) ** i)
    spike = series.spike(3.0)
    line = fit([2.0 + 0.01 * (-1) ** i for i in range(8, 40)])
    deviations = (3.0 - line.expected) / line.deviation
    assert spike.deviations == pytest.approx(deviations)
    text = f"spike 3, {deviations:.1f} deviations above the line through its last 32 ({line.expected:.4g})"
    assert str(spike) == text


def test_one_spike_does_not_hide_the_next():
    values = 3 + rng().normal(0, 0.02, 100)
    values[50] = 1000.0
    values[60] = 3.5
    assert spikes(values) == [50, 60]


@pytest.mark.parametrize(("shift", "most"), [(0.3, 8), (3.0, 25), (1e4, 80)])
def test_a_level_that_has_shifted_for_good_is_normal_after_a_while(shift, most):
    values = 3 + rng().normal(0, 0.02, 400)
    values[200:] += shift
    found = spikes(values)
    assert found[0] == 200 and found[-1] < 200 + most


def test_equal_values_and_the_floor():
    flat = [2.0] * 50
    assert spikes([*flat, 2.01]) == []  # the least deviation is 0.1 %
    assert spikes([*flat, 2.02]) == [50]
    zeros = [0.0] * 50
    assert spikes(zeros) == [] and spikes([*zeros, 1e-9]) == []  # a line at zero gives no deviation
    assert spikes([*zeros, 0.006], floor=1e-3) == [] and spikes([*zeros, 0.008], floor=1e-3) == [50]


@pytest.mark.parametrize("window", [16, 128])
def test_noise_on_a_trend_raises_no_false_alarm(window):
    """6,000 steps of each; docs/monitoring.md has rates over more."""
    steps = np.arange(1000)
    for _ in range(2):
        noise = rng().normal(size=(3, 1000))
        for values in (
            2 + 8 * (1 + steps / 30) ** -0.7 + 0.03 * noise[0],
            4 + 7 * np.exp(-steps / 20) + 0.03 * noise[1],
            1 + 0.01 * steps + 0.1 * noise[2],
        ):
            assert len(spikes(values, window)) <= (2 if window == 16 else 0)


def rises(values, floor=0.0, window=32):
    series = Series(SIGMA, window, floor)
    found = []
    for i, value in enumerate(values):
        series.spike(float(value))
        if series.rise():
            found.append(i)
    return found


def test_a_rise_is_told_once_for_each_doubling():
    steps = np.arange(200)
    noise = 1 + rng().normal(0, 0.02, 200)
    assert rises(0.1 * noise) == []
    assert rises((0.2 - 0.0005 * steps) * noise) == []
    rising = rises(0.1 * 2 ** (steps / 20) * noise)  # 2^10
    assert 3 <= len(rising) <= 10 and min(np.diff(rising)) >= 10
    again = np.concatenate([np.linspace(0.1, 0.4, 60), np.full(60, 0.1), np.linspace(0.1, 0.4, 60)])
    found = rises(again * noise[:180])
    assert any(i < 60 for i in found) and any(i > 120 for i in found)


def test_shares_below_the_floor_do_not_rise():
    share = 1e-5 * np.arange(60)
    assert rises(share, floor=1e-3) == [] and rises(share)


def test_a_restored_series_continues():
    values = (2 + rng().normal(0, 0.05, 300)).cumsum() / 100
    values[250] += 5
    whole, first = Series(SIGMA, 32), Series(SIGMA, 32)
    expected = [(whole.spike(v), whole.rise()) for v in values.tolist()]
    got = [(first.spike(v), first.rise()) for v in values[:200].tolist()]
    rest = Series(SIGMA, 32)
    rest.load(first.state())
    got += [(rest.spike(v), rest.rise()) for v in values[200:].tolist()]
    assert got == expected and any(spike for spike, _ in got)
    shorter = Series(SIGMA, 16)
    shorter.load(first.state())
    assert list(shorter.values) == values[184:200].tolist()
