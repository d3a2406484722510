"""Trains every case with stock Megatron and at a level, and says of each whether the losses are the same.

    python tests/training_matrix.py [RESULTS]     prints counts, and every case that is not the same, with its reason

RESULTS keeps what each run gave, a line of JSON a run; runs that it has are not made again.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SIDES = "stock", "level"


Case = tuple[int, str]  # ranks, flags


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


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "tests"))
    import training_cases

    run_all(training_cases.all_cases(), Path(sys.argv[1]))
