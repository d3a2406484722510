"""Trains every case with stock Megatron and at a level, and says of each whether the losses are the same.

    python tests/training_matrix.py [RESULTS]     prints counts, and every case that is not the same, with its reason

RESULTS keeps what each run gave, a line of JSON a run; runs that it has are not made again.  Verdicts:

    same        the first loss is equal bit for bit, its gradient's norm but for the order of its sum, and later losses
                are near.  They too are equal until a BF16 weight falls on the other side of a rounding: a level's Adam
                rounds each operation of the second moment by itself, torch's fuses two
    refused     a level says no, in one line of its own that begins with a flag of the case
    checked     a check of Megatron's own says no in one line, and stock fails too
    neither     stock fails, and so does a level
    fails       stock trains, and a level does not
    alone       a level trains, and stock fails
    differs     the losses are not the same; by how much
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from training_cases import Case, Reason, all_cases, reason

REPOSITORY = Path(__file__).resolve().parents[1]
SIDES = "stock", "level"
NEAR = 1e-4  # of a loss, what the last bits of Adam may make in three updates
NORM = 5e-6  # of a gradient norm, what the order of its sum may make
def run_all(cases: list[Case], results: Path) -> dict[str, dict[Case, dict]]:
    """{side: {case: what train_cases.py says of it}}, both sides at a time."""
    found: dict[str, dict[Case, dict]] = {side: {} for side in SIDES}
    if results.exists():
        for line in results.read_text().splitlines():
            entry = json.loads(line)
            found[entry["side"]][entry["ranks"], entry["case"]] = entry
    threads = [threading.Thread(target=_run_side, args=(side, cases, results, found[side])) for side in SIDES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _run_side(side: str, cases: list[Case], results: Path, found: dict[Case, dict]) -> None:
    todo = [case for case in cases if case not in found]
    if not todo:
        return
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "tests/scripts/train_cases.py"), side]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin and process.stdout
        process.stdin.write("".join(json.dumps(case) + "\n" for case in todo))
        process.stdin.close()
        for line in process.stdout:
            entry = json.loads(line)
            found[entry["ranks"], entry["case"]] = entry
            with results.open("a") as file:  # a line at a time: whole, whichever side writes
                file.write(json.dumps({"side": side, **entry}) + "\n")


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        verdict: see the top of the file.
        first: how far the first step's losses and its gradient norm are apart, the larger of both.
        apart: the same of the losses of all steps.
        words: the last line of the side that failed.
    """

    verdict: str
    first: float = 0.0
    apart: float = 0.0
    words: str = ""

    @property
    def exact(self) -> bool:
        """Whether every loss of every step is equal bit for bit."""
        return self.verdict == "same" and self.apart == 0


def judge(stock: dict, level: dict) -> Outcome:
    """The outcome of what train_cases.py says of both sides."""
    last = (level["said"] or [""])[-1]
    if level["code"] == 2 and "Traceback" not in " ".join(level["said"]):
        named = re.match(r"megatron_fp8: (--[\w-]+)", last)
        if "; Megatron checks it in " in last:
            return Outcome("checked" if named and stock["code"] else "fails", words=last)
        if named and named[1] in re.findall(r"--[\w-]+", level["case"]):
            return Outcome("refused", words=last.removeprefix("megatron_fp8: "))
    if level["code"] or stock["code"]:
        verdict = "neither" if level["code"] and stock["code"] else "fails" if level["code"] else "alone"
        return Outcome(verdict, words=last or stock["said"][-1])
    if [step.keys() for step in stock["losses"]] != [step.keys() for step in level["losses"]] or not stock["losses"]:
        return Outcome("differs", math.inf, math.inf, "other steps, or other losses")
    steps = [
        list(zip(*(side["losses"][i].values() for side in (stock, level)), strict=True))
        for i in range(len(stock["losses"]))
    ]
    apart = [max(_relative(*pair) for pair in step) for step in steps]
    norm = _relative(stock["norms"][0], level["norms"][0]) if stock["norms"][0] else 0.0
    same = apart[0] == 0 and norm < NORM and max(apart) < NEAR
    return Outcome("same" if same else "differs", max(apart[0], norm), max(apart))


def _relative(stock: float, level: float) -> float:
    return 0.0 if stock == level else abs(stock - level) / max(abs(stock), 1e-9)


def outcomes(cases: list[Case], results: Path) -> dict[Case, Outcome]:
    found = run_all(cases, results)
    return {case: judge(found["stock"][case], found["level"][case]) for case in cases}


def unexpected(found: dict[Case, Outcome]) -> dict[Case, Outcome]:
    """What became something else than training_cases.py says; what may differ by a rounding may be the same."""
    return {case: outcome for case, outcome in found.items() if not _expected(outcome, reason(case))}


def _expected(outcome: Outcome, why: Reason | None) -> bool:
    if why is None or (why.verdict == "differs" and outcome.verdict == "same"):
        return outcome.verdict == "same"
    return outcome.verdict == why.verdict and max(outcome.first, outcome.apart) <= why.bound


def report(found: dict[Case, Outcome]) -> str:
    """Counts, and each case that is not the same, refused or checked, with the reason that training_cases.py gives."""
    counts = Counter(outcome.verdict for outcome in found.values())
    exact = sum(outcome.exact for outcome in found.values())
    lines = [f"{sum(counts.values())} cases: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    lines.append(f"of those that are the same, {exact} are so bit for bit in every step")
    for (ranks, case), outcome in found.items():
        if outcome.verdict not in ("same", "refused", "checked"):
            why = reason((ranks, case))
            size = f" by {outcome.first:.1e}, then {outcome.apart:.1e}," if outcome.verdict == "differs" else ""
            said = f"; it said: {outcome.words}" if outcome.words else ""
            lines.append(f"{outcome.verdict}{size} on {ranks}: {case or '(no flag)'}")
            lines.append(f"    {why.text if why else 'NOT EXPLAINED'}{said}")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "results"
        print(report(outcomes(all_cases(), results)))


if __name__ == "__main__":
    main()
