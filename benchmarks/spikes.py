"""False alarms and found spikes of --fp8-on-spike, on synthetic curves and on real ones.

    python benchmarks/spikes.py        CPU, one core, five minutes

Synthetic curves (spikes.csv), 1,000 steps each. False alarms: values taken for a spike at sigma 7 where none was
planted, in 10,000 judged values; "early": in the first 128 steps. Found: of spikes planted one a curve, at a random
step from 64 on, with the given height in standard deviations of the curve's own noise at that step. Log-normal noise is
symmetric in the logarithm, like the noise of gradient norms, nearly; Student's t has 3 degrees of freedom.

Real curves (spikes_real.csv): loss and gradient norm of all runs of results/lab, 300 steps each, window 128. DETECTORS
lists the judges: the product's series of the norm's values; the same of their logarithms, because a norm is positive
and its noise closer to log-normal than to normal; and median with median absolute deviation, which earlier spikes do
not pull up. The same sigma means something else to each, so compare them at equal numbers of false alarms. Three
counts:

- False alarms, in runs that do not diverge, and in those that do up to AHEAD steps before the onset
  (tools/lab/report/curves.py).
- Found: norms of so many times the median of the 16 before, planted in those steps, at two random steps a run.
- Told: divergences with an alarm in the AHEAD steps before the onset, or at it, which is the purpose of a watch. Beside
  it are the false alarms in these runs before that; a detector that tells only by chance has as many.

Runs that diverge within 64 + 2 AHEAD steps, while the learning rate warms up, are left out: they have no history.
"""

import argparse
import copy
import csv
import lzma
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
from stamp import ROOT

from megatron_fp8.flags.watch import LEAST_WINDOW
from megatron_fp8.monitor.spikes import Series, Spike
from megatron_fp8.tools.lab.report.results import Result, Results
from megatron_fp8.tools.lab.sweep.store import Store

STEPS, CURVES, EARLY, WINDOWS, HEIGHTS = 1000, 40, 128, (32, 128, 512), (8, 12, 20)
OUT = ROOT / "benchmarks/results"
t = np.arange(STEPS)


def autoregressive(noise: np.ndarray, keep: float) -> np.ndarray:
    """AR(1) of unit variance."""
    out = noise.copy()
    for i in range(1, len(out)):
        out[i] = keep * out[i - 1] + math.sqrt(1 - keep * keep) * noise[i]
    return out


# {name: (the curve without noise, function that draws a curve with noise)}
KINDS: dict[str, tuple[np.ndarray, Callable[[np.random.Generator], np.ndarray]]] = {}


