"""The names of the statistics, and who writes them: Megatron's TensorBoard and W&B writers, metrics.py, rank 0's log.

    {layer}_{tensor}_{statistic}        decoder.layers.3.mlp.linear_fc1_activation_underflows%

layer is the module's path in the whole model, whatever the pipeline: layers are numbered from 0 over all stages; or a
transformer layer's, decoder.layers.3, for all of its linears together.  Form, tensors and statistics are those of
Transformer Engine's debug features: LogFp8TensorStats has underflows%, overflows%, scale_inv_min and scale_inv_max,
LogTensorStats has cur_amax.  Ours alone are wgrad_mu, wgrad_reduced_saturations% and wgrad_reduced_snr_db.
collect.py says what each means.
"""

import math
from dataclasses import dataclass

import torch
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from ..metrics import record

CASTS = ("activation", "gradient", "weight", "wgrad")


@dataclass
class Tally:
    """What was counted of a weight, or of several together.

    Attributes:
        casts: of each tensor of CASTS: elements, overflows, underflows.
        extremes: of each tensor of CASTS: cur_amax, the largest scale_inv, minus the smallest; -inf if there was none.
        reduced: elements of the sum that were looked at, saturations; signal, noise.
        mu: of `--fp8-grad-reduce shared`, else None.
    """

    casts: list[list[float]]
    extremes: list[list[float]]
    reduced: list[float]
    mu: float | None = None

    def statistics(self) -> dict[str, float]:
        """{tensor_statistic: value} of what there is."""
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
    """10 log10(signal / noise), infinite without noise; minus infinity where not both are finite."""
    if not math.isfinite(signal + noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf


def together(tallies: list[Tally]) -> Tally:
    """The tally of all."""

    def stacked(field: str) -> torch.Tensor:
        return torch.tensor([getattr(tally, field) for tally in tallies], dtype=torch.float64)

    casts, extremes, reduced = stacked("casts").sum(0), stacked("extremes").amax(0), stacked("reduced").sum(0)
    return Tally(casts.tolist(), extremes.tolist(), reduced.tolist())


def layer_name(weight: str) -> str:
    """The path of the transformer layer that a weight is in, of `linear_name`'s result."""
    block, _, rest = weight.partition(".layers.")
    return f"{block}.layers.{rest.partition('.')[0]}"


def current_iteration() -> int:
    """The iteration that has begun, as Megatron's log will number it."""
    return get_args().curr_iteration + 1


def say(iteration: int, text: str) -> None:
    """A line of the log, in one write: torchrun's workers do not buffer, and lines of two ranks would run together."""
    print(f"[fp8] iteration {iteration}: {text}\n", end="", flush=True)


def write_scalars(scalars: dict[str, float], iteration: int) -> None:
    """Give values by name to Megatron's TensorBoard and W&B writers and to the run's file, on the last rank.

    It is the one that has them; others may call.
    """
    record(scalars, iteration)
    if writer := get_tensorboard_writer():
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(scalars, iteration)


def write(tallies: dict[str, Tally], iteration: int) -> None:
    """Write the statistics of every weight and layer, on the rank that has a writer; a line for the log on rank 0."""
    weights = {f"{name}_{s}": v for name, tally in tallies.items() for s, v in tally.statistics().items()}
    members: dict[str, list[Tally]] = {}
    for name, tally in tallies.items():
        members.setdefault(layer_name(name), []).append(tally)
    layers = {f"{name}_{s}": v for name, all_ in members.items() for s, v in together(all_).statistics().items()}
    write_scalars({**weights, **layers}, iteration)
    if torch.distributed.get_rank() == 0 and weights:
        say(iteration, summary(weights))


def summary(statistics: dict[str, float]) -> str:
    """The worst of each kind, with the tensor's name."""
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
