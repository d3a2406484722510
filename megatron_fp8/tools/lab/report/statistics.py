"""Statistics of a sweep's arms: rates, paired differences, power, bands. What can they tell apart, and what not?

Arms are paired: one seed gives every arm the same initial weights and the same data, so two runs of a pair differ only
in the arm. Numbers are FP64; p-values are two-sided. k of n runs diverged:

    Wilson     the rates p with |k/n - p| <= z sqrt(p (1 - p) / n), z = 1.96: unlike k/n +- z sd, right at 0 and at n
    Fisher     given k1 + k2, the share of tables no likelier than the one seen; ignores pairs
    McNemar    the sign test of the pairs in which one run diverged and the other did not
    sign, Wilcoxon, t    of paired differences d: of their signs; of the ranks of |d|; of mean(d) / (sd(d) / sqrt(n))

Power.  If a test finds nothing, that shows nothing unless it could have found something. Fisher's power is a sum over
all tables that it rejects,

    sum_{k1,k2} Bin(k1; n1, p1) Bin(k2; n2, p2) [Fisher's p <= 0.05]

and is low: 0 against 10 % is seen with probability 0.03 at 18 seeds an arm, 0.82 at 80. The t-test's is that of the
non-central t with n - 1 degrees and centre sqrt(n) gap / sd. "Detectable" is the smallest difference with power 0.8.

The interval of a gap is the t-test's: mean(d) -+ t sd(d) / sqrt(n), all gaps that the test does not tell from the one
seen. It says what remains possible if the test sees nothing.

Equivalence.  A test that sees nothing does not show that there is nothing. Two one-sided t-tests (TOST) do: if both
reject at 5 %, the gap lies within -+bound. `equivalence` is the larger of their two p. Its power, if the true gap is 0,
is P(|mean| < bound - t s / sqrt(n)): exact in the normal mean, summed over quantiles of s.

Bands.  Seeds are drawn again with replacement, RESAMPLES times, by a generator with a fixed seed; a band is the middle
95 % of the means. All arms of a seed are drawn together, so a band of differences has the pairs' precision. With few
seeds it is too narrow, by at least 1 - sqrt((n - 1) / n) (n = 8: 6 %); the t-test beside it is not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....errors import UserError
from ....packages import needs

try:
    from scipy import optimize, stats
except ImportError:
    raise UserError(f"megatron-fp8 lab report {needs('scipy')}") from None

CONFIDENCE = 0.95
POWER = 0.8
FEW = 4  # pairs: a spread of fewer decides no equivalence, whatever TOST says
RESAMPLES = 2000
_QUANTILES = 2000
_SAME = 1e-9
_TIE = 1 + 1e-7  # tolerance for rounding: tables as likely as the one seen count as no likelier


def mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean; NaN of an empty sequence."""
    return float(np.mean(values)) if len(values) else math.nan


def median(values: Sequence[float] | np.ndarray) -> float:
    """The median of the finite values; NaN if there are none."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


class Interval(NamedTuple):
    """A confidence interval; NaN if there is none."""

    low: float
    high: float


def wilson(count: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval of a rate, from `count` of `total`."""
    if total == 0:
        return Interval(math.nan, math.nan)
    found = stats.binomtest(count, total).proportion_ci(confidence, method="wilson")
    return Interval(float(found.low), float(found.high))


def fisher(count: int, total: int, other: int, other_total: int) -> float:
    """Fisher's exact p of count/total against other/other_total, two-sided; NaN if a total is 0."""
    if not total or not other_total:
        return math.nan
    return float(stats.fisher_exact([[count, total - count], [other, other_total - other]]).pvalue)


def mcnemar(first_only: int, second_only: int) -> float:
    """McNemar's exact p, two-sided, from the numbers of pairs in which only the one, or only the other, diverged."""
    discordant = first_only + second_only
    return float(stats.binomtest(first_only, discordant).pvalue) if discordant else 1.0


