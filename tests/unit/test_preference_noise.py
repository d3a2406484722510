"""benchmarks/preference_noise.py: the move of the weights, the table's figures; and all of it on a tiny model."""

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import write_llama
from launch import ROOT
from megatron_runs import start_forked
from safetensors.torch import load_file

from megatron_fp8.numerics.dither import dithered
from megatron_fp8.numerics.formats import E4M3, decode, encode
from megatron_fp8.numerics.master import quantize_block16
from megatron_fp8.numerics.scaling import power_of_two_scale

sys.path.insert(0, str(ROOT / "benchmarks"))
import preference_noise
import smollm2
import train_step


def test_linears_move_by_the_step_on_average(tmp_path):
    """Every weight stays or goes to a neighbour in BF16; up and down as often; in all by the step each. No other."""
    before = write_llama(tmp_path / "hf")
    preference_noise.moved_model(tmp_path / "hf", tmp_path / "moved", 1e-5, 3)
    after = load_file(tmp_path / "moved/model.safetensors")
    ways = []
    for name, weight in before.items():
        if "_proj" not in name:
            assert torch.equal(after[name], weight)
            continue
        change = (after[name].float() - weight.float()).flatten()
        ulp = torch.finfo(torch.bfloat16).eps * torch.exp2(weight.float().abs().log2().floor()).flatten()
        assert (change.abs() <= ulp.clamp(min=2e-5)).all()
        ways.append(change)
    way = torch.cat(ways).double()
    assert way.abs().mean().item() == pytest.approx(1e-5, rel=0.2)
    assert abs(way.mean().item()) < 5 * way.std().item() / math.sqrt(len(way))
    preference_noise.moved_model(tmp_path / "hf", tmp_path / "again", 1e-5, 3)
    assert all(torch.equal(w, after[name]) for name, w in load_file(tmp_path / "again/model.safetensors").items())


def test_logs_give_the_means_of_whole_parts(tmp_path, capsys):
    """Of each arm's logs; SFT's loss beside stock's of its own seed. A part that a log lacks the end of is left out."""
    values = {(arm, seed): np.random.default_rng().uniform(0.5, 4, (3, 100)).round(4)
              for arm in ("O0", "O3_FP16_master") for seed in (1, 2)}  # fmt: skip
    for (arm, seed), (loss, ratio, right) in values.items():
        folder = tmp_path / f"{arm}_{seed}"
        folder.mkdir()
        for stage, task in (("sft", "lm"), ("dpo", "dpo")):
            lines = [" [x] other"]
            for i in range(100 if seed == 1 else 30):
                logged = {"elapsed time per iteration (ms)": 1.0, f"{task} loss": loss[i], "grad norm": 1.0}
                logged |= {"abs log-ratio": ratio[i], "accuracy": right[i]} if stage == "dpo" else {}
                cells = " | ".join(f"{name}: {value:.6E}" for name, value in logged.items())
                lines.append(f" [x] iteration {i + 1:8}/ 357 | {cells} | number of skipped iterations: 0 |")
            (folder / f"{stage}.log").write_text("\n".join(lines))
    out, runs = tmp_path / "x.csv", tmp_path / "runs.csv"
    words = ["logs", "--work", str(tmp_path), "--csv", str(out), "--runs", str(runs)]
    with pytest.raises(SystemExit):
        preference_noise.arguments(words[:-2])
    assert capsys.readouterr().err.endswith("add --runs, the CSV of smollm2.py run\n")
    made = [{"gpu": "H", "torch": "2", "commit": f"{arm} {seed} {stage}", "date": "now", "arm": arm, "seed": seed,
             "stage": stage} for arm in smollm2.ARMS for seed in (1, 2) for stage in ("sft", "dpo")]  # fmt: skip
    (lacking,) = (row for row in made if row["commit"] == "O3, FP16 master 2 dpo")
    train_step.append(str(runs), smollm2.COLUMNS, [row for row in made if row is not lacking])
    with pytest.raises(ValueError, match=r"runs\.csv: has no row of .*O3_FP16_master_2/dpo\.log; name the"):
        preference_noise.read_logs(preference_noise.arguments(words))
    train_step.append(str(runs), smollm2.COLUMNS, [lacking])
    preference_noise.read_logs(preference_noise.arguments(words))
    with out.open(newline="") as file:
        rows = {(row["arm"], row["seed"], row["stage"], row["first"]): row for row in csv.DictReader(file)}
    assert {key[1:] for key in rows} == {("1", "sft", "4"), ("1", "sft", "11"), ("1", "sft", "22"), ("1", "dpo", "4"),
                                         ("1", "dpo", "21"), *[("2", *key) for key in (("sft", "4"), ("sft", "11"),
                                         ("dpo", "4"))]}  # fmt: skip
    assert all((row["gpu"], row["commit"]) == ("H", f"{arm} {seed} {stage}")
               for (arm, seed, stage, _), row in rows.items())  # fmt: skip
    row, mine = rows["O3, FP16 master", "1", "dpo", "21"], values["O3_FP16_master", 1][:, 20:36].mean(1)
    assert [float(row[name]) for name in ("loss", "log_ratio", "accuracy")] == pytest.approx(mine, abs=1e-4)
    said = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    sft, dpo = (line[1:] for line in said if line[0] == "O3, FP16 master")
    early = [found[:, 3:20].mean(1) for (arm, _), found in values.items() if arm != "O0"]
    assert [float(part) for part in dpo[0].split(",")] == pytest.approx(np.mean(early, 0)[1:], abs=0.006)
    late = values["O3_FP16_master", 1][0, 21:45].mean() - values["O0", 1][0, 21:45].mean()  # seed 2 ended before
    assert float(sft[2]) == pytest.approx(late, abs=0.0006) and sft[3:] == ["-"] * 2
    assert {line[0] for line in said} == {"O0", "O3, FP16 master", "sft", "dpo", "---"}


