"""Verdicts on a run's curve and early warnings, against definitions spelled out and counts of pairs."""

import math

import numpy as np
import pytest
from scipy import stats

from megatron_fp8.tools.lab.report import curves
from megatron_fp8.tools.lab.report.curves import ABOVE_BEST, ABOVE_INITIAL, NOT_FINITE, RULE, divergence
from megatron_fp8.tools.lab.report.early_warning import Signal, alarms, auroc, held_out, rise, threshold

NAN = math.nan


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


# A run's curve.


def test_smoothing_is_the_weighted_mean(rng):
    values = rng.normal(0, 1, 60)
    values[[0, 7, 8, 30]] = [NAN, NAN, math.inf, -math.inf]
    found, keep = curves.smooth(values, 5.0), 2 ** (-1 / 5)
    assert math.isnan(found[0])
    for t in range(1, 60):
        there = [s for s in range(t + 1) if math.isfinite(values[s])]
        weights = [keep ** (t - s) for s in there]
        assert found[t] == pytest.approx(np.average(values[there], weights=weights), rel=1e-9, abs=1e-12)
    table = np.stack([values, values + 1])
    assert np.allclose(curves.smooth(table, 5.0)[1], found + 1, equal_nan=True)


def falling(rng, steps=400, floor=2.0):
    return floor + 6 * np.exp(-np.arange(steps) / 40) + rng.normal(0, 0.05, steps)


STEPS = np.arange(1, 401)


def test_healthy_runs_are_healthy(rng):
    losses = falling(rng)
    assert divergence(STEPS, losses) is None
    losses[[50, 51, 200, 399]] = NAN  # skipped steps
    losses[300] += 30  # one spike: E jumps by 2 nats and is back within 0.5 after some 20 steps
    losses[301:320] += 0.1
    rule = curves.Rule(patience=0.1)
    assert divergence(STEPS, losses, rule=rule) is None
    assert divergence(STEPS, np.full(400, 5.0)) is None  # never better, never worse
    assert divergence(np.array([1]), np.array([7.0])) is None


def test_a_rise_that_lasts_diverges(rng):
    losses = falling(rng)
    losses[250:] += 1.0
    found = divergence(STEPS, losses)
    assert found.cause == ABOVE_BEST
    # E is 0.5 above after one half-life of 10 points
    assert 255 <= found.onset <= 270
    short = falling(rng)
    short[250:262] += 1.0
    assert divergence(STEPS, short) is None
    assert divergence(STEPS, falling(rng) + np.linspace(0, 0.4, 400)) is None


def test_a_loss_above_the_first_diverges(rng):
    losses = falling(rng)
    losses[300:] = np.linspace(2, 20, 100)
    found = divergence(STEPS, losses)
    assert found.cause == ABOVE_INITIAL
    assert 300 < found.onset < 330  # when it had risen by half a nat, the earlier of the two onsets
    rising = np.linspace(5, 5.4, 400)  # too slow for the other rule
    assert divergence(STEPS, rising) == (ABOVE_INITIAL, 2)


def test_what_is_not_finite_diverges(rng):
    losses = falling(rng)
    losses[200:] = NAN
    assert divergence(STEPS, losses) == (NOT_FINITE, 201)
    losses[395] = 3.0  # it recovered
    assert divergence(STEPS, losses) is None
    assert divergence(STEPS, np.full(400, math.inf)) == (NOT_FINITE, 1)
    short = falling(rng)[:90]
    assert divergence(STEPS[:90], short) is None
    assert divergence(STEPS[:90], short, ended=True) == (NOT_FINITE, 91)
    assert divergence(np.array([1]), np.array([NAN]), ended=True) == (NOT_FINITE, 1)


def test_patience_is_in_steps_whatever_the_interval(rng):
    losses = falling(rng)
    losses[250:275] += 3.0  # 25 steps; 5 % are 20
    every = divergence(STEPS, losses, rule=curves.Rule(half_life=1))
    tenth = divergence(STEPS[9::10], losses[9::10], rule=curves.Rule(half_life=0.1))
    assert every and tenth and abs(every.onset - tenth.onset) <= 10
    losses[250:265] -= 3.0
    assert divergence(STEPS, losses, rule=curves.Rule(half_life=1)) is None