class Paired(NamedTuple):
    """n paired differences: mean, standard deviation, and p of three tests of the hypothesis that their centre is 0."""

    n: int
    mean: float
    deviation: float
    sign: float
    wilcoxon: float
    t: float


def paired(differences: np.ndarray) -> Paired:
    """The tests of paired differences (n,), without those that are not finite. NaN for what n < 2 cannot give.

    Differences of zero count for neither sign; if all are zero, p = 1.
    """
    d = differences[np.isfinite(differences)]
    n, centre = len(d), mean(d)
    if n < 2:
        return Paired(n, centre, math.nan, math.nan, math.nan, math.nan)
    deviation = float(d.std(ddof=1))
    if not d.any():
        return Paired(n, centre, deviation, 1.0, 1.0, 1.0)
    sign = mcnemar(int((d > 0).sum()), int((d < 0).sum()))
    rank = float(stats.wilcoxon(d).pvalue)
    if deviation <= _SAME * abs(centre):  # the same difference every time, up to rounding
        return Paired(n, centre, deviation, sign, rank, 0.0)
    return Paired(n, centre, deviation, sign, rank, float(stats.ttest_1samp(d, 0).pvalue))


def t_interval(found: Paired) -> Interval:
    """The gaps that the t-test does not tell from the mean seen, at CONFIDENCE; NaN for n < 2."""
    if found.n < 2:
        return Interval(math.nan, math.nan)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, found.n - 1)) * found.deviation / math.sqrt(found.n)
    return Interval(found.mean - half, found.mean + half)


def equivalence(found: Paired, bound: float) -> float:
    """p of the hypothesis that the gap is at least `bound` large, of either sign (TOST); NaN for n < 2."""
    if found.n < 2:
        return math.nan
    error = found.deviation / math.sqrt(found.n)
    if error == 0:
        return float(abs(found.mean) >= bound)
    return float(stats.t.sf((bound - abs(found.mean)) / error, found.n - 1))


def equivalence_power(effect: float, n: int, alpha: float = 1 - CONFIDENCE) -> float:
    """The power of TOST, if the gap is 0 and the bound is `effect` standard deviations of a pair's difference."""
    limit = stats.t.ppf(1 - alpha, n - 1)
    spread = (stats.chi2.ppf((np.arange(_QUANTILES) + 0.5) / _QUANTILES, n - 1) / (n - 1)) ** 0.5
    room = np.clip(effect - limit * spread / math.sqrt(n), 0, None) * math.sqrt(n)
    return float((2 * stats.norm.cdf(room) - 1).mean())


def equivalence_seeds(effect: float, power: float = 0.9, most: int = 10_000) -> int | None:
    """How many pairs TOST needs for this power, `effect` as above; None: more than `most`."""
    low, high = 2, most
    if not effect > 0 or equivalence_power(effect, most) < power:
        return None
    while high - low > 1:  # the power grows with n
        middle = (low + high) // 2
        low, high = (low, middle) if equivalence_power(effect, middle) >= power else (middle, high)
    return high


def equivalence_words(found: Paired, bound: float) -> tuple[str, str]:
    """What TOST says of a bound, in words, and how many pairs it needs for power 0.9 if the gap is 0 ("-": not known).

    "no" if the t-test's interval lies outside the bound. Fewer than FEW pairs decide nothing: their spread is chance.
    """
    if found.n < FEW:
        return "too few seeds", "-"
    p, (low, high) = equivalence(found, bound), t_interval(found)
    outside = low > bound or high < -bound
    needed = equivalence_seeds(bound / found.deviation) if found.deviation else None
    shown = f"{p:.4f}" if p >= 1e-4 else "below 0.0001"
    word = f"yes (p {shown})" if p <= 1 - CONFIDENCE else "no" if outside else "not shown"
    return word, str(max(needed, FEW)) if needed else "-"


