"""A sweep's report, section by section: tables, and sentences on what they show and what they cannot show.

A difference is "seen" if the test beside it gives p <= 0.05. Among k comparisons some 0.05 k are seen by chance. So the
report states k, and marks the differences that are also seen at 0.05 / k (Bonferroni).
"""

import math
import textwrap
from functools import cache

import numpy as np

from ....metrics import LOSS
from ..sweep.plan_file import UNNAMED
from ..sweep.rows import DONE, FAILED, NOT_FINITE, RUNNING, WAITING
from . import onset_section, plots, routing_section, signal_sections, statistics
from .curves import CAUSES, RULE, spike_score, steps_ratio
from .document import Log, Section, Table, between, counted, number, p_value, percent, percents
from .results import Cell, Result, Results, healthy
from .statistics import Paired, fisher, lr_sensitivity, mcnemar, mean, mean_band, median, paired, wilson

ALPHA = 1 - statistics.CONFIDENCE
RANKABLE = 6  # pairs; with fewer, neither the sign test nor Wilcoxon's can give 0.05


@cache
def _detectable_rate(total: int, other_total: int, rate: float) -> float:
    return statistics.detectable_rate(total, other_total, rate)


def sections(results: Results, within: float | None = None) -> list[Section]:
    """The whole report. within: per cent of the baseline's loss; two final losses that differ by less are equal."""
    comparisons = [_Comparison(results, cell) for cell, _ in results.cells() if cell.arm != results.baseline]
    made = [
        _summary(results, comparisons),
        _cannot_show(results, comparisons),
        _what_ran(results),
        _divergence(results, comparisons),
        onset_section.onsets(results),
        _final_loss(results, comparisons, within),
    ]
    if len(results.rates) > 1:
        made.append(_sensitivity(results))
    if routing_section.logged(results):
        made.append(routing_section.routing(results))
    made += [_spikes(results), signal_sections.over_time(results), signal_sections.warnings(results)]
    return [*made, _steps_to_loss(results)]


class _Comparison:
    """A cell against the baseline's."""

    def __init__(self, results: Results, cell: Cell):
        self.cell, self.name = cell, ", ".join(results.named(cell))
        self.runs, self.base = results.cell(cell), results.cell(cell._replace(arm=results.baseline))
        self.diverged, self.base_diverged = _diverged(self.runs), _diverged(self.base)
        pairs = results.pairs(cell)
        only = [(a.divergence is not None) - (b.divergence is not None) for a, b in pairs]
        self.fisher = fisher(self.diverged, len(self.runs), self.base_diverged, len(self.base))
        self.mcnemar = mcnemar(only.count(1), only.count(-1)) if pairs else math.nan
        rate = self.base_diverged / len(self.base) if self.base else math.nan
        self.detectable_rate = _detectable_rate(len(self.runs), len(self.base), rate) if self.base else math.nan
        both = healthy(pairs)
        self.left_out = len(pairs) - len(both)
        self.gaps = np.array([results.final(other) - results.final(base) for base, other in both])
        self.base_loss = mean([results.final(base) for base, _ in both]) or math.nan  # there is no share of 0
        self.test: Paired = paired(self.gaps)
        self.interval = statistics.t_interval(self.test)
        self.detectable_gap = statistics.detectable_gap(self.test.deviation, self.test.n)


def _diverged(runs: list[Result]) -> int:
    return sum(result.divergence is not None for result in runs)


def _summary(results: Results, comparisons: list[_Comparison]) -> Section:
    section = Section("What these runs show")
    strict = ALPHA / max(1, len(comparisons))
    lines, quiet = [], []
    for c in comparisons:
        if not c.base:
            lines.append(f"{c.name}: no run of {results.baseline} to compare with.")
        elif c.fisher <= ALPHA or c.test.t <= ALPHA:
            lines.append(f"{c.name}: {_rate_words(results, c, strict)} {_gap_words(c, strict)}")
        else:
            quiet.append(f"{c.name} ({_left_open(c)})")
    if quiet:
        lines.append(
            "No difference seen, neither in divergence nor in final loss, though there may be one. Each entry has the "
            "mean gap of the final loss, its 95 % interval, and the smallest gap that the t-test would have seen with "
            f"probability {statistics.POWER:g}: {'; '.join(quiet)}. The tables below show which rates of divergence "
            "remain possible."
        )
    lines += _order_words(results)
    if not comparisons:
        lines = [f"There is no run of an arm other than {results.baseline}, so nothing is compared."]
    section.blocks += [
        f"Each arm against {results.baseline}, at the same learning rate and on the same data.",
        lines,
        f"{counted(len(comparisons), 'comparison')} of divergence, and as many of final loss. Without any true "
        f"difference, {percent(ALPHA)} of them would still show one. Differences with "
        f"p <= {ALPHA:g} / {max(1, len(comparisons))} (Bonferroni) are marked *.",
    ]
    return section


