"""Name the statistics, and write them to Megatron's TensorBoard and W&B writers, metrics.py and rank 0's log.

    metrics.py                                            TensorBoard and W&B
    {place}_{tensor}_{statistic}                          fp8-{tensor}_{statistic}/{place}
    decoder.layers.3.mlp.linear_fc1_weight_underflows%    fp8-weight_underflows%/decoder.layers.3.mlp.linear_fc1
    model_{tensor}_{statistic}                            fp8/{tensor}_{statistic}
    update-norm, fp8_spikes, ...                          fp8/update-norm, fp8/spikes, ...

A place is a module's path in the whole model, with layers numbered from 0 over all pipeline stages; or a transformer
layer's path, decoder.layers.3, for all its linears together. "model" is all linears together, and the worst linear's
value stands beside it (_WORST). Both viewers group tags by the part before the first slash and sort the groups by name.
So "fp8", a dozen curves of the whole model, comes first, followed by a collapsed group for each statistic.

Form, tensors and statistics are those of Transformer Engine's debug features: LogFp8TensorStats has underflows%,
overflows%, scale_inv_min and scale_inv_max; LogTensorStats has cur_amax.  Only wgrad_mu, wgrad_reduced_saturations% and
wgrad_reduced_snr_db are our own. collect.py explains each.
"""

import math
from dataclasses import dataclass

import torch
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from ..metrics import record

CASTS = ("activation", "gradient", "weight", "wgrad")
MODEL, GROUP = "model", "fp8"  # the place of all linears together, and the viewers' group for the whole model
# {end of a statistic's name: (word for the worst linear's value, function that picks it)}.
_WORST = {"overflows%": ("most", max), "underflows%": ("most", max), "saturations%": ("most", max),
          "snr_db": ("least", min)}  # fmt: skip


@dataclass
class Tally:
    """Counts of one weight, or of several together.

    Attributes:
        casts: for each tensor of CASTS: elements, overflows, underflows.
        extremes: for each tensor of CASTS: cur_amax, the largest scale_inv, minus the smallest; -inf if there was none.
        reduced: of the reduced gradient: elements examined, saturations; signal, noise.
        mu: of `--fp8-grad-reduce shared`, else None.
    """

    casts: list[list[float]]
    extremes: list[list[float]]
    reduced: list[float]
    mu: float | None = None

    def statistics(self) -> dict[str, float]:
        """{tensor_statistic: value} of the statistics that were counted."""
        found = {}
        for tensor, counts, (amax, largest, smallest) in zip(CASTS, self.casts, self.extremes, strict=True):
            elements, overflows, underflows = counts
            if elements:
                found[f"{tensor}_overflows%"] = 100 * overflows / elements
                found[f"{tensor}_underflows%"] = 100 * underflows / elements
                found[f"{tensor}_cur_amax"] = amax
            if largest > -math.inf and smallest > -math.inf:
                found[f"{tensor}_scale_inv_min"], found[f"{tensor}_scale_inv_max"] = -smallest, largest
        elements, saturations, signal, noise = self.reduced
        if elements:
            found["wgrad_reduced_saturations%"] = 100 * saturations / elements
        if signal:
            found["wgrad_reduced_snr_db"] = decibels(signal, noise)
        if self.mu is not None:
            found["wgrad_mu"] = self.mu
        return found


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinity without noise; minus infinity if not both are finite."""
    if not math.isfinite(signal + noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf


def together(tallies: list[Tally]) -> Tally:
    """The tally of several weights together."""

    def stacked(field: str) -> torch.Tensor:
        return torch.tensor([getattr(tally, field) for tally in tallies], dtype=torch.float64)

    casts, extremes, reduced = stacked("casts").sum(0), stacked("extremes").amax(0), stacked("reduced").sum(0)
    return Tally(casts.tolist(), extremes.tolist(), reduced.tolist())


def layer_name(weight: str) -> str:
    """The path of the transformer layer that contains a weight. weight: a result of `linear_name`."""
    block, _, rest = weight.partition(".layers.")
    return f"{block}.layers.{rest.partition('.')[0]}"


def current_iteration() -> int:
    """The number of the current iteration in Megatron's log."""
    return get_args().curr_iteration + 1


def say(iteration: int, text: str) -> None:
    """Log a line in one write: torchrun's workers do not buffer, so the lines of two ranks could mix."""
    print(f"[fp8] iteration {iteration}: {text}\n", end="", flush=True)


def write_scalars(scalars: dict[str, float], iteration: int, group: str = GROUP) -> None:
    """Write {name: value} to the run's file and to Megatron's TensorBoard and W&B writers, on the last rank.

    Only the last rank has them; other ranks may call this too. group: the viewers' group.
    """
    record(scalars, iteration)
    _show({f"{group}/{name.removeprefix('fp8_')}": value for name, value in scalars.items()}, iteration)


def _show(tagged: dict[str, float], iteration: int) -> None:
    if writer := get_tensorboard_writer():
        for tag, value in tagged.items():
            writer.add_scalar(tag, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(tagged, iteration)


def write(tallies: dict[str, Tally], iteration: int) -> None:
    """Write the statistics of every weight, every layer and the model, on the rank that has a writer, and log a line on
    rank 0."""
    members: dict[str, list[Tally]] = {}
    for name, tally in tallies.items():
        members.setdefault(layer_name(name), []).append(tally)
    weights = {name: tally.statistics() for name, tally in tallies.items()}
    layers = {name: together(all_).statistics() for name, all_ in members.items()}
    found = {MODEL: _of_model(tallies, weights), **weights, **layers}
    record({f"{place}_{s}": value for place, of in found.items() for s, value in of.items()}, iteration)
    _show({_tag(place, s): value for place, of in found.items() for s, value in of.items()}, iteration)
    if torch.distributed.get_rank() == 0 and any(weights.values()):
        say(iteration, summary({f"{name}_{s}": v for name, of in weights.items() for s, v in of.items()}))


def _tag(place: str, statistic: str) -> str:
    return f"{GROUP}/{statistic}" if place == MODEL else f"fp8-{statistic}/{place}"


def _of_model(tallies: dict[str, Tally], weights: dict[str, dict[str, float]]) -> dict[str, float]:
    """Statistics of all linears together, and the worst linear's. All values are on the host already."""
    found = together(list(tallies.values())).statistics() if tallies else {}
    for name in list(found):
        for end, (word, worse) in _WORST.items():
            if name.endswith(end):
                found[f"{name}_{word}"] = worse(of[name] for of in weights.values() if name in of)
    return found


def summary(statistics: dict[str, float]) -> str:
    """The worst value of each kind, with the tensor's name."""
    parts = []
    for suffix, label, unit, worst in (
        ("_overflows%", "most overflows", " %", max),
        ("_underflows%", "most underflows", " %", max),
        ("_wgrad_reduced_saturations%", "most saturations", " %", max),
        ("_wgrad_reduced_snr_db", "lowest SNR", " dB", min),
    ):
        found = {name.removesuffix(suffix): v for name, v in statistics.items() if name.endswith(suffix)}
        if found:
            name = worst(found, key=found.__getitem__)
            parts.append(f"{label} {found[name]:.4g}{unit}" + (f" {name}" if found[name] else ""))
    return "; ".join(parts)