def fisher_rejects(total: int, other_total: int, alpha: float = 1 - CONFIDENCE) -> np.ndarray:
    """Whether Fisher's p <= alpha, for every table: (total + 1, other_total + 1) bool, indexed by the two counts."""
    a, b = np.arange(total + 1)[:, None], np.arange(other_total + 1)[None, :]
    likely = stats.hypergeom.pmf(a, total + other_total, total, a + b)  # given a + b
    rejects = np.zeros(likely.shape, bool)
    for together in range(total + other_total + 1):
        first = np.arange(max(0, together - other_total), min(total, together) + 1)
        given = likely[first, together - first]
        below = given[None, :] <= given[:, None] * _TIE
        rejects[first, together - first] = (below * given[None, :]).sum(1) <= alpha
    return rejects


def fisher_power(rate: float, other: float, rejects: np.ndarray) -> float:
    """The probability that Fisher's test tells two rates apart. rejects: `fisher_rejects`' table of the two totals."""
    totals = rejects.shape[0] - 1, rejects.shape[1] - 1
    one = stats.binom.pmf(np.arange(totals[0] + 1), totals[0], rate)
    two = stats.binom.pmf(np.arange(totals[1] + 1), totals[1], other)
    return float(one @ rejects @ two)


def detectable_rate(total: int, other_total: int, rate: float = 0.0, power: float = POWER) -> float:
    """The smallest rate above `rate` that Fisher's test tells from it with this power; NaN if not even 100 %.

    total: runs of the arm with the rate sought; other_total: runs of the arm with `rate`.
    """
    rejects = fisher_rejects(total, other_total)
    # Count only tables in which the higher rate looks higher; else the power would start to rise below `rate`.
    higher = np.arange(total + 1)[:, None] * other_total > np.arange(other_total + 1)[None, :] * total
    if not total or not other_total or fisher_power(1.0, rate, rejects & higher) < power:
        return math.nan
    return float(optimize.brentq(lambda p: fisher_power(p, rate, rejects & higher) - power, rate, 1.0))


def t_power(effect: float, n: int, alpha: float = 1 - CONFIDENCE) -> float:
    """The power of the t-test of n paired differences whose mean is `effect` standard deviations."""
    limit, centre = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
    # scipy's other tail is NaN if it is nearly zero
    return float(stats.nct.sf(limit, n - 1, centre) + np.nan_to_num(stats.nct.cdf(-limit, n - 1, centre)))


def detectable_gap(deviation: float, n: int, power: float = POWER, alpha: float = 1 - CONFIDENCE) -> float:
    """The smallest mean of n paired differences with this deviation that the t-test sees; NaN for n < 2.

    alpha: the largest p that counts as seen.
    """
    if n < 2 or not math.isfinite(deviation):
        return math.nan
    if deviation == 0:
        return 0.0
    largest = 1.0
    while t_power(largest, n, alpha) < power:
        largest *= 2
    return deviation * float(optimize.brentq(lambda effect: t_power(effect, n, alpha) - power, 0.0, largest))


def draws(n: int, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each of n is drawn when n are drawn with replacement: (resamples, n), always the same."""
    chosen = np.random.default_rng(0).integers(n, size=(resamples, n))
    counts = np.zeros((resamples, n))
    np.add.at(counts, (np.arange(resamples)[:, None], chosen), 1)
    return counts


def mean_band(values: np.ndarray, confidence: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """The bootstrap's band of the mean over seeds: (seeds, ...), all finite -> (low, high), each (...).

    NaN for one seed.
    """
    n = len(values)
    if n < 2:
        nothing = np.full(values.shape[1:], math.nan)
        return nothing, nothing
    means = np.tensordot(draws(n), values, 1) / n
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def lr_sensitivity(final: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Learning-rate sensitivity (arXiv 2309.14322): the mean over learning rates of (final loss - best final loss).

    Args:
        final: (..., learning rates) nats; each is capped at the initial loss, and NaN (no loss) counts as that.
        initial: (...) nats, the loss at initialisation.

    Returns (...) nats, 0 for a loss that does not depend on the learning rate.
    """
    capped = np.fmin(final, initial[..., None])
    return (capped - capped.min(-1, keepdims=True)).mean(-1)
