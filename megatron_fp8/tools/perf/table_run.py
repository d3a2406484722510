"""`megatron-fp8 table 5 --run`: measure the paper's models on the GPUs of this machine, system by system.

Each system trains in its own process, one after the other (benchmarks/train_step.py of a checkout): first at a
micro-batch common to all, then at the largest that fits. The estimate proposes that size; if a run is out of memory,
the next smaller size is tried. --cap-gb repeats this with torch's allocator limited to that many GB on each GPU. A row
of --results has the figures, their spread, versions, power limit and the command; --logs keeps the raw logs.
"""

import csv
import datetime
import importlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...flags.flag import positive, whole
from ...shipped import shipped
from . import hardware, validation
from .estimate import divisors
from .job import MODELS
from .output import MIB
from .step import Estimate, estimate
from .systems import SYSTEMS
from .workload import Workload

ROOT = Path(__file__).resolve().parents[3]
RESULTS = shipped("benchmarks/results/table5.csv")
_PAPERS = "--position-embedding-type rope --untie-embeddings-and-output-weights"
SHAPES = {"7b": ("7b-whole", _PAPERS), "13b": ("13b-whole", _PAPERS), "tiny": ("tiny", "")}  # train_step.py's names
ESTIMATED = {"bf16": "bf16", "bf16-local": "bf16", "te-delayed": "te", "O1": "O1", "O2": "O2", "O3": "O3"}
UNREPAIRED = {"bf16"}  # systems of benchmarks/train_step.py without the QKV repair; a wheel does not have that file
_ITERATIONS = whole(17, "five warm up, and twice five are measured")
_HOPELESS = 1.15  # a run is not tried if its estimate is above this factor times the memory
COLUMNS = """System,Model,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,EP,Tokens/sec/GPU,Model TFLOP/sec/GPU
Cap GB,Outcome,ms,ms least,ms most,Peak GB,Held GB,GPU,Power W,Driver,torch,megatron-core,Transformer Engine
Commit,Date,Log,Command""".replace("\n", ",").split(",")
_SHOWN = [*COLUMNS[:16], "ms", "ms least", "ms most", "Peak GB", "GPU", "Power W", "Commit", "Date"]
CALL = ("GPU", "Power W", "Commit", "Date")  # rows that are equal in these come from one call, on one host
# Often equal in all rows; the text prints them once.
SETTING = (*CALL, "Model", "#-GPUs", "Precision", "GBS", "Sequence Length", "TP", "PP", "CP", "VP", "EP",
           "Cap GB")  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """The flags that go with `--run`."""
    parser.add_argument("--run", action="store_true", help="first measure on this machine's GPUs")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["7b"])
    parser.add_argument("--systems", nargs="+", choices=ESTIMATED, default=["bf16", "te-delayed", "O1", "O2", "O3"])
    parser.add_argument("--gpus", type=int, help="data-parallel GPUs (all of this machine)")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="common to all systems (2)")
    parser.add_argument("--global-batch-size", type=int, help="samples a step (16 a GPU)")
    parser.add_argument("--cap-gb", type=positive().read,
                        help="repeat with so many GB (10^9 bytes) for torch on each GPU")  # fmt: skip
    parser.add_argument("--only-cap", action="store_true", help="skip the runs without the cap")
    parser.add_argument("--iterations", type=_ITERATIONS.read, default=17, help="iterations of a run (17)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a run (300)")
    parser.add_argument("--te-path", default="", help="folder with Transformer Engine")
    parser.add_argument("--results", help="CSV to append to and to print (benchmarks/results/table5.csv)")
    parser.add_argument("--logs", default="runs/table5", metavar="DIR", help="for the raw logs (runs/table5)")


def check(args: Namespace) -> None:
    if args.only_cap and args.cap_gb is None:
        raise UserError("--only-cap: no cap is given; add --cap-gb GB")
    if not args.run:
        parser = ArgumentParser()
        add_arguments(parser)
        for name, default in vars(parser.parse_args([])).items():
            value = getattr(args, name)
            if name != "results" and value != default:  # --results is also printed without --run
                said = "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
                raise UserError(f"--{name.replace('_', '-')}{said}: works only with --run; add it, or remove this one")


