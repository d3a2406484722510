"""Draw docs/figures/results.svg, README's picture: a whole GPT-7B's speed and memory by system, from table5.csv.

python tools/make_results_figure.py              write it (matplotlib)
python tools/make_results_figure.py --to FILE    elsewhere; FILE.png is a PNG

Each system has the largest micro-batch that fits it, as in docs/results.md. One call of the table for each machine. The
background is white, so that the picture is read on a dark page too.
"""

import argparse
import csv
from pathlib import Path

from megatron_fp8.tools.palette import COLOURS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/table5.csv"
PICTURE = ROOT / "docs/figures/results.svg"
SYSTEMS = {  # of table5.csv: its name for readers, its colour's key
    "bf16": ("stock BF16", "BF16"),
    "te-delayed": ("Transformer Engine FP8", "TE"),
    "O3": ("O3", "O3"),
}
MACHINES = {  # the machine's name for readers: (GPU, GPUs, commit) of the call
    "one H200": ("NVIDIA H200", 1, "ccb2a7e"),
    "two H200s": ("NVIDIA H200", 2, "d9610c3"),
    "two H100s of 80 GB": ("NVIDIA H100 80GB HBM3", 2, "d9610c3"),
}
PANELS = {  # column of table5.csv: title, form of a figure
    "Tokens/sec/GPU": ("tokens a second and GPU", "{:,.0f}"),
    "Held GB": ("GB on a GPU between two steps", "{:.0f}"),
}
TYPE = {"svg.hashsalt": "megatron_fp8", "svg.fonttype": "none", "font.size": 10, "font.sans-serif": ["DejaVu Sans"]}


def best(rows: list[dict[str, str]], system: str, machine: str) -> dict[str, str] | None:
    """The row of a system's fastest micro-batch in the call of a machine, without a cap on memory.

    None if it has no row: there it ran out of memory at micro-batch 1 (docs/results.md).
    """
    gpu, gpus, commit = MACHINES[machine]
    wanted = {"System": system, "Model": "7b", "GPU": gpu, "#-GPUs": str(gpus), "Commit": commit, "Cap GB": ""}
    found = [row for row in rows if row["Outcome"] == "ok" and wanted.items() <= row.items()]
    return max(found, key=lambda row: float(row["Tokens/sec/GPU"]), default=None)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """The picture, from table5.csv's rows, to an SVG that is the same for the same rows, or to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(TYPE)
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.3), layout="constrained", facecolor="white")
    for axis, (column, (title, form)) in zip(axes, PANELS.items(), strict=True):
        for i, machine in enumerate(MACHINES):
            for j, (system, (_, key)) in enumerate(SYSTEMS.items()):
                y, row = i + (j - 1) * 0.27, best(rows, system, machine)
                value = float(row[column]) if row else 0.0
                said = form.format(value) if row else "out of memory"
                if row and axis is axes[0]:
                    said += f"  (micro-batch {row['MBS']})"
                axis.barh(y, value, 0.25, color=COLOURS[key], edgecolor=COLOURS[key], linewidth=0.8)
                axis.text(value, y, f"  {said}", va="center", color="#222222")
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.set_yticks(range(len(MACHINES)), MACHINES if axis is axes[0] else [""] * len(MACHINES))
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.margins(x=0.5 if axis is axes[0] else 0.15)
        axis.set_xlim(left=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[key]) for _, key in SYSTEMS.values()]
    names = [name for name, _ in SYSTEMS.values()]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
    else:
        figure.savefig(path, metadata={"Date": None})
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=PICTURE, metavar="FILE")
    args = parser.parse_args()
    with RESULTS.open(newline="") as file:
        draw(list(csv.DictReader(file)), args.to)
    print(args.to)


if __name__ == "__main__":
    main()