def test_a_run_from_a_checkpoint_is_judged_by_the_steps_that_it_made(rng):
    """The same curves from step 10,000 give the verdict of those from the start, 10,000 steps later."""
    lost, risen, above, brief = (falling(rng) for _ in range(4))
    lost[200:] = NAN
    risen[250:] += 1.0
    above[300:] = np.linspace(2, 20, 100)
    brief[250:262] += 1.0
    for losses in (lost, risen, above, brief, falling(rng)):
        expected, found = divergence(STEPS, losses), divergence(STEPS + 10_000, losses)
        assert found == (expected and expected._replace(onset=expected.onset + 10_000))
        final = curves.final_loss(STEPS, losses)
        assert curves.final_loss(STEPS + 10_000, losses) == pytest.approx(final, nan_ok=True)
    assert divergence(STEPS + 10_000, lost).cause == NOT_FINITE and divergence(STEPS + 10_000, brief) is None
    slow, fast = 2 + 5 * np.exp(-STEPS / 100), 2 + 5 * np.exp(-STEPS / 50)
    ratio = curves.steps_ratio((STEPS, slow), (STEPS, fast))
    assert curves.steps_ratio((STEPS + 10_000, slow), (STEPS + 10_000, fast)) == pytest.approx(ratio) and ratio > 1.2


def test_the_final_loss_is_the_mean_of_the_end():
    losses = np.arange(400.0)
    assert curves.final_loss(STEPS, losses) == pytest.approx(np.mean(losses[-20:]))
    losses[-1] = NAN
    assert curves.final_loss(STEPS, losses) == pytest.approx(np.mean(losses[-20:-1]))
    assert math.isnan(curves.final_loss(STEPS, np.full(400, NAN)))
    assert curves.final_loss(STEPS[:50], losses[:50]) == pytest.approx(np.mean(losses[40:50]))  # at least 10


def test_means_before_each_value(rng):
    values = 1e4 + rng.normal(0, 1, 200)
    values[rng.integers(0, 200, 30)] = NAN
    mean, deviation = curves.before(values, 25, 10)
    for i in range(200):
        past = values[max(0, i - 25) : i]
        past = past[np.isfinite(past)]
        if len(past) < 10:
            assert math.isnan(mean[i]) and math.isnan(deviation[i])
        else:
            assert mean[i] == pytest.approx(past.mean()) and deviation[i] == pytest.approx(past.std(), rel=1e-6)


def naive_spikes(values, window, least):
    judged = spikes = 0
    for i, value in enumerate(values):
        past = values[max(0, i - window) : i]
        past = past[np.isfinite(past)]
        if len(past) >= least:
            judged += 1
            spikes += not abs(value - past.mean()) < 7 * past.std()
    return spikes / judged


def test_spike_score(rng):
    values = rng.normal(3, 0.1, 3000)
    assert curves.spike_score(values) == 0
    values[[100, 1500, 2900]] += [1.5, -1.5, 1.6]
    values[2000] = NAN
    assert curves.spike_score(values) == naive_spikes(values, 1000, 50) == 4 / 2950
    assert math.isnan(curves.spike_score(values[:50])) and math.isnan(curves.spike_score(np.full(90, NAN)))


def test_a_constant_has_no_spikes_but_a_step_of_it_is_one():
    values = np.full(200, 0.1)
    assert curves.spike_score(values) == 0
    values[150] = 0.2
    assert curves.spike_score(values) == 1 / 150


def test_steps_to_a_loss():
    steps = np.arange(10, 1001, 10)
    losses = 10 - 0.005 * steps
    rule = curves.Rule(half_life=1e-3)  # E is the loss itself
    assert curves.steps_to_loss(steps, losses, 7.52, rule) == pytest.approx(496)
    assert curves.steps_to_loss(steps, losses, 11.0, rule) == 10
    assert math.isnan(curves.steps_to_loss(steps, losses, 1.0, rule))


def test_half_as_fast_needs_twice_the_steps():
    steps = np.arange(1, 2001)
    fast, slow = 2 + 5 * np.exp(-steps / 100), 2 + 5 * np.exp(-steps / 200)
    rule = curves.Rule(half_life=1e-3)
    assert curves.steps_ratio((steps, slow), (steps, fast), rule) == pytest.approx(2, rel=1e-3)
    assert curves.steps_ratio((steps, fast), (steps, slow), rule) == pytest.approx(0.5, rel=1e-3)
    assert curves.steps_ratio((steps, fast), (steps, fast)) == 1


# Early warnings.


