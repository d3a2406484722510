"""The lab's tests, powers and bands, against closed forms, brute force, simulation and scipy."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from megatron_fp8.tools.lab.report import statistics

NAN = math.nan


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


# Rates.


@pytest.mark.parametrize("count, total", [(0, 18), (18, 188), (70, 70), (1, 1), (3, 8)])
def test_wilson_solves_its_own_equation(count, total):
    z = stats.norm.ppf(0.975)
    for end in statistics.wilson(count, total):
        assert abs(abs(count / total - end) - z * math.sqrt(max(end * (1 - end), 0) / total)) < 1e-9
    assert statistics.wilson(count, total).low <= count / total <= statistics.wilson(count, total).high


def test_no_runs_no_rates():
    assert all(map(math.isnan, (*statistics.wilson(0, 0), statistics.fisher(0, 0, 1, 3))))
    assert math.isnan(statistics.detectable_rate(0, 5)) and math.isnan(statistics.detectable_rate(5, 0))


def brute_fisher(a: int, n: int, b: int, m: int) -> float:
    tables = {x: math.comb(n, x) * math.comb(m, a + b - x) for x in range(n + 1) if 0 <= a + b - x <= m}
    return sum(ways for ways in tables.values() if ways <= tables[a]) / sum(tables.values())


def test_fisher_is_exact_on_every_small_table():
    n, m = 6, 9
    rejects = statistics.fisher_rejects(n, m, 0.05)
    for a, b in itertools.product(range(n + 1), range(m + 1)):
        p = brute_fisher(a, n, b, m)
        assert statistics.fisher(a, n, b, m) == pytest.approx(p, rel=1e-9)
        assert rejects[a, b] == (p <= 0.05)


def test_fisher_of_the_paper():
    assert statistics.fisher(18, 188, 0, 70) == pytest.approx(0.0044, abs=5e-5)


def test_power_of_the_facts():
    for runs, power in ((18, 0.03), (80, 0.82)):
        found = statistics.fisher_power(0.0, 0.1, statistics.fisher_rejects(runs, runs))
        assert found == pytest.approx(power, abs=0.005)


def test_power_by_simulation(rng):
    n, m, p, q, draws = 20, 13, 0.2, 0.7, 4000
    rejects = statistics.fisher_rejects(n, m)
    seen = rejects[rng.binomial(n, p, draws), rng.binomial(m, q, draws)].mean()
    power = statistics.fisher_power(p, q, rejects)
    assert abs(seen - power) < 5 * math.sqrt(power * (1 - power) / draws)


@pytest.mark.parametrize("total, other, rate", [(18, 18, 0.0), (80, 80, 0.0), (80, 70, 0.2), (9, 30, 0.1)])
def test_the_detectable_rate_is_where_the_power_is_reached(total, other, rate):
    found = statistics.detectable_rate(total, other, rate)
    rejects = statistics.fisher_rejects(total, other)
    # the power in the other direction does not count
    assert 0.8 - 1e-6 <= statistics.fisher_power(found, rate, rejects) < 0.81
    assert statistics.fisher_power(found - 0.02, rate, rejects) < 0.8


def test_three_runs_an_arm_detect_nothing():
    assert math.isnan(statistics.detectable_rate(3, 3))
    assert not statistics.fisher_rejects(3, 3).any()


@pytest.mark.parametrize(
    "first, second, p", [(0, 0, 1.0), (0, 5, 2 / 32), (6, 0, 2 / 64), (3, 3, 1.0), (1, 7, 18 / 256)]
)
def test_mcnemar(first, second, p):
    assert statistics.mcnemar(first, second) == pytest.approx(p)


# Differences.


def test_paired_tests_are_scipys(rng):
    d = rng.normal(0.3, 1, 25)
    with_gaps = np.concatenate([d[:7], [NAN, math.inf], d[7:]])
    found = statistics.paired(with_gaps)
    assert (found.n, found.mean, found.deviation) == (25, pytest.approx(d.mean()), pytest.approx(np.std(d, ddof=1)))
    assert found.sign == pytest.approx(stats.binomtest(int((d > 0).sum()), 25).pvalue)
    assert found.wilcoxon == pytest.approx(stats.wilcoxon(d).pvalue)
    assert found.t == pytest.approx(2 * stats.t.sf(abs(d.mean()) / (np.std(d, ddof=1) / 5), 24))


def test_wilcoxon_of_six_pairs_by_all_signs(rng):
    d = rng.normal(1, 1, 6)
    ranks = np.abs(d).argsort().argsort() + 1

    def low(signs):
        return min(ranks[signs > 0].sum(), ranks[signs < 0].sum())

    every = [low(np.array(signs)) for signs in itertools.product((-1, 1), repeat=6)]
    assert statistics.paired(d).wilcoxon == pytest.approx(np.mean(np.array(every) <= low(np.sign(d))))


def test_differences_without_a_spread():
    assert statistics.paired(np.zeros(5))[3:] == (1.0, 1.0, 1.0)
    same = statistics.paired(np.array([0.3 - 0.2, 0.1, 1.1 - 1.0, 0.1]))  # equal up to rounding
    assert same.t == 0 and same.sign == 0.125
    for few in (np.array([]), np.array([0.2])):
        found = statistics.paired(few)
        assert found.n == len(few) and math.isnan(found.t) and math.isnan(found.sign)


def test_t_power_by_simulation(rng):
    effect, n, draws = 0.9, 9, 6000
    seen = (stats.ttest_1samp(rng.normal(effect, 1, (draws, n)), 0, axis=1).pvalue <= 0.05).mean()
    power = statistics.t_power(effect, n)
    assert abs(seen - power) < 5 * math.sqrt(power * (1 - power) / draws)
    assert statistics.t_power(0.0, n) == pytest.approx(0.05)


@pytest.mark.parametrize("n", [2, 3, 8, 80])
def test_the_detectable_gap_is_where_the_power_is_reached(n):
    gap = statistics.detectable_gap(0.02, n)
    assert statistics.t_power(gap / 0.02, n) == pytest.approx(0.8, abs=1e-6)
    if n == 80:  # the normal's: (1.96 + 0.84) sd / sqrt(n)
        assert gap == pytest.approx(2.8016 * 0.02 / math.sqrt(80), rel=0.03)


def test_no_gap_can_be_detected_without_two_pairs():
    assert math.isnan(statistics.detectable_gap(0.1, 1)) and math.isnan(statistics.detectable_gap(NAN, 5))
    assert statistics.detectable_gap(0.0, 5) == 0


def test_bands_are_the_normals_for_many_seeds_and_the_same_each_time(rng):
    values = rng.normal(5, 2, (400, 3))
    low, high = statistics.mean_band(values)
    half = 1.96 * values.std(0) / 20
    assert np.allclose(high - values.mean(0), half, rtol=0.15) and np.allclose(values.mean(0) - low, half, rtol=0.15)
    again = statistics.mean_band(values.copy())
    assert (again[0] == low).all() and (again[1] == high).all()
    assert np.allclose(statistics.mean_band(values[:, 1])[0], low[1])


def test_bands_keep_the_pairs(rng):
    luck = rng.normal(0, 10, (12, 1))  # a seed's own, the same in all columns
    low, high = statistics.mean_band(luck + np.array([0.0, 1.0]))
    assert np.allclose(low[1] - low[0], 1) and np.allclose(high[1] - high[0], 1)


def test_one_seed_has_no_band():
    for values in (np.ones((1, 4)), np.ones((0, 4))):
        low, high = statistics.mean_band(values)
        assert low.shape == (4,) and np.isnan(low).all() and np.isnan(high).all()


def test_draws_are_n_of_n():
    drawn = statistics.draws(7, 500)
    assert drawn.shape == (500, 7) and (drawn.sum(1) == 7).all() and drawn.mean(0).min() > 0.9


def test_learning_rate_sensitivity():
    final = np.array([[3.0, 2.0, NAN, 50.0], [2.0, 2.0, 2.0, 2.0], [NAN, math.inf, NAN, 9.0]])
    initial = np.array([10.0, 10.0, 7.0])
    # capped: 3, 2, 10, 10; best 2
    assert statistics.lr_sensitivity(final, initial) == pytest.approx([(1 + 0 + 8 + 8) / 4, 0, 0])
    assert float(statistics.lr_sensitivity(final[0], initial[0])) == pytest.approx(4.25)


def test_mean_and_median():
    assert (
        math.isnan(statistics.mean([])) and math.isnan(statistics.median([])) and math.isnan(statistics.median([NAN]))
    )
    assert statistics.mean([1, 2, 6]) == 3 and statistics.median([5, NAN, 1, 2, math.inf]) == 2


def test_fewer_pairs_than_decide_are_never_enough():
    """TOST's power alone would say 3 for a small spread, with which the words are "too few seeds"."""
    gaps = np.array([0.01, -0.01, 0.005, -0.005])
    assert statistics.equivalence_seeds(0.5 / gaps.std(ddof=1)) < statistics.FEW
    word, needed = statistics.equivalence_words(statistics.paired(gaps), 0.5)
    assert word == "yes (p below 0.0001)" and int(needed) == statistics.FEW
    assert statistics.equivalence_words(statistics.paired(gaps[:-1]), 0.5) == ("too few seeds", "-")