def _order_words(results: Results) -> list[str]:
    """Sentences on the arms whose runs are seen to diverge earlier, or later, than the baseline's."""
    orders = onset_section.by_seed(results)
    lines = []
    for (data, arm), order in orders.items():
        if order.p <= ALPHA:
            when, votes = ("earlier", order.earlier) if order.earlier > order.later else ("later", order.later)
            name = f"{data}, {arm}" if len(results.data) > 1 else arm
            most = " at more learning rates than the opposite" if len(results.rates) > 1 else ""
            lines.append(
                f"{name}: {votes} of {sum(order[:3])} seeds diverge {when} than {results.baseline}'s{most} "
                f"(sign test p {_starred(order.p, ALPHA / len(orders))}; "
                f"{counted(len(orders), 'such comparison')}, marked at {ALPHA:g} / {len(orders)})."
            )
    return lines


def _rate_words(results: Results, c: _Comparison, strict: float) -> str:
    base = f"{c.base_diverged} of {len(c.base)} of {results.baseline}"
    counts = f"{c.diverged} of {len(c.runs)} runs diverged, against {base}"
    if c.fisher <= ALPHA:
        higher = c.diverged * len(c.base) > c.base_diverged * len(c.runs)
        return f"{counts}: {'more' if higher else 'less'} often (Fisher p {_starred(c.fisher, strict)})."
    limit = c.detectable_rate
    if math.isnan(limit):
        return f"{counts}: no difference seen; with so few runs not even a rate of 100 % would be."
    return f"{counts}: no difference seen; only a rate of {percent(limit)} or more would probably have been."


def _gap_words(c: _Comparison, strict: float) -> str:
    test = c.test
    if test.n < 2:
        return f"Final loss: {_pairs(c)} in which neither run diverged, too few for a statement."
    seen = f"Final loss {test.mean:+.4f} nats ({_relative(c)}) over {_pairs(c)}"
    if test.t <= ALPHA:
        by = "t-test p" if test.n >= RANKABLE else "by the t-test alone, p"
        return f"{seen}: {'worse' if test.mean > 0 else 'better'} ({by} {_starred(test.t, strict)})."
    limit = f"{number(c.detectable_gap)} ({percent(c.detectable_gap / c.base_loss, 2)})"
    return f"{seen}: no difference seen; one of {limit} or more would probably have been."


def _left_open(c: _Comparison) -> str:
    if c.test.n < 2:
        return _pairs(c)
    return f"{_relative(c)} over {_pairs(c)}, seen from {percent(c.detectable_gap / c.base_loss, 2)}"


def _relative(c: _Comparison) -> str:
    """For example "+0.70 %, +0.02 .. +1.38 %", relative to the baseline's loss."""
    return ", ".join(_relative_cells(c))


def _relative_cells(c: _Comparison) -> list[str]:
    interval = between([100 * end / c.base_loss for end in c.interval], "+.2f")
    return [percent(c.test.mean / c.base_loss, 2, "+"), interval if interval == "-" else f"{interval} %"]


def _pairs(c: _Comparison) -> str:
    return counted(c.test.n, "pair")


def _starred(p: float, strict: float) -> str:
    return p_value(p) + ("*" if p <= strict else "")


