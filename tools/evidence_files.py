"""The gaps of docs/evidence.md that are in CSVs of benchmarks/results, and the stress suite's verdicts."""

import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from evidence_gaps import LAST, POINTS, Gap, gaps
from make_flags_doc import table

from megatron_fp8.tools.stress.every import suite
from megatron_fp8.tools.stress.store import read as read_points
from megatron_fp8.tools.stress.suite import verdicts, worst

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def read(name: str) -> list[dict[str, str]]:
    """A CSV's rows."""
    csv.field_size_limit(10**8)
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def real_text() -> Iterator[Gap]:
    """The last hundred steps' training loss, and the held-out loss, of the runs of 800 steps; the last row counts."""
    curves = {
        (row["arm"], int(row["seed"])): [float(loss) for loss in row["losses"].split()]
        for row in read("real_text.csv")
        if row["steps"] == "800"
    }
    names = {
        "O0": "BF16, stock's layers",
        "O0, TE": "BF16, TE's layers",
        "TE": "TE's FP8",
        "O3, all": "O3 with FP8 head, activations, gradients",
    }
    for arm, reference in (
        *(("O2", "O0, TE"), ("O3", "O0, TE"), ("O3, all", "O0, TE"), ("TE", "O0, TE")),
        *(("O3", "TE"), ("O3, all", "O0"), ("O0", "O0, TE")),
    ):
        seeds = sorted(seed for name, seed in curves if name == arm and (reference, seed) in curves)
        end = min(len(curves[name, seed]) for name in (arm, reference) for seed in seeds)
        ours, theirs = (
            {seed: statistics.mean(curves[name, seed][end - LAST : end]) for seed in seeds} for name in (arm, reference)
        )
        until = "" if end == 800 else f", to step {end}"
        yield Gap(names.get(arm, arm) + until, names[reference], ours, theirs)


def tuned(stage: str, column: str, file: str = "smollm2.csv") -> list[Gap]:
    """Of each arm of SmolLM2's runs against stock BF16 at the end of a stage; the last row of each run counts."""
    unit = POINTS if column == "accuracy" else "%"
    of: dict[str, dict[int, float]] = {}
    for row in sorted(read(file), key=lambda row: row["arm"]):
        if row["stage"] == stage:
            of.setdefault(row["arm"], {})[int(row["seed"])] = float(row[column])
    return [Gap(arm, "stock BF16", found, of["O0"], unit) for arm, found in of.items() if arm != "O0"]


def evaluated_alike(file: str = "smollm2_judged.csv") -> tuple[str, ...]:
    """Held-out losses of SFT's weights in each arm's own arithmetic, and of the same weights with BF16 GEMMs in all
    arms: how much of a gap is learnt."""
    own, alike = (tuned(stage, "heldout_loss", file) for stage in ("sft", "sft judged"))
    return (
        f"The same SFT once more ([{file}](../benchmarks/results/{file})), each arm evaluated in its own arithmetic:",
        gaps(own),
        "The weights that these runs saved, all evaluated with BF16 GEMMs. What is left of a gap is learnt; what is "
        "gone was the evaluation's own rounding:",
        gaps(alike),
    )


def tensor_sums() -> Iterator[Gap]:
    """Held-out loss with tensor-parallel sums in FP8; the last row of each run counts."""
    of: dict[tuple[str, str], dict[int, float]] = {}
    for row in read("tp_sums_train.csv"):
        of.setdefault((row["tp"], row["arm"]), {})[int(row["seed"])] = float(row["heldout_loss"])
    for (tp, arm), losses in sorted(of.items()):
        reference = "O3, bf16" if arm.startswith("O3,") and arm != "O3, bf16" else "stock BF16"
        if arm != reference and losses.keys() & of.get((tp, reference), {}).keys():
            yield Gap(f"TP {tp}: {arm}", reference, losses, of[tp, reference])


def storage() -> Iterator[Gap]:
    """Mean training loss of the last 20 steps that all have, by the storage of 128 micro-batches' gradients."""
    curves = {
        (row["system"], int(row["seed"])): [float(loss) for loss in row["losses"].split()]
        for row in read("grad_storage.csv")
    }
    end = min(map(len, curves.values()))
    of: dict[str, dict[int, float]] = {}
    for (system, seed), losses in curves.items():
        of.setdefault(system, {})[seed] = statistics.mean(losses[end - 20 : end])
    for system in ("O1 fp8", "O1 bf16", "O0"):
        yield Gap({"O0": "stock BF16"}.get(system, system), "O1 fp32", of[system], of["O1 fp32"])


def table6() -> Iterator[Gap]:
    """Held-out loss of FP8-LM's Table 6 in miniature."""
    held: dict[tuple[str, float], dict[int, float]] = {}
    for row in read("table6.csv"):
        if row["heldout"]:
            held.setdefault((row["arm"], float(row["lr"])), {})[int(row["seed"])] = float(row["heldout"])
    for (arm, rate), losses in held.items():
        if arm != "0":
            name = arm if arm.startswith("O") else f"#{arm}"
            yield Gap(f"{name}, rate {rate:g}", "#0, FP32", losses, held["0", rate])


def stress() -> Iterator[str]:
    """The stress suite's verdicts, a table a store of a machine."""
    for store in sorted((RESULTS / "lab").glob("stress*.csv")):
        points, rows = read_points(store), []
        for one in suite(points):
            found = verdicts(one, points)
            for arm in dict.fromkeys(verdict.arm for verdict in found):
                if case := worst(verdict for verdict in found if verdict.arm == arm):
                    most = f"{one.limits[case.case]:g} {one.unit}"
                    low, high = case.interval
                    between = "-" if math.isnan(low) else f"{low:.3g} to {high:.3g}"
                    numbers = str(case.n), f"{case.mean:.3g}", between, most, case.word
                    rows.append([f"{one.name} {one.title}", arm, case.case, *numbers])
        devices = ", ".join(sorted({point.device for point in points}))
        yield f"[lab/{store.name}](../benchmarks/results/lab/{store.name}), {devices}:"
        yield table(("stress", "recipe", "its worst case", "seeds", "judged", "interval", "at most", "verdict"), rows)
