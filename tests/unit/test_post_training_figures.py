"""docs/post_training.md's measured tables and sentences, recomputed from the CSVs.

A sentence stands here as the page has it, with its figures left open.  A changed figure, row or page fails.
"""

import csv
import re
import statistics
import sys

import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from smollm2 import wilson

PAGE = (ROOT / "docs/post_training.md").read_text()
TEXT = re.sub(r"\s+", " ", PAGE).replace("**", "")
O1, O2 = (f"{level}, masters as loaded" for level in ("O1", "O2"))
ARMS = {"O0, stock BF16": "O0", O1: O1, O2: O2, "O3": "O3", "O3 with FP8-LM's FP16 master": "O3, FP16 master"}


def read(name: str) -> list[dict]:
    with (ROOT / f"benchmarks/results/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def values(rows: list[dict], arm: str, stage: str, column: str) -> list[float]:
    return [float(row[column]) for row in rows if (row["arm"], row["stage"]) == (arm, stage) and row[column]]


def mean(*of) -> float:
    return statistics.mean(values(*of))


def right(rows: list[dict], arm: str) -> str:
    """The share of the pairs of all seeds, with its interval."""
    shares, pairs = (values(rows, arm, "dpo", column) for column in ("accuracy", "counted"))
    share = sum(a * n for a, n in zip(shares, pairs, strict=True)) / sum(pairs)
    low, high = wilson(share * sum(pairs), sum(pairs))
    return f"{share:.3f} ({low:.3f} to {high:.3f}"


def table(header: str) -> list[list[str]]:
    """The cells of the rows of the table that begins with this header."""
    (found,) = re.findall(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip() for cell in line.replace("**", "").split("|")[1:-1]] for line in found.splitlines()]


def test_smollm2s_table_is_the_rows():
    rows = read("smollm2")
    found = table("arm | seeds | SFT: held-out loss |")
    assert {ARMS[cells[0]] for cells in found} == {row["arm"] for row in rows} and len(found) == len(ARMS)
    for name, seeds, loss, taken, shown, accuracy, by_seed, margin in found:
        arm = ARMS[name]
        losses, each = values(rows, arm, "sft", "heldout_loss"), values(rows, arm, "dpo", "accuracy")
        assert seeds == f"{len(losses)}" == f"{len(each)}", name
        assert loss == f"{statistics.mean(losses):.5f} ± {statistics.stdev(losses):.5f}", name
        for cell, column in ((taken, "share"), (shown, "shown")):
            of = [values(rows, arm, stage, column) for stage in ("sft", "dpo")]
            assert cell == " / ".join(f"{statistics.mean(s):.3f}" for s in of if s), (name, column)
        assert by_seed == " ".join(f"{share:.3f}" for share in each), name
        assert accuracy == f"{right(rows, arm)})" and margin == f"{mean(rows, arm, 'dpo', 'margin'):.3f}", name
    assert {row["commit"] for row in rows} == {"d72279f"} and all("H100" in row["gpu"] for row in rows)


def test_smollm2s_sentences_are_the_rows():
    rows, before = read("smollm2"), read("smollm2_undithered")
    of = {stage: {tuple(row[c] for c in ("steps", "batch", "seq", "lr", "counted")) for row in rows + before
                  if row["stage"] == stage} for stage in ("sft", "dpo")}  # fmt: skip
    (sft,), (dpo,) = of["sft"], of["dpo"]
    tokens = int(sft[1]) * int(sft[2])
    assert sft[1:3] == dpo[1:3] and (float(sft[3]), float(dpo[3])) == (2e-5, 1e-6)
    assert f"SFT ({sft[0]} steps of {tokens:,} tokens, 2e-5)" in TEXT and f"DPO ({dpo[0]} steps, 1e-6)" in TEXT
    assert f"the loss of {int(sft[4]):,} answer tokens" in TEXT and f"the share of {int(dpo[4]):,} pairs" in TEXT
    more = {arm: 100 * (mean(rows, arm, "sft", "heldout_loss") / mean(rows, "O0", "sft", "heldout_loss") - 1)
            for arm in ARMS.values()}  # fmt: skip
    assert round(more[O1], 2) == round(more[O2], 2)
    words = f"O3 ends {more['O3']:.2f} % above stock BF16, O1 and O2 {more[O2]:.2f} %, FP8-LM's master "
    assert f"{words}{more['O3, FP16 master']:.2f} %" in TEXT
    taken = [100 * mean(rows, "O3, FP16 master", stage, "share") for stage in ("sft", "dpo")]
    assert f"That master took {taken[0]:.0f} % of the updates" in TEXT and f"take {taken[1]:.1f} % of the upd" in TEXT
    accuracy = {arm: mean(rows, arm, "dpo", "accuracy") for arm in ARMS.values()}
    assert sorted(accuracy, key=accuracy.get)[-2:] == ["O3", "O0"]  # "every level has fewer", "O3 is the nearest"
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    percent = {arm: f"{100 * share:.0f} %" for arm, share in accuracy.items()}
    words = f"O3 has {percent['O3']} of the held-out pairs right, O1 and O2, masters as loaded, {percent[O1]}, stock "
    words += f"BF16 {percent['O0']}"
    assert words in readme and percent[O1] == percent[O2]
    assert f"O1 and O2 show {100 * mean(rows, O2, 'dpo', 'shown'):.0f} % of their masters' way, as loaded" in TEXT
    assert f"and shows {100 * mean(rows, 'O3', 'dpo', 'shown'):.0f} %" in TEXT
    times = [mean(rows, "O3", "dpo", column) / mean(rows, "O0", "dpo", column) for column in ("margin", "log_ratio")]
    assert f"Its margin is {times[0]:.1f} times stock's" in TEXT and f"moved {times[1]:.1f} times as far" in TEXT
    words = f"O3 had {right(before, 'O3')}, one seed), and FP8-LM's master "
    assert f"{words}{mean(before, 'O3, FP16 master', 'dpo', 'accuracy'):.3f} (two seeds" in TEXT
    assert len(values(before, "O3", "dpo", "share")) == 1 and {row["commit"] for row in before} == {"4d63996"}
    low, high = wilson(0.77 * int(dpo[4]), int(dpo[4]))
    assert f"One seed's is ± {(high - low) / 2:.2f}" in TEXT