def test_the_pages_tables_are_the_rows():
    """docs/post_training.md's two tables of smollm2_noise.csv, and that of preference_noise.csv."""
    with (ROOT / "benchmarks/results/smollm2_noise.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 3 * 2 * 5
    assert {(row["gpu"], row["commit"]) for row in rows} == {("NVIDIA H100 80GB HBM3", "d72279f")}
    page = (ROOT / "docs/post_training.md").read_text()
    for line in preference_noise.tables(rows):
        assert line in page or line.startswith(("|---", "| O0 | +0.000"))
    with (ROOT / "benchmarks/results/preference_noise.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [f"| {row['arm']} | {float(row['answer']):.2f} | {float(row['margin']):.2f} | {float(row['log p']):.3f} |"
             for row in rows]  # fmt: skip
    assert "\n".join(["| arm | answer | pair | log p |", "|---|---|---|---|", *lines, ""]) in page
    assert {(row["step"], row["lines"], row["answers"]) for row in rows} == {("1e-05", "4", "34")}
    assert {(row["gpu"], row["commit"]) for row in rows} == {("x86_64 CPU, AVX512", "66f1558")}
    assert "34 held-out answers" in page and "moved by 1e-5" in page and "on a CPU (66f1558)" in page


def test_an_fp16_master_follows_the_last_gradient_alone():
    """Some of FP16's numbers are middles between two E4M3 numbers: a weight there goes by the sign of each update."""
    values = torch.randn(1 << 18) * 0.05
    scale = power_of_two_scale(values.abs().max(), E4M3)
    values = (decode(encode(values * scale, E4M3)) / scale).bfloat16()
    master, update = dithered(values, (1, 2, 3), scale), 2.8e-8 * (torch.randint(2, values.shape) * 2 - 1)

    def way(master: torch.Tensor) -> float:
        change = decode(encode((master + update) * scale, E4M3)) / scale - values.float()
        return ((change * update).sum() / update.square().sum()).item()

    assert way(quantize_block16(master).dequantize()) > 100 and abs(way(master)) < 30


def test_figures_of_scores():
    one, change = np.array([-8.0, -2.0, -6.0, -4.0], np.float32), np.array([3.0, 1.0, -1.0, 1.0], np.float32)
    found = preference_noise.compared(one, one + change, 5)
    assert found["answer"] == 1.5 and found["log p"] == -4
    assert found["a token"] == pytest.approx(math.sqrt(12 / 5)) and found["margin"] == 2  # of 2 and -2


@pytest.mark.slow
def test_a_tiny_models_noise(tmp_path, monkeypatch, capsys):
    """FP8's rounding makes most of what a small move of the weights changes; BF16 GEMMs show less of it."""
    write_llama(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    start_forked(monkeypatch)
    source = Path(json.__file__).parent.parent / "email"
    words = f"build --hf hf --out in --parts 1 --most 250 --tokenizer bytes --source {source}"
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *words.split()])
    smollm2.main()
    words = "score --inputs in/0 --work w --lines 6 --seq 512 --csv x.csv --step 1e-6 --arms"
    monkeypatch.setattr(sys, "argv", ["preference_noise.py", *words.split(), "BF16", "O1", "O3", "activations"])
    preference_noise.main()
    said = capsys.readouterr().out
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert len(rows) == 4, said
    assert all(row["commit"] and row["torch"] and ("CPU" in row["gpu"]) != torch.cuda.is_available()
               for row in rows.values())  # fmt: skip
    assert len({row["answers"] for row in rows.values()}) == 1 and int(rows["O1"]["answers"]) >= 6
    noise = {arm: float(row["answer"]) for arm, row in rows.items()}
    assert min(noise["O1"], noise["O3"], noise["activations"]) > 1.5 * noise["BF16"] > 0, noise
