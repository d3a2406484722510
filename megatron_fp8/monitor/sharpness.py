"""Sharpness of the loss in a run: measured steps go to the log and the writers, evaluations to a file.

    sharpness_mean, ..._median, ..._q95, ..._q99, ..._max      phi in %, over all positions of all micro-batches
    centred_sharpness_mean, ...                                phi of the mean-centred logits in %
    log_z_mean, ...                                            log Z in nats

are the scalars' names. logit_sharpness.py explains them, and why none should be read without the others.  The last rank
has Megatron's writers and prints its losses. It belongs to the last pipeline stage, and does both here.

The weights are those before the step's update.  Until the update is made the host does not wait. Then there is one sum
over data and context parallelism (2 MiB of counters) and one copy to the host.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.training.utils import is_last_rank

from ..flags.sharpness import SharpnessPlan
from .sharpness_probe import SharpnessProbe
from .writers import current_iteration, say, write_scalars

NAMES = {"sharpness": "sharpness", "centred": "centred_sharpness", "log_z": "log_z"}
COLUMNS = ("mean", "median", "q95", "q99", "max")


def watch_step(plan: SharpnessPlan, chunks: Sequence[torch.nn.Module], watch, step: Callable[[], Any]) -> Any:
    """Run a training step and return its result. Measure and log it if it is one of the plan's steps.

    watch: the spike watch (monitor/watch.py), or None.
    """
    iteration = current_iteration()
    if iteration % plan.interval:
        return step()
    with SharpnessProbe(chunks) as probe:
        result = step()
    probe.reduce()
    mean = None
    if is_last_rank():
        summary = probe.tokens.summary() if probe.tokens else None
        log(summary, iteration)
        seen = summary["sharpness"] if summary else {"count": 0, "not_finite": 0}
        mean = seen["mean"] if seen["count"] + seen["not_finite"] else None  # without positions the mean would be NaN
    if watch is not None:
        watch.observe_on_last("sharpness", iteration, mean)
    return result


def watch_evaluation(plan: SharpnessPlan, name: str, chunks: Sequence[torch.nn.Module], run: Callable[[], Any]) -> Any:
    """Run an evaluation and return its result. Add the measurement to the plan's file, under `name`.

    The file is JSON: {name: {"tokens": Statistics.summary(), "last": the same of last tokens or null}}.
    """
    with SharpnessProbe(chunks, plan.iterations) as probe:
        result = run()
    probe.reduce()
    if is_last_rank():
        assert plan.file is not None  # the caller has checked it
        found = {key: of and of.summary() for key, of in (("tokens", probe.tokens), ("last", probe.last))}
        path = Path(plan.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, name: found}, indent=1))
    return result


def log(summary: dict[str, dict[str, float]] | None, iteration: int) -> None:
    """Log one line of a Statistics.summary(), and write the scalars."""
    if summary is None or not summary["sharpness"]["count"] + summary["sharpness"]["not_finite"]:
        say(iteration, "no sharpness: the model computed no loss of next tokens")
        return
    mean = {name: row["mean"] for name, row in summary.items()}
    say(
        iteration,
        f"sharpness {mean['sharpness']:.6g} %; centred {mean['centred']:.6g} %; log Z {mean['log_z']:.6g}; "
        f"not finite {summary['sharpness']['not_finite']:.0f}",
    )
    scalars = {f"{name}_{column}": summary[key][column] for key, name in NAMES.items() for column in COLUMNS}
    write_scalars(scalars, iteration, "fp8-sharpness")
