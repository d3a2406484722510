"""The cost of checkpoints that load at any layout: bytes, and seconds of a save and of a load.

    python benchmarks/checkpoint_forms.py --csv benchmarks/results/checkpoint_forms.csv

A GPT of 46 M parameters at O3 with the distributed optimizer on two gloo ranks. 33 M of them (embedding and LM head)
are stock's own. They are saved in two forms: stock's default, which earlier versions used, and the form for any layout.
The forms take turns. The fastest of all saves and loads counts, because other processes only slow them down.
This shows the cost on one machine's file system, not on a cluster's.
"""

import argparse
import csv
import re
import shutil
import sys
from pathlib import Path

from stamp import ROOT, commit

sys.path.insert(0, str(ROOT / "tests"))

from launch import forked
from megatron_runs import TINY_GPT, script_path

MODEL = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --vocab-size 32000
--train-iters 3 --save-interval 1 --use-distributed-optimizer --fp8-level O3"""
FORMS = {"one layout": "tests/scripts/earlier_checkpoints.py", "any layout": "pretrain_gpt_fp8.py"}


def run(script: str, more: list[str]) -> dict[str, float]:
    """Seconds of the fastest save and of the fastest load, by Megatron's timers."""
    command = [script, *TINY_GPT, *MODEL.split(), *more]
    lines = forked(2, command, ROOT / "runs/checkpoint_forms/log.txt", timeout=600, env={"PYTHONPATH": script_path()})
    told = re.findall(r"(save|load)-checkpoint \.*: \([\d.]+, ([\d.]+)\)", "\n".join(lines))
    return {what: min(float(time) / 1e3 for kind, time in told if kind == what) for what, _ in told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = {form: {"form": form, "MB": 0.0, "save_s": 1e9, "load_s": 1e9} for form in FORMS}
    for _ in range(args.rounds):
        for form, script in FORMS.items():
            folder, row = ROOT / "runs/checkpoint_forms" / form.replace(" ", "_"), rows[form]
            shutil.rmtree(folder, ignore_errors=True)
            saved = run(script, ["--save", str(folder), "--exit-interval", "3"])
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            loaded = run(script, ["--load", str(folder)])
            row["MB"] = sum(path.stat().st_size for path in (folder / "iter_0000003").iterdir()) / 1e6
            row["save_s"], row["load_s"] = min(row["save_s"], saved["save"]), min(row["load_s"], loaded["load"])
    for row in rows.values():
        print(f"{row['form']}: {row['MB']:.1f} MB, save {row['save_s']:.2f} s, load {row['load_s']:.2f} s")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*next(iter(rows.values())), "commit"], lineterminator="\n")
            writer.writeheader()
            for row in rows.values():
                rounded = {name: value if isinstance(value, str) else round(value, 2) for name, value in row.items()}
                writer.writerow({**rounded, "commit": commit()})
    shutil.rmtree(ROOT / "runs/checkpoint_forms", ignore_errors=True)


if __name__ == "__main__":
    main()