def signals(rng, diverged: int, healthy: int, shift: float, start: int = 0) -> list[Signal]:
    """White noise. From step `start` on it is higher by `shift` in runs that diverge, at step 60 to 90."""
    made = []
    for i in range(diverged + healthy):
        values = rng.normal(0, 1, 100)
        values[start:] += shift * (i < diverged)
        onset = float(rng.integers(60, 90)) if i < diverged else math.inf
        made.append(Signal(np.arange(1, 101), values, onset, seed=i // 2, stratum=i % 3))
    return made


def test_auroc_counts_pairs(rng):
    made = signals(rng, 7, 9, 0.5)
    for lead in (1, 20):
        wins = [
            a.at(a.onset - lead) > b.at(a.onset - lead) for a in made[:7] for b in made[7:] if a.stratum == b.stratum
        ]
        found = auroc(made, lead)
        assert found.value == pytest.approx(np.mean(wins))
        assert found.band.low <= found.value <= found.band.high
        assert (found.diverged, found.healthy) == (7, 9)


def test_auroc_is_the_mann_whitney_statistic(rng):
    case, control = rng.normal(1, 1, 40), rng.normal(0, 1, 50).round(1)
    steps = np.array([1])
    made = [Signal(steps, np.array([x]), 3.0, i) for i, x in enumerate(case)]
    made += [Signal(steps, np.array([x]), math.inf, i) for i, x in enumerate(control)]
    expected = stats.mannwhitneyu(case, control).statistic / (40 * 50)
    found = auroc(made, 1)
    assert found.value == pytest.approx(expected)
    z = stats.norm.cdf(1 / math.sqrt(2))  # the true AUROC
    assert found.band.low < z + 0.1 and found.band.high > z - 0.1


def test_auroc_knows_nothing_of_what_comes_later(rng):
    made = signals(rng, 60, 60, 100.0, start=59)  # at step 60, the first onset
    made = [Signal(s.steps, s.values, s.onset, s.seed) for s in made]
    assert auroc(made, 0).value == 1
    early = auroc(made, 40)
    assert 0.25 < early.value < 0.75


def test_auroc_without_pairs(rng):
    for made in (signals(rng, 3, 0, 1), signals(rng, 0, 3, 1), signals(rng, 3, 3, 1)):
        found = auroc(made, 1000)  # before the first step
        assert math.isnan(found.value) and found.diverged == found.healthy == 0
    two = [Signal(np.array([1]), np.array([float(i)]), 2.0 if i else math.inf, i) for i in range(2)]
    assert auroc(two, 1).value == 1 and math.isnan(auroc(two, 1).band.low)


def test_a_signal_logged_now_and_then():
    signal = Signal(np.array([10, 20, 30]), np.array([1.0, 2.0, 3.0]), math.inf, 1)
    assert math.isnan(signal.at(9)) and [signal.at(10), signal.at(29.5), signal.at(99)] == [1, 2, 3]


def test_rise_is_in_deviations_of_the_own_past(rng):
    values = np.full(80, 2.0) + rng.normal(0, 1e-6, 80)
    values[70] += 0.02
    found = rise(values)
    assert (
        np.isnan(found[:10]).all() and (np.abs(found[10:70]) < 0.01).all()
    )  # 0.1 % of the mean is the least deviation
    assert found[70] == pytest.approx(10, rel=0.01)
    falling = rise(-values)
    assert falling[70] < 0 < rise(-values, either_way=True)[70]


def test_alarms_of_tuning_and_held_out_seeds():
    def run(values, onset, seed):
        return Signal(np.arange(1, len(values) + 1), np.array(values, float), onset, seed)

    tuning = [run([0, 3, 1, NAN], math.inf, 1), run([9, 9, 9, 9], 3.0, 1), run([NAN] * 4, math.inf, 3)]
    assert threshold(tuning) == 3 and math.isnan(threshold(tuning[1:]))
    test = [
        run([0, 4, 0, 5], 4.0, 2),  # warned two steps before
        run([0, 0, 0, 5], 4.0, 4),  # too late
        run([0, 3, 0, 0], math.inf, 2),  # not above the threshold
        run([0, 0, NAN, 4], math.inf, 4),  # a false alarm
        run([5, 0, 0, 0], 4.0, 6),
    ]
    assert alarms(test, 3.0) == (3.0, 2, 3, 1, 2, [2.0, 3.0])


def test_half_of_the_seeds_are_held_out():
    assert held_out([7, 1, 7, 3, 5]) == {3, 7} and held_out([4]) == set()


def test_the_rule_is_the_documented_one():
    assert (RULE.rise, RULE.patience, RULE.at_least, RULE.half_life) == (0.5, 0.05, 10, 10)
