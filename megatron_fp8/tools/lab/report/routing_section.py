"""A report's section on mixtures of experts, of runs with --fp8-log-routing: does an arm spread tokens differently?

Arms of one seed begin with the same weights, so expert e of a layer is the same expert in all of them. How differently
two runs spread a layer's tokens is the share of tokens that sit on other experts, the total variation of two
distributions over E experts:

    elsewhere = 1/2 sum_e |n_e / n - m_e / m| = sum_e |load_e - load'_e| / 2E
"""

import re

import numpy as np

from . import plots
from .curves import began
from .document import Section, Table, between, number, percent
from .results import Result, Results, healthy
from .statistics import mean, paired, t_interval

LATE = 0.25  # share of the run at its end, whose values are averaged: a single step's batch is no sample of the text
_ENTROPIES = "router_entropy", "load_entropy"
_LOAD = re.compile(r"(.+)\.experts\.(\d+)_load")


def logged(results: Results) -> bool:
    """Whether any run logged its routing."""
    return _ENTROPIES[0] in results.signals


def routing(results: Results) -> Section:
    """Entropies and loads of each cell at the end, beside the baseline's."""
    rows = []
    for cell, runs in results.cells():
        runs = [run for run in runs if _ENTROPIES[0] in run.series and run.divergence is None]
        pairs = healthy(results.pairs(cell)) if cell.arm != results.baseline else []
        pairs = [pair for pair in pairs if all(_ENTROPIES[0] in run.series for run in pair)]
        row = [*results.named(cell), str(len(runs))]
        for name in _ENTROPIES:
            gaps = paired(np.array([late(other, name) - late(base, name) for base, other in pairs]))
            row.append(number(mean([late(run, name) for run in runs])))
            row += [number(gaps.mean, "+.4f"), between(t_interval(gaps), "+.4f")] if pairs else ["", ""]
        loads = [layer for run in runs for layer in _loads(run).values()]
        row += [number(mean([extreme(layer) for layer in loads]), ".3f") for extreme in (np.max, np.min)]
        row.append(percent(mean([elsewhere(base, other) for base, other in pairs]), 2) if pairs else "")
        rows.append(row)
    labels = results.labels()
    heads = [*labels, "runs"]
    heads += [head for name in ("router entropy", "load entropy") for head in (name, "gap", "95 % interval")]
    text = (
        f"Means over the last {percent(LATE)} of a run, of runs that did not diverge. Router entropy: how unsure a "
        "router is of a token's expert, nats, the mean over tokens and layers. Load entropy: that of a layer's tokens "
        "by expert. Both are ln E of E experts at most. Load: an expert's tokens over its layer's mean; the busiest "
        f"and the idlest expert of a layer, the mean over layers. Gap: from {results.baseline} with the same seed, "
        "with the t-test's interval. Elsewhere: the share of a layer's tokens that sit on other experts than in that "
        f"run of {results.baseline}."
    )
    table = Table([*heads, "busiest", "idlest", "elsewhere"], rows, len(labels))
    return Section("Routing of tokens to experts", [text, table, *plots.signals(results, list(_ENTROPIES))])


def late(run: Result, name: str) -> float:
    """The mean over the last LATE of the steps that the run made."""
    steps, values = run.series[name]
    return mean(values[steps > steps[-1] - LATE * (steps[-1] - began(run.losses[0]))])


def _loads(run: Result) -> dict[str, np.ndarray]:
    """{layer: the late loads (E,) of its experts}."""
    found: dict[str, dict[int, float]] = {}
    for name in run.series:
        if match := _LOAD.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = late(run, name)
    return {layer: np.array([loads[e] for e in sorted(loads)]) for layer, loads in found.items()}


def elsewhere(base: Result, other: Result) -> float:
    """The mean over layers of the share of tokens that sit on other experts in the other run; NaN if the two have no
    layer with as many experts."""
    one, two = _loads(base), _loads(other)
    alike = [(one[layer], two[layer]) for layer in one if layer in two and len(one[layer]) == len(two[layer])]
    return mean([np.abs(a - b).sum() / (2 * len(a)) for a, b in alike])