def run(args: Namespace, runner: Callable[[str, Namespace], dict] | None = None) -> int:
    """Measure and append to the results. Returns 1 if a run failed other than by lack of memory."""
    bench = _train_step()
    gpus = args.gpus or max(1, _gpu_count())
    batch = args.global_batch_size or 16 * gpus
    if batch % (args.micro_batch_size * gpus):
        raise UserError(
            f"--global-batch-size {batch}: no multiple of --micro-batch-size {args.micro_batch_size} times {gpus} GPUs"
        )
    if runner is None and not _gpu_count() and args.models != ["tiny"]:
        raise UserError(f"--run --models {' '.join(args.models)}: no GPU on this machine; use one that has")
    runner = runner or bench.run
    file = Path(args.results or RESULTS)
    bench.check_columns(str(file), COLUMNS)
    same, failed = _machine(bench, args.te_path), False
    for model in args.models:
        caps = [None] * (not args.only_cap) + [args.cap_gb] * (args.cap_gb is not None)
        for cap in caps:
            for system in args.systems:
                for row in _of_system(args, runner, model, system, gpus, batch, cap):
                    failed |= row["Outcome"].startswith("failed")
                    bench.append(str(file), COLUMNS, [same | row])
                    print(f"{model} {system} MBS {row['MBS']}{f', {cap:g} GB' if cap else ''}: {row['Outcome']} "
                          f"{row['ms']} ms, peak {row['Peak GB']} GB", file=sys.stderr, flush=True)  # fmt: skip
    return int(failed)


