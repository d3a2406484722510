"""`megatron-fp8 lab stress`: plants eight troubles, and says which recipes of FP8 are fragile under which.

    megatron-fp8 lab stress --store stress.csv --out page              everything, one seed
    megatron-fp8 lab stress --only S2,S5 --seeds 1-4 --minutes 10 --store stress.csv
    megatron-fp8 lab stress --minutes 0 --store stress.csv --out page  only the page

A stress and seed are measured together and appended to the store, of S8 a case and seed; what is there is not measured
again. Seeds come first, then stresses: if the time runs out, all stresses have about as many seeds. Several processes
with the same command share what is missing. On a GPU the models are small, but real; without one they are toys. To
measure needs no package of the lab's; verdicts need scipy, the page matplotlib too.
"""

import contextlib
import io
import math
import re
import time
import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ... import packages
from ...errors import UserError
from ...version import commit

NAMES = tuple(f"S{number}" for number in range(1, 9))


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab stress`."""
    parser.add_argument("--store", required=True, metavar="FILE", help="CSV file of all numbers; made, or appended to")
    parser.add_argument("--out", metavar="DIR", help="write stress.html, stress.md and figures/ there; made if missing")
    parser.add_argument("--late", metavar="DIR", help="S3 at the MLPs of this Hugging Face folder too, of Llama's form")
    parser.add_argument("--only", metavar="S1,...", help=f"these stresses (all: {', '.join(NAMES)})")
    parser.add_argument("--seeds", default="1", metavar="N-M", help="one seed, several (1,3), or a range (1-4); 1")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so many; 0: only the page")


def run(args: Namespace) -> int:
    """Measure what is missing; write the page. Returns 1 if a stress ended in an error."""
    names, seeds, store = _names(args.only), _seeds(args.seeds), Path(args.store)
    if not args.minutes >= 0:
        raise UserError(f"--minutes {args.minutes:g}: use 0 or more")
    if store.is_dir():
        raise UserError(f"--store {store}: is a folder; name a file")
    for module in ("scipy", "matplotlib"):
        if args.out and not packages.installed(module):
            raise UserError(f"--out {args.out}: {packages.needs(module, 'leave it out')}")
    from .every import suite
    from .late_state import NAME, layers
    from .network import device_name
    from .page import lines, sections
    from .store import Part, read

    points = read(store)
    late = Path(args.late) if args.late is not None else None
    if late is not None:
        layers(late)  # a wrong folder ends the command here
        names.add(NAME)
    chosen = [stress for stress in suite(points, late) if stress.name in names]
    others = sorted({point.device for point in points} - {device_name()})
    if others and args.minutes:
        raise UserError(f"--store {store}: has numbers of {', '.join(others)}; take another on this machine")
    parts = (Part(stress, seed, case) for seed in seeds for stress in chosen for case in stress.cases or ("",))
    missing = [part for part in parts if not part.measured(points)]
    failed = _measure(missing, store, 60 * args.minutes) if missing and args.minutes else 0
    points = read(store)
    every = suite(points)
    if packages.installed("scipy"):
        print("\n".join(lines(every, points)))
    else:
        print(f"{store}: {len(points)} numbers; their verdict {packages.needs('scipy')}; then --minutes 0")
    if args.out and points:
        from ..lab.report.main import write

        folder = Path(args.out)
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        print(f"written: {', '.join(map(str, write(folder, 'stress', 'Stress suite', sections(every, points))))}")
    return int(failed > 0)


def _measure(missing: list, store: Path, seconds: float) -> int:
    """Measure parts, as many as begin in time and no other process has. Returns how many ended in an error."""
    from .network import alone, device_name
    from .store import append, read, taken
    from .suite import Point

    began, failed, version = time.monotonic(), 0, commit() or "commit not known"
    with alone():
        for done, part in enumerate(missing):
            if time.monotonic() - began > seconds:
                print(f"time is up: {len(missing) - done} of {len(missing)} are left; the same command goes on")
                break
            with taken(store, part) as mine:
                if not mine or part.measured(read(store)):
                    continue
                at, said = time.monotonic(), io.StringIO()
                try:
                    with contextlib.redirect_stdout(said):  # a line a model
                        found = list(part.measure())
                except Exception:
                    failed += 1
                    print(f"{part}: ended in an error; the others go on\n{traceback.format_exc()}")
                    continue
                append(store, [Point(part.stress.name, part.seed, one, device_name(), version) for one in found])
                print(f"{part}: {len(found)} numbers in {time.monotonic() - at:.0f} s", flush=True)
    return failed


def _names(only: str | None) -> set[str]:
    """The stresses of --only."""
    if only is None:
        return set(NAMES)
    names = {name.strip().upper() for name in only.split(",")}
    if unknown := sorted(names - set(NAMES)):
        raise UserError(f"--only {only}: no stress {', '.join(unknown)!s}; use {', '.join(NAMES)}")
    return names


def _seeds(text: str) -> list[int]:
    """The seeds of --seeds: "3", "1,2,5", "1-4"."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if ends is None or int(ends[1]) > int(ends[2] or ends[1]):
            raise UserError(f"--seeds {text}: use a seed, several (1,3), or a range (1-4)")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return list(dict.fromkeys(found))