def _cannot_show(results: Results, comparisons: list[_Comparison]) -> Section:
    states = [row.state for row in results.rows]
    lines = []
    missing = {state: states.count(state) for state in (WAITING, RUNNING, FAILED) if state in states}
    if missing:
        counts = ", ".join(f"{count} {state}" for state, count in missing.items())
        lines.append(
            f"{counts} of {len(states)} runs are not in this report. What they have in common is missing here."
        )
    ended = {cell for cell, _ in results.cells()}
    for cell in results.planned():
        if cell not in ended:
            lines.append(f"{', '.join(results.named(cell))}: no run has ended well, so nothing is said about it.")
    for pairs in range(1, RANKABLE):
        if few := [c.name for c in comparisons if c.test.n == pairs]:
            lines.append(
                f"With {pairs} pair{'s' * (pairs > 1)}, the sign test and Wilcoxon's cannot give p <= {ALPHA:g} at all:"
                f" {'; '.join(few)}."
            )
    if left_out := [f"{c.name} ({c.left_out})" for c in comparisons if c.left_out]:
        lines.append(
            f"The final loss's gap leaves out pairs in which a run diverged, so it covers only the lucky seeds: "
            f"{'; '.join(left_out)}."
        )
    limits = [c.detectable_rate for c in comparisons if c.base]
    if limits:
        blind = sum(map(math.isnan, limits))
        seen = [limit for limit in limits if not math.isnan(limit)]
        if seen:
            lines.append(
                "Divergence rates that could have been told from the baseline's (Fisher, power "
                f"{statistics.POWER:g}): {percent(min(seen))} or more at best, {percent(max(seen))} at worst."
            )
        if blind:
            lines.append(
                f"In {blind} of {len(limits)} comparisons of divergence no higher rate could have been told from the "
                "baseline's."
            )
    if gaps := [c for c in comparisons if c.test.n > 1 and math.isfinite(c.base_loss)]:
        lines.append(_gaps_told(gaps, len(comparisons)))
    if len(results.data) == 1:
        shown = "the command's" if results.data == [UNNAMED] else results.data[0]
        lines.append(f"One data set, {shown}: nothing about others.")
    if len(results.rates) == 1:
        lines.append(f"One learning rate, {results.rates[0]:g}: nothing about others.")
    lines.append(f"Runs of {results.length}: nothing about what comes later in training.")
    if absent := signal_sections.absent(results):
        lines.append(f"Not logged, so not judged: {', '.join(absent)}.")
    return Section("What they cannot show", [lines])


def _gaps_told(gaps: list[_Comparison], comparisons: int) -> str:
    """The gaps of the final loss that a test would have seen: as a single comparison, and as one of all."""
    words = []
    for alpha in (ALPHA, ALPHA / comparisons):
        found = [statistics.detectable_gap(c.test.deviation, c.test.n, alpha=alpha) for c in gaps]
        sizes = [gap / c.base_loss for gap, c in zip(found, gaps, strict=True)]
        words.append(f"{percent(min(sizes), 2)} at best, {percent(max(sizes), 2)} at worst")
    together = f"; as one of all {comparisons}, after Bonferroni's correction, {words[1]}" if comparisons > 1 else ""
    return (
        "Gaps of the final loss that would have been seen, in % of the baseline's (t-test, power "
        f"{statistics.POWER:g}): {words[0]}{together}."
    )


def _what_ran(results: Results) -> Section:
    shared, own = results.flags()
    rows = []
    for arm in results.arms:
        states = [row.state for row in results.rows if row.arm == arm]
        counts = [str(states.count(state)) for state in (DONE, NOT_FINITE, FAILED, RUNNING, WAITING)]
        rows.append([arm, " ".join(own[arm]) or "-", str(len(states)), *counts])
    heads = ["arm", "its flags", "runs", "done", "ended by NaN", "failed", "running", "waiting"]
    seeds = len({row.seed for row in results.rows})
    data = "the command's data" if results.data == [UNNAMED] else f"data {', '.join(results.data)}"
    text = (
        f"{counted(len(results.rows), 'run')} of {results.length}: {counted(len(results.arms), 'arm')}, "
        f"{counted(seeds, 'seed')}, learning rate{'s' * (len(results.rates) > 1)} "
        f"{', '.join(f'{rate:g}' for rate in results.rates)}, {data}. Runs of one "
        "seed begin with the same weights and see the same data in the same order. Only runs that are done, or "
        "ended by NaN, are judged. All share this command:"
    )
    command = textwrap.fill(" ".join(shared), 116, break_long_words=False, break_on_hyphens=False)
    section = Section("What was run", [text, Log(command), Table(heads, rows, 2)])
    failed = [f"{row.name}: exit code {row.exit_code}" for row in results.rows if row.state == FAILED]
    if failed:
        section.blocks += ["Failed, the ends of their logs are in runs.html:", failed]
    section.blocks += plots.losses(results)
    return section