def kind(name: str, base: np.ndarray | float, curve: Callable[[np.ndarray, np.ndarray], np.ndarray], draw="normal"):
    level = np.broadcast_to(np.asarray(base, dtype=float), STEPS)

    def make(rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_t(3, STEPS) if draw == "t" else rng.standard_normal(STEPS)
        return curve(level, noise)

    KINDS[name] = level, make


kind("loss, constant", 3.0, lambda x, z: x + 0.03 * z)
kind("loss, power law from 10 to 2.7", 2 + 8 * (1 + t / 30) ** -0.7, lambda x, z: x + 0.03 * z)
kind("loss, exponential of 20 steps", 4 + 7 * np.exp(-t / 20), lambda x, z: x + 0.03 * z)
kind("loss, rising 1 % a step", 3 + 0.03 * t, lambda x, z: x + 0.03 * z)
kind("loss, 3 % that last 10 steps", 3.0, lambda x, z: x * (1 + 0.03 * autoregressive(z, 0.9)))
kind("norm, log-normal 0.2", 0.5, lambda x, z: x * np.exp(0.2 * z))
kind("norm, log-normal 0.4", 0.5, lambda x, z: x * np.exp(0.4 * z))
kind("norm, falling, log-normal 0.2", 0.3 + 3 * np.exp(-t / 150), lambda x, z: x * np.exp(0.2 * z))
kind("norm, x 5 in 100 steps, log-normal 0.2", 0.3 + 1.2 * np.minimum(t / 100, 1), lambda x, z: x * np.exp(0.2 * z))
kind("Student's t, 3 degrees", 1.0, lambda x, z: x + 0.03 * z, draw="t")


def spikes(curve: np.ndarray, window: int) -> list[int]:
    series = Series(7.0, window)
    return [i for i, value in enumerate(curve.tolist()) if series.spike(value)]


def made() -> Iterator[list]:
    """The rows of spikes.csv, header first."""
    rng = np.random.default_rng(1)
    yield ["curve", "window", "false per 10,000", "early", *(f"found of {h} sigma, %" for h in HEIGHTS)]
    for name, (level, make) in KINDS.items():
        for window in WINDOWS:
            curves = [make(rng) for _ in range(CURVES)]
            alarms = [i for curve in curves for i in spikes(curve, window)]
            early = sum(i < EARLY for i in alarms) / (CURVES * (EARLY - 16))
            found = []
            for height in HEIGHTS:
                hits = 0
                for _ in range(CURVES // 2):
                    curve, at = make(rng), int(rng.integers(64, STEPS))
                    noise = np.std([make(rng)[at] for _ in range(20)])
                    curve[at] = level[at] + height * noise
                    hits += at in spikes(curve[: at + 1], window)
                found.append(round(100 * hits / (CURVES // 2)))
            rate = 1e4 * len(alarms) / (CURVES * (STEPS - 16))
            yield [name, window, f"{rate:.2f}", f"{1e4 * early:.1f}", *found]


class Median(Series):
    """The candidate: sigma median absolute deviations, scaled to a normal distribution's, above the window's median."""

    def spike(self, value: float) -> Spike | None:
        found = None
        if len(self.values) >= LEAST_WINDOW:
            middle = median(self.values)
            deviation = 1.4826 * median(abs(x - middle) for x in self.values)
            if deviation and value >= middle + self.sigma * deviation:
                found, value = Spike(value), middle + self.sigma * deviation
        self.values.append(value)
        return found


def itself(value: float) -> float:
    return value


# {name: (signal, function of its values, series that judges, sigmas)}
DETECTORS: dict[str, tuple[str, Callable[[float], float], type[Series], tuple[int, ...]]] = {
    "loss": ("loss", itself, Series, (7,)),
    "norm": ("grad_norm", itself, Series, (7, 10, 14, 20)),
    "norm, logarithm": ("grad_norm", math.log, Series, (5, 6, 7)),
    "norm, median": ("grad_norm", itself, Median, (7, 14, 30)),
    "update norm": ("update_norm", itself, Series, (5, 7, 10)),  # logged in some stores only
}
RATES = {"0.001": (0, 0.002), "0.01": (0.002, 0.02), "0.03 .. 0.045": (0.02, 0.05), "0.07 .. 0.2": (0.05, 1)}
TIMES, AHEAD = (3, 5, 10, 30), 20


def runs() -> Iterator[Result]:
    """The runs of all stores, in the order of the files."""
    for packed in sorted((OUT / "lab").glob("*.sqlite.xz")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / packed.stem
            path.write_bytes(lzma.decompress(packed.read_bytes()))
            store = Store(path)
            for _, found in Results(store).cells():
                yield from found
            store.close()


def judge_run(run: Result, calm: int, plant: list[int], detector: str, sigma: float) -> tuple[int, bool, np.ndarray]:
    """(Alarms in a run's first `calm` steps; whether one comes later, up to the onset; how many spikes are found).

    plant: steps, from 0, at which a spike is tried without changing the run. found: their number for each of TIMES.
    """
    signal, number, kind_of_series, _ = DETECTORS[detector]
    curve = run.series[signal][1].tolist()
    series, alarms, found = kind_of_series(sigma, 128), [], np.zeros(len(TIMES), dtype=int)
    for i, value in enumerate(curve[: int(min(run.onset, len(curve)))]):  # the onset counts from 1
        if i in plant:
            level = median(curve[i - 16 : i])
            found += [bool(copy.deepcopy(series).spike(number(times * level))) for times in TIMES]
        if series.spike(number(value)):
            alarms.append(i)
    return sum(i < calm for i in alarms), any(i >= calm for i in alarms), found


def real() -> Iterator[list]:
    """The rows of spikes_real.csv, header first."""
    rng = np.random.default_rng(2)
    every = []
    for run in runs():
        if run.onset > 64 + 2 * AHEAD:
            calm = int(min(run.onset - AHEAD - 1, len(run.losses[0])))
            every.append((run, calm, rng.choice(np.arange(64, calm), 2, replace=False).tolist()))
    head = ["learning rate", "detector", "sigma", "runs", "steps", "false per 10,000"]
    head += [f"found of x {times}, %" for times in TIMES]
    yield [*head, "divergences", "told", "false before, per 10,000"]
    for rates, (low, high) in RATES.items():
        for name, (signal, _, _, sigmas) in DETECTORS.items():
            of = [e for e in every if low < e[0].row.learning_rate <= high and signal in e[0].series]
            if not of:
                continue
            steps = np.array([calm - LEAST_WINDOW for _, calm, _ in of])
            diverge = np.array([run.divergence is not None for run, _, _ in of])
            for sigma in sigmas:
                false, told, found = map(np.array, zip(*(judge_run(*run, name, sigma) for run in of), strict=True))
                rate = 1e4 * false.sum() / steps.sum()
                row = [rates, name, sigma, len(of), steps.sum(), f"{rate:.1f}"]
                # a loss never reaches such multiples of its level
                row += [f"{share:.0f}" if signal == "grad_norm" else "" for share in 50 * found.mean(0)]
                row += [diverge.sum(), told.sum()]
                row += [f"{1e4 * false[diverge].sum() / steps[diverge].sum():.1f}" if diverge.any() else ""]
                yield row


def write(rows: Iterator[list], path: Path) -> None:
    """Print the rows as they come; write the file when all are there."""
    kept = []
    for row in rows:
        kept.append(row)
        print(*row, sep=" | ", flush=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=OUT, help="for both tables (default: results)")
    folder = parser.parse_args().folder
    write(made(), folder / "spikes.csv")
    write(real(), folder / "spikes_real.csv")


if __name__ == "__main__":
    main()