def test_sft_with_drawn_masters_is_the_rows():
    rows, as_loaded = read("smollm2_sft"), read("smollm2")

    def seeds(arm: str, column: str) -> dict[str, float]:
        return {row["seed"]: float(row[column]) for row in rows if row["arm"] == arm}

    def more(arm: str, column: str = "heldout_loss", than: str = "O0") -> list[float]:
        """Per cent of the other arm's mean, of the seeds that both have."""
        ours, theirs = seeds(arm, column), seeds(than, column)
        return [100 * (ours[seed] / theirs[seed] - 1) for seed in sorted(ours)]

    found = table("arm | seeds | held-out loss |")
    assert {cells[0].partition(", stock")[0] for cells in found} == {row["arm"] for row in rows}
    for name, number, loss, gap, first in found:
        arm = name.partition(", stock")[0]
        held_out, begin = (seeds(arm, column) for column in ("heldout_loss", "first_loss"))
        assert (number, loss) == (f"{len(held_out)}", f"{statistics.mean(held_out.values()):.5f}"), name
        if arm == "O0":
            assert first == f"{begin['1']:.4f}, {begin['2']:.4f}"
        else:
            assert gap == f"{statistics.mean(more(arm)):+.2f} %", name
            assert first == ", ".join(f"{percent:+.2f} %" for percent in more(arm, "first_loss")), name
    loaded = 100 * (mean(as_loaded, O1, "sft", "heldout_loss") / mean(as_loaded, "O0", "sft", "heldout_loss") - 1)
    gap = statistics.mean(more("O1"))
    assert f"{gap:.2f} % above stock BF16, and {loaded:.2f} % with masters as loaded" in TEXT and gap < 0.55 * loaded
    bf16 = -statistics.mean(more("O3, BF16 GEMMs"))
    assert f"ends {bf16:.2f} % below stock. FP8 GEMMs end " in TEXT
    assert f"FP8 GEMMs end {statistics.mean(more('O3', than='O3, BF16 GEMMs')):.2f} % above it" in TEXT
    same = "O3, margin 1", "O3, margin 2", "O3, tensorwise"
    ends = {arm: mean(rows, arm, "sft", "heldout_loss") for arm in ("O3", *same)}
    assert min(ends, key=ends.get) == "O3"  # "no margin ... ends lower"
    decisions = re.sub(r"\s+", " ", (ROOT / "docs/decisions.md").read_text())
    words = "ends at {O3:.4f}, with a margin of 1 at {O3, margin 1:.4f}, of 2 at {O3, margin 2:.4f}"
    assert words.format(**ends) in decisions
    made = {tuple(row[c] for c in ("gpu", "commit", "steps", "batch", "seq", "lr", "counted")) for row in rows}
    (sft,) = {tuple(row[c] for c in ("steps", "batch", "seq", "lr", "counted")) for row in as_loaded
              if row["stage"] == "sft"}  # fmt: skip
    assert made == {("NVIDIA H200", "95e7bb9", *sft)}


NAMES = {  # {what the tables say: (task, system) of tuning.csv}
    "SFT, O3": ("sft", "O3"),
    "SFT, stock BF16": ("sft", "bf16-repaired"),
    "SFT, Transformer Engine FP8": ("sft", "te-delayed"),
    "DPO, O3, resident": ("dpo", "O3"),
    "DPO, O3, scores": ("dpo-file", "O3"),
    "LoRA on a frozen base, O3": ("lora", "O3"),
    "LoRA on a frozen base, stock BF16": ("lora", "bf16-repaired"),
}


def named(said: str) -> tuple[str, str]:
    return NAMES[max((name for name in NAMES if said.startswith(name)), key=len)]


