"""A report's sections on signals: sharpness, log Z and norms over time, and whether they predict a divergence."""

import math
from dataclasses import replace

import numpy as np

from ....metrics import LOSS
from . import plots
from .document import Section, Table, between, counted, number, percents
from .early_warning import ENOUGH, WINDOW, Signal, alarms, auroc, held_out, rise, threshold
from .results import Cell, Result, Results
from .statistics import median, wilson

LEADS = (0.01, 0.05, 0.1)  # shares of a run's steps
_SIGNALS = ("sharpness", "centred", "log_z", "grad_norm", "update_norm")  # centred: of the mean-centred logits


def absent(results: Results) -> list[str]:
    """The signals that no run logged."""
    return [name for name in _SIGNALS if name not in results.signals]


def _watched(results: Results) -> list[str]:
    """The signals that may warn, and the loss for comparison."""
    return [*(name for name in _SIGNALS if name in results.signals), LOSS]


def over_time(results: Results) -> Section:
    """Every signal but the loss, at three times and as curves."""
    names = [name for name in _watched(results) if name != LOSS]
    rows = []
    for name in names:
        for cell, runs in results.cells():
            row = [name, *results.named(cell)]
            for share in (0.1, 0.5, 1.0):
                here = [_signal(cell, run, name, "level") for run in runs if name in run.series]
                row.append(number(median([signal.at(results.start + share * results.made) for signal in here]), ".4g"))
            rows.append(row)
    labels = ["signal", *results.labels()]
    heads = [*labels, "at 10 %", "at 50 %", "at the end"]
    section = Section("Sharpness and other signals over time")
    if not names:
        section.blocks.append("None was logged.")
        return section
    text = "The median over runs, with diverged ones, of the last value logged by then."
    section.blocks += [text, Table(heads, rows, len(labels)), *plots.signals(results, names)]
    return section


def warnings(results: Results) -> Section:
    """AUROC, and alarms on held-out seeds, or the reason that there are none."""
    all_runs = [(cell, run) for cell, runs in results.cells() for run in runs]
    out = held_out([run.row.seed for _, run in all_runs])
    tested = [run for _, run in all_runs if run.row.seed in out]
    diverged = sum(run.divergence is not None for run in tested)
    text = (
        f"Alarms are tuned on every other seed and judged on the rest, {', '.join(map(str, sorted(out))) or 'none'}: "
        f"{diverged} runs that diverged, {len(tested) - diverged} that did not. AUROC tunes nothing and uses all seeds."
    )
    section = Section("Early warnings", [text])
    if min(diverged, len(tested) - diverged) < ENOUGH:
        section.blocks.append(
            f"Too few to judge any signal: at least {ENOUGH} of either kind are needed, and dozens to tell signals "
            "apart."
        )
        return section
    leads = [max(1, round(share * results.made)) for share in LEADS]
    ranked, alarmed = [], []
    for name in _watched(results):
        for view in ("level", "rise"):
            signals = [(cell, _signal(cell, run, name, view)) for cell, run in all_runs if name in run.series]
            for within in ("data set", "cell"):
                strata = [replace(of, stratum=cell.data if within == "data set" else cell) for cell, of in signals]
                found = [auroc(strata, lead) for lead in leads]
                if all(math.isnan(a.value) for a in found):
                    continue
                ranked.append([name, view, within, f"{found[0].diverged}, {found[0].healthy}"])
                ranked[-1] += [f"{number(a.value, '.2f')} ({between(a.band, '.2f')})" for a in found]
            if view == "rise":
                limit = threshold([signal for _, signal in signals if signal.seed not in out])
                alarmed.append([name, *_alarm_cells([signal for _, signal in signals if signal.seed in out], limit)])
    section.blocks += [
        "AUROC: how often the signal is higher in a run that will diverge than, at the same step, in a run of the "
        "same data set, or of the same cell (arm and learning rate too), that will not. 0.5: it tells nothing; below: "
        f"it is lower. Level: the signal itself. Rise: in standard deviations above the run's own last {WINDOW} "
        "values. Each has a 95 % band, and the number of runs of either kind that had a pair. A row is missing if no "
        "run had one: the runs diverged before the signal had a history, or all runs of a cell diverged. The onset is "
        f"that of the smoothed loss, which lags: the loss itself is above its best so far by (median) "
        f"{_risen(all_runs, leads)}.",
        Table(["signal", "as", "within", "runs", *(f"{counted(lead, 'step')} before" for lead in leads)], ranked, 3),
        "Alarms: the rise is above the highest value of any healthy run of the other seeds. Warned: how many of the "
        "diverging runs had an alarm before. The lead is the time from the first alarm, which may have been a false "
        "one.",
        Table(["signal", "limit", "warned", "false alarms", "Wilson 95 %", "median lead", "least .. most"], alarmed),
    ]
    return section


def _risen(runs: list[tuple[Cell, Result]], leads: list[int]) -> str:
    """How far the loss itself has risen at these leads, in runs that diverged."""
    parts = []
    for lead in leads:
        risen = []
        for _, run in runs:
            steps, losses = run.losses
            before = losses[(steps <= run.onset - lead) & np.isfinite(losses)]
            if run.divergence and len(before):
                risen.append(float(before[-1] - before.min()))
        parts.append(f"{number(median(risen), '.2f')} nats {counted(lead, 'step')} before it")
    return ", ".join(parts)


def _signal(cell: Cell, run: Result, name: str, view: str) -> Signal:
    steps, values = run.series[name]
    return Signal(steps, rise(values, name == "log_z") if view == "rise" else values, run.onset, run.row.seed, cell)


def _alarm_cells(test: list[Signal], limit: float) -> list[str]:
    if math.isnan(limit):
        return ["no healthy run to tune on", *[""] * 5]
    found = alarms(test, limit)
    false = wilson(found.false, found.healthy)
    spread = f"{found.leads[0]:.0f} .. {found.leads[-1]:.0f}" if found.leads else "-"
    return [
        number(limit, ".1f"),
        f"{found.warned} of {found.diverged}",
        f"{found.false} of {found.healthy}",
        percents(false),
        number(median(found.leads), ".0f"),
        spread,
    ]