def _divergence(results: Results, comparisons: list[_Comparison]) -> Section:
    against = {c.cell: c for c in comparisons}
    rows = []
    for cell, runs in results.cells():
        count, interval = _diverged(runs), wilson(_diverged(runs), len(runs))
        causes = [str(sum(r.divergence is not None and r.divergence.cause == cause for r in runs)) for cause in CAUSES]
        tests = ["", "", ""]
        if c := against.get(cell):
            tests = [p_value(c.fisher), p_value(c.mcnemar), percent(c.detectable_rate)]
        rate = [percent(count / len(runs)), percents(interval)]
        step = number(median([run.onset for run in runs if run.divergence]), ".0f")
        rows.append([*results.named(cell), str(len(runs)), str(count), *causes, step, *rate, *tests])
    labels = results.labels()
    heads = [*labels, "runs", "diverged", *CAUSES, "median step", "rate", "Wilson 95 %"]
    heads += ["Fisher p", "McNemar p", "detectable"]
    text = (
        f"A run diverged if its loss is not finite over its last {percent(RULE.patience)} of steps, or if it ended "
        f"because of that; or if the mean of these steps is above the first loss; or if its smoothed loss is more than "
        f"{RULE.rise:g} nats above its own best for {percent(RULE.patience)} of the steps on end. The cause is the "
        f"first that holds. p: against {results.baseline}; McNemar's test compares pairs. Detectable: the lowest rate "
        f"that Fisher's test would tell from the baseline's with probability {statistics.POWER:g}."
    )
    return Section("Divergence", [text, Table(heads, rows, len(labels)), *plots.divergence(results)])


def _final_loss(results: Results, comparisons: list[_Comparison], within: float | None) -> Section:
    against = {c.cell: c for c in comparisons}
    labels = results.labels()
    heads = [*labels, "healthy runs", "mean", "deviation", "pairs", "gap", "relative", "95 % interval"]
    heads += ["sign p", "Wilcoxon p", "t p", "detectable gap", "detectable share"]
    if within is not None:
        heads += [f"within {within:g} %", "pairs needed"]
    rows = []
    for cell, runs in results.cells():
        finals = np.array([results.final(run) for run in runs if run.divergence is None])
        deviation = float(finals.std(ddof=1)) if len(finals) > 1 else math.nan
        row = [*results.named(cell), str(len(finals)), number(mean(finals)), number(deviation)]
        if c := against.get(cell):
            row += [str(c.test.n), number(c.test.mean, "+.4f"), *_relative_cells(c)]
            row += [p_value(c.test.sign), p_value(c.test.wilcoxon), p_value(c.test.t)]
            row += [number(c.detectable_gap), percent(c.detectable_gap / c.base_loss, 2)]
            if within is not None:
                row += statistics.equivalence_words(c.test, within * c.base_loss / 100)
        rows.append(row + [""] * (len(heads) - len(row)))
    kind = "The validation loss after the last step"
    if results.outcome != "validation":
        kind = (
            f"The mean training loss of the last {percent(RULE.patience)} of steps (some runs lack a validation loss)"
        )
    text = (
        f"{kind}, nats. Gap: the mean difference from {results.baseline} with the same seed, over pairs in which "
        "neither run diverged. Relative: its share of the baseline's loss, with the t-test's interval for this "
        f"comparison alone. Detectable gap: the smallest that the t-test would see with probability "
        f"{statistics.POWER:g}, given the spread of the gaps seen here."
    )
    if within is not None:
        text += (
            f" Within {within:g} %: whether two one-sided t-tests (TOST) show that the gap is smaller, of either sign; "
            f"with fewer than {statistics.FEW} pairs they decide nothing. Pairs needed: for power 0.9, if the true gap "
            "is 0 and the spread is this one."
        )
    return Section("Final loss", [text, Table(heads, rows, len(labels)), *plots.gaps(results)])