def measured(commit: str, layers: int) -> dict[tuple[str, str, int], dict[str, float]]:
    """{(task, system, micro-batch): figures} of a call on one kind of GPU."""
    columns = "ms", "tokens_s", "gb", "gb_peak"
    return {
        (row["task"], row["system"], int(row["mbs"])): {c: float(row[c]) for c in columns}
        for row in read("tuning")
        if (row["commit"], row["layers"]) == (commit, str(layers)) and row["ms"]
    }


def tenths(number: float) -> str:
    """A half is rounded up, as by hand; as a float it is often a little less."""
    return f"{number + 1e-9:.1f}"


def held(row: dict[str, float]) -> str:
    return f"{tenths(row['gb'])} / {tenths(row['gb_peak'])}"


def test_eight_layers_are_the_rows():
    rows = measured("2a053cd", 8)
    found = table("| ms a step | tokens/s |")
    assert len(found) == len(rows) == 5
    for said, ms, speed, memory, _ in found:
        row = rows[(*named(said), 1)]
        assert (ms, speed, memory) == (tenths(row["ms"]), f"{row['tokens_s']:,.0f}", held(row)), said
    ours, stock = (rows["sft", system, 1] for system in ("O3", "bf16-repaired"))
    faster, less = ours["tokens_s"] / stock["tokens_s"], ours["gb"] / stock["gb"]
    assert f"SFT at O3 is {faster:.2f} times as fast as stock BF16 there and holds {less:.2f} of its memory" in TEXT


def test_the_whole_model_is_the_rows():
    rows = measured("679d2ac", 32)
    found = table("| micro-batch | ms a step |")
    assert len(found) == len(rows) == 8
    for said, batch, ms, speed, memory, times in found:
        task, system = named(said)
        row = rows[task, system, int(batch)]
        assert (ms, speed, memory) == (tenths(row["ms"]), f"{row['tokens_s']:,.0f}", held(row)), said
        stock = {"sft": 2, "lora": 8}.get(task)
        gain = row["tokens_s"] / rows[task, "bf16-repaired", stock]["tokens_s"] if stock else None
        assert times == ("" if gain is None else "1" if gain == 1 else f"{gain:.2f}"), said
    ours, stock = rows["sft", "O3", 2], rows["sft", "bf16-repaired", 2]
    faster, less, peak = (ours[c] / stock[c] for c in ("tokens_s", "gb", "gb_peak"))
    words = f"is {faster:.2f} times as fast as stock BF16, holds {less:.2f} of its memory between steps, and peaks at "
    assert f"{words}{peak:.2f} of it" in TEXT
    gain = rows["dpo-file", "O3", 4]["tokens_s"] / rows["dpo", "O3", 4]["tokens_s"]
    assert f"Scores from a file are {gain:.2f} times as fast as a resident reference" in TEXT
    some = measured("679d2ac", 12)
    o3, te, bf16 = (some["sft", system, 4] for system in ("O3", "te-delayed", "bf16-repaired"))
    words = f"O3 {o3['tokens_s']:,.0f} tokens/s ({tenths(o3['gb_peak'])} GB at the peak), Transformer Engine "
    words += f"{te['tokens_s']:,.0f} ({tenths(te['gb_peak'])}), stock BF16 {bf16['tokens_s']:,.0f} "
    words += f"({tenths(bf16['gb_peak'])}): "
    words += f"{o3['tokens_s'] / te['tokens_s']:.2f} and {o3['tokens_s'] / bf16['tokens_s']:.2f} times"
    assert words in TEXT


def test_the_h100s_sentences_are_the_rows():
    rows = measured("4d63996", 32)
    sft, dpo = rows["sft", "O3", 1], rows["dpo", "O3", 2]
    words = f"SFT at micro-batch 1 took {tenths(sft['ms'])} ms, {sft['tokens_s']:,.0f} tokens/s, {tenths(sft['gb'])} "
    words += f"GB between steps and {tenths(sft['gb_peak'])} at the peak; DPO with a resident reference at micro-batch "
    words += f"2 {tenths(dpo['ms'])} ms, {dpo['tokens_s']:,.0f} tokens/s, {tenths(dpo['gb'])} and "
    words += f"{tenths(dpo['gb_peak'])} GB"
    assert words in TEXT
    some = measured("4d63996", 12)
    times = [some["sft", system, 4]["ms"] for system in ("O1-bf16-gemm", "bf16-repaired")]
    assert f"The times are {tenths(times[0])} and {tenths(times[1])} ms" in TEXT


@pytest.mark.parametrize("layers", [14, 32])
def test_the_four_models_are_the_rows(layers):
    rows = {row["system"]: row for row in read("tuning") if (row["task"], row["layers"]) == ("ppo", str(layers))}
    gb = {system: float(row["gb"]) for system, row in rows.items()}
    if layers == 32:
        words = f"they hold {tenths(gb['O3'])} GB after a step of the two that are trained "
        assert words in TEXT and f"{tenths(float(rows['O3']['gb_peak']))} at the peak, on an H200" in TEXT
    else:
        words = f"O3 holds {tenths(gb['O3'])} GB and stock BF16 {tenths(gb['bf16'])}: "
        words += f"{100 * (1 - gb['O3'] / gb['bf16']):.0f} % less"
        assert words in TEXT
