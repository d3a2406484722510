"""Check this machine before a run: versions, GPUs, links, limits, Slurm, the FP8 GEMMs and a linear's arithmetic.

    megatron-fp8 doctor                      on this machine
    megatron-fp8 doctor --json
    srun -N 16 --ntasks-per-node 1 --gpus-per-node 8 --exclusive -l megatron-fp8 doctor --bad

The last command prints the bad lines of every node; without --gpus-per-node Slurm may show a job no GPU.

The verdict of a line is good, degraded (a run works, but more slowly or less safely) or blocking.  Exit code 0: nothing
blocks; 1: something does.  It takes seconds, and ten more for NCCL with two GPUs or more.  It does not measure
bandwidth or speed.
"""

import json
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import asdict

from . import machine, scheduler, software
from .finding import BLOCKING, DEGRADED, GOOD, Finding, degraded

_LOOKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    software.versions, software.transformer_engine, software.optional_packages, machine.gpus, machine.power,
    machine.links, machine.infiniband, machine.nccl, machine.shared_memory, machine.limits, machine.numa,
    machine.triton_cache, scheduler.slurm, software.gemms, software.linear,
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON: host, verdict, and each line's parts")
    parser.add_argument("--bad", action="store_true", help="print only lines that are not good")


def run(args: Namespace) -> int:
    """Run all checks and print the findings. Returns the exit code."""
    findings = []
    for look in _LOOKS:
        for finding in _seen(look):
            findings.append(finding)
            if not args.json and not (args.bad and finding.verdict == GOOD):
                print(_line(finding), flush=True)
    verdicts = [finding.verdict for finding in findings]
    worst = next((verdict for verdict in (BLOCKING, DEGRADED) if verdict in verdicts), GOOD)
    if args.json:
        lines = [finding for finding in findings if not (args.bad and finding.verdict == GOOD)]
        said = {"host": socket.gethostname(), "verdict": worst, "lines": list(map(asdict, lines))}
        print(json.dumps(said, indent=1))
    else:
        counts = [f"{verdicts.count(kind)} {kind}" for kind in (GOOD, DEGRADED, BLOCKING) if kind in verdicts]
        print(f"{worst}: {', '.join(counts)}")
    return 1 if worst == BLOCKING else 0


def _seen(look: Callable[[], Iterable[Finding]]) -> Iterable[Finding]:
    """The findings of a check. If the check itself fails, that is a finding, and the others go on."""
    try:
        yield from look()
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "megatron"):  # `versions` reports that these are missing
            yield degraded(look.__name__, f"needs the package {error.name}, which is not installed", "install it")
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        yield degraded(look.__name__, f"could not be checked: {said}", "please report it")


def _line(finding: Finding) -> str:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.verdict:8}  {finding.what:18}  {finding.found}{remedy}"