def _sensitivity(results: Results) -> Section:
    rows = []
    for data in results.data:
        found = {arm: _sensitivities(results, data, arm) for arm in results.arms}
        for arm, by_seed in found.items():
            values = np.array([*by_seed.values()])
            row = [*([data] if len(results.data) > 1 else []), arm, str(len(values))]
            row += [number(mean(values)), between(mean_band(values))]
            common = [seed for seed in by_seed if seed in found[results.baseline]]
            gaps = np.array([by_seed[seed] - found[results.baseline][seed] for seed in common])
            test = paired(gaps)
            rows.append(row + ([number(test.mean, "+.4f"), p_value(test.t)] if arm != results.baseline else ["", ""]))
    labels = results.labels()
    labels.remove("learning rate")
    text = (
        "The mean over the learning rates of (final loss - best final loss of that seed), nats, with each loss "
        "capped at the first. It is 0 if the loss does not depend on the learning rate (arXiv 2309.14322). Only seeds "
        f"whose {len(results.rates)} learning rates have all ended; diverged runs count. Variation from run to run "
        "raises it too, because the best of several is below their mean."
    )
    table = Table([*labels, "seeds", "sensitivity", "95 % band", "gap", "t p"], rows, len(labels))
    return Section("Learning-rate sensitivity", [text, table, *plots.learning_rates(results)])


def _sensitivities(results: Results, data: str, arm: str) -> dict[int, float]:
    """{seed: sensitivity} for the seeds that have every learning rate."""
    by_rate = [{r.row.seed: r for r in results.cell(Cell(data, rate, arm))} for rate in results.rates]
    seeds = [seed for seed in by_rate[0] if all(seed in runs for runs in by_rate)]
    found = {}
    for seed in seeds:
        runs = [by_seed[seed] for by_seed in by_rate]
        initial = np.array([run.initial for run in runs])
        if np.isfinite(initial).any():
            final = np.array([results.final(run) for run in runs])
            found[seed] = float(lr_sensitivity(final, np.nanmean(initial)))
    return found


def _spikes(results: Results) -> Section:
    names = [name for name in (LOSS, "grad_norm") if name in results.signals]
    rows = []
    for cell, runs in results.cells():
        row = results.named(cell)
        for name in names:
            scores = [_spike_score(run, name) for run in runs if name in run.series]
            judged = [score for score in scores if not math.isnan(score)]
            row += [str(len(judged)), percent(mean(judged), 3), percent(max(judged, default=math.nan), 3)]
        rows.append(row)
    labels = results.labels()
    heads = [head for name in names for head in (f"{name}: runs", "mean", "most")]
    text = (
        "The share of steps at which the loss, or the gradient norm, lies 7 or more standard deviations from the "
        "mean of the 1,000 steps before (OLMo 2), from the 51st step on and, in runs that diverged, before the onset."
    )
    return Section("Spike score", [text, Table([*labels, *heads], rows, len(labels))])


def _spike_score(run: Result, name: str) -> float:
    steps, values = run.series[name]
    return spike_score(values[steps < run.onset])


def _steps_to_loss(results: Results) -> Section:
    rows = []
    for cell, _ in results.cells():
        if cell.arm == results.baseline:
            continue
        ratios = np.array([steps_ratio(base.losses, other.losses) for base, other in healthy(results.pairs(cell))])
        logs = np.log(ratios)
        ratio, band = number(math.exp(mean(logs)), ".3f"), between(np.exp(mean_band(logs)), ".3f")
        rows.append([*results.named(cell), str(len(logs)), ratio, band])
    labels = results.labels()
    text = (
        f"Steps that {results.baseline} needs, divided by those that the arm needs, to reach the training loss of the "
        "worse of the two. Below 1 the arm needs more. Multiplied by the ratio of their speeds, in runs.html, this is "
        "the loss-matched speed-up. Geometric mean over pairs in which neither run diverged."
    )
    return Section("Steps to the same loss", [text, Table([*labels, "pairs", "ratio", "95 % band"], rows, len(labels))])