def _of_system(
    args: Namespace, runner, model: str, system: str, gpus: int, batch: int, cap: float | None
) -> Iterator[dict]:
    """The rows of a system: at the common micro-batch, and at the largest that fits."""
    w = _workload(model, system, gpus, args.micro_batch_size, batch)
    sizes = [size for size in divisors(batch // gpus) if size > args.micro_batch_size]
    promising = [size for size in sizes if _room(replace(w, micro_batch=size), cap) >= 0]
    first = _measure(args, runner, model, w, cap, system)
    yield first
    if first["Outcome"] == "ok":
        for size in promising[::-1]:
            row = _measure(args, runner, model, replace(w, micro_batch=size), cap, system)
            yield row
            if row["Outcome"] != "out of memory":
                return
    elif first["Outcome"] != "failed":  # a smaller micro-batch may fit
        for size in divisors(args.micro_batch_size)[-2::-1]:
            row = _measure(args, runner, model, replace(w, micro_batch=size), cap, system)
            yield row
            if row["Outcome"] == "ok":
                return


def _measure(args: Namespace, runner, model: str, w: Workload, cap: float | None, system: str) -> dict[str, Any]:
    """Run once and return the row; it has no figures unless its Outcome is ok."""
    shape, extra = SHAPES[model]
    bench = _train_step()
    logs = Path(args.logs) / f"{model}-{w.gpus}gpu-mbs{w.micro_batch}{f'-{cap:g}gb' if cap else ''}"
    row: dict[str, Any] = {
        "System": system, "Model": model, "#-GPUs": w.gpus, "Precision": "FP8" if w.system.fp8 else "BF16",
        "GBS": w.global_batch, "MBS": w.micro_batch, "Sequence Length": w.sequence, "TP": 1, "PP": 1, "CP": 1, "VP": 1,
        "EP": 1, "Cap GB": f"{cap:g}" if cap else "", "Log": str(logs / f"{system}.log"), "ms": "", "Peak GB": "",
        "Command": _command(args, shape, extra, system, w, cap),
    }  # fmt: skip
    if (needed := _needs(w)) > _HOPELESS * _limit(cap):
        return row | {"Outcome": f"not tried: estimate {needed:.0f} GB"}
    options = bench.arguments("", [system], lambda parser: None, [
        "--systems", system, "--shape", shape, "--nproc", str(w.gpus), "--gbs", str(w.global_batch),
        "--mbs", f"{system}={w.micro_batch}", "--iterations", str(args.iterations), "--timeout", str(args.timeout),
        "--te-path", args.te_path, "--logs", str(logs), *extra.split(),
    ])  # fmt: skip
    before = os.environ.pop("CAP_GB", None)
    try:
        if cap:
            os.environ["CAP_GB"] = str(cap)
        found = runner(system, options)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        log = logs / f"{system}.log"
        text = f"{error}\n{log.read_text(errors='replace') if log.exists() else ''}"
        memory = re.search(r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED", text)
        late = isinstance(error, subprocess.TimeoutExpired)
        return row | {"Outcome": "out of memory" if memory else f"failed: {'time' if late else 'see its log'}"}
    finally:
        os.environ.pop("CAP_GB", None)
        if before is not None:
            os.environ["CAP_GB"] = before
    return row | {
        "Outcome": "ok", "ms": round(found["ms"], 2), "ms least": round(found["ms_min"], 2),
        "ms most": round(found["ms_max"], 2), "Model TFLOP/sec/GPU": round(found["tflops"], 1),
        "Tokens/sec/GPU": round(w.global_batch * w.sequence / w.gpus / found["ms"] * 1e3),
        # train_step.py gives thousands of Megatron's MiB.
        "Peak GB": round(found["gb_peak"] * 1e3 * MIB, 2), "Held GB": round(found["gb"] * 1e3 * MIB, 2),
    }  # fmt: skip


def results(args: Namespace) -> list[dict[str, str]]:
    """The measured rows for printing, each with the estimate for its GPU."""
    file = Path(args.results or RESULTS)
    if not file.is_file():
        if args.results and not args.run:
            raise UserError(f"--results {file}: no such file; name one, or add --run")
        return []
    with file.open(newline="", errors="replace") as read:
        rows = list(found := csv.DictReader(read))
    if list(found.fieldnames or COLUMNS) != COLUMNS:
        raise UserError(f"--results {file}: was written with other columns; name another file")
    shown = []
    for row in rows:
        cells = {name: row[name] for name in _SHOWN}
        on = next((name for name in hardware.known() if name.split("-")[0].upper() in row["GPU"]), None)
        if row["Outcome"] == "ok" and on:
            w = _workload(row["Model"], row["System"], int(row["#-GPUs"]), int(row["MBS"]), int(row["GBS"]))
            e = estimate(w, hardware.load(on))
            cells |= {"ms: model": f"{e.ms:.0f}", "ms: +-": f"{e.ms / float(row['ms']) - 1:+.1%}"}
            cells |= {"GB: model": f"{e.peak:.1f}", "GB: +-": f"{e.peak / float(row['Peak GB']) - 1:+.1%}"}
        shown.append(cells)
    columns = list(dict.fromkeys(name for cells in shown for name in cells))
    return [{name: cells.get(name, "") for name in columns} for cells in shown]


def _workload(model: str, system: str, gpus: int, micro_batch: int, batch: int) -> Workload:
    if model == "tiny":
        job = replace(validation.MODELS["7b"], num_layers=2, hidden_size=64, num_attention_heads=4)
    else:
        job = replace(MODELS[model], tensor_model_parallel_size=1)
    job = replace(job, data_parallel_size=gpus)
    return Workload(
        job,
        SYSTEMS[ESTIMATED[system]],
        sequence=64 if model == "tiny" else 2048,
        micro_batch=micro_batch,
        global_batch=batch,
        repaired=system not in UNREPAIRED,
    )


def _needs(w: Workload) -> float:
    return _estimate(w).peak


def _estimate(w: Workload) -> Estimate:
    return estimate(w, hardware.load(validation.HARDWARE))


def _limit(cap: float | None) -> float:
    """GB that torch may use on a GPU of this machine, or under the cap; without a GPU, those of an H200."""
    import torch

    on = hardware.load(validation.HARDWARE)
    there = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else on.memory_gb
    return min(there - on.beside_allocator_gb / 3, cap or there)


def _room(w: Workload, cap: float | None) -> float:
    return _limit(cap) - _needs(w)


def _command(args: Namespace, shape: str, extra: str, system: str, w: Workload, cap: float | None) -> str:
    words = ["python", "benchmarks/train_step.py", "--shape", shape, "--systems", system, "--nproc", str(w.gpus),
             "--gbs", str(w.global_batch), "--mbs", f"{system}={w.micro_batch}", "--iterations", str(args.iterations),
             *(["--te-path", "DIR"] if args.te_path else []), *extra.split()]  # fmt: skip
    return (f"CAP_GB={cap:g} " if cap else "") + shlex.join(words)


def _machine(bench, te_path: str) -> dict[str, str]:
    """The cells that all rows of a call share."""
    stamp = bench.stamp()
    query = ["nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except OSError:
        said = []
    power, _, driver = (said[0] if said else "").partition(", ")
    return {
        "GPU": stamp["gpu"], "Power W": power, "Driver": driver, "torch": stamp["torch"],
        "megatron-core": _version("megatron-core"), "Transformer Engine": _version("transformer-engine", te_path),
        "Commit": stamp["commit"], "Date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _version(package: str, folder: str = "") -> str:
    """The version of a package in a folder, else in this environment; "" if it is not found."""
    found = importlib.metadata.distributions(name=package, path=[*[folder] * bool(folder), *sys.path])
    return next((one.version for one in found), "")


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _train_step():
    """The benchmark's module, which starts a run and reads its log."""
    folder = ROOT / "benchmarks"
    if not (folder / "train_step.py").is_file():
        raise UserError("--run: needs a checkout of the repository, with its benchmarks/; run it there")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("train_step")
