"""How often --fp8-on-spike takes noise for a spike, and which spikes it finds: the detector on curves made for it.

    python benchmarks/spikes.py        CPU, one core, four minutes

Curves of 1,000 steps. False alarms: values taken for a spike at sigma 7 where none was planted, of 10,000 that were
judged; "early": of the first 128 steps. Found: of spikes planted one a curve, at a random step from 64 on, with the
height given in standard deviations of the curve's own noise at that step. Log-normal noise is symmetric in the
logarithm, as that of gradient norms is; Student's t with 3 degrees of freedom has tails no training run should have.
"""

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_fp8.monitor.spikes import Series

STEPS, CURVES, EARLY, WINDOWS, HEIGHTS = 1000, 40, 128, (32, 128, 512), (8, 12, 20)
OUT = Path(__file__).parent / "results/spikes.csv"
t = np.arange(STEPS)


def autoregressive(noise: np.ndarray, keep: float) -> np.ndarray:
    """AR(1) of unit variance."""
    out = noise.copy()
    for i in range(1, len(out)):
        out[i] = keep * out[i - 1] + math.sqrt(1 - keep * keep) * noise[i]
    return out


# name: (the curve without noise, the curve of a noise of unit scale)
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


def main() -> None:
    rng = np.random.default_rng(1)
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["curve", "window", "false per 10,000", "early", *(f"found of {h} sigma, %" for h in HEIGHTS)])
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
                row = [name, window, f"{rate:.2f}", f"{1e4 * early:.1f}", *found]
                table.writerow(row)
                print(*row, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
