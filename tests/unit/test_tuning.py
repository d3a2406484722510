"""benchmarks/tuning.py: its data, what it reads of a run's log, its command line; and each of our arms, small."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, RunFailed
from megatron_runs import start_forked

sys.path.insert(0, str(ROOT / "benchmarks"))
import token_files
import train_step
import tuning


@pytest.mark.parametrize("length", [64, 512, 2048])
@pytest.mark.parametrize("of_pairs", [False, True])
def test_files_of_random_documents(of_pairs, length, tmp_path):
    """They fit their samples and fill them; what is not the assistant's does not count; the seed says all."""
    draw, count = (token_files.pairs, token_files.size_of_pair) if of_pairs else (
        token_files.conversations, token_files.size)  # fmt: skip

    def lines(seed):
        return token_files.packed(draw(1000, length, seed), count, length, 40)

    found = lines(3)
    assert found == lines(3) != lines(4) and len(found) == 40
    assert all(0 < sum(map(count, line)) <= length for line in found)
    tokens = token_files.write(tmp_path / "x.jsonl", found, of_pairs)
    assert 0.8 < tokens / (40 * length) <= 1
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    pair = rows[0]["pairs"][0] if of_pairs else None
    messages = pair["chosen"] if pair else rows[0]["messages"][:3]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    if pair:
        assert pair["chosen"][:2] == pair["rejected"][:2] and pair["chosen"][2] != pair["rejected"][2]
    ids, targets = token_files.tokenize_conversation(messages, return_target=True, add_generation_prompt=False)
    answer = len(messages[-1]["content"].split())
    assert ids.dtype == np.int64 and ids.max() < 1000 and len(ids) == token_files.size(messages)
    assert (targets[:-answer] == token_files.IGNORED).all() and (targets[-answer:] == ids[-answer:]).all()


def test_lengths_of_documents():
    """Medians as documented, within their sampling error."""
    drawn = [next(documents) for documents in [token_files.conversations(10, 1 << 20, 1)] for _ in range(2000)]
    prompt, answer = (np.median([len(one[i]["content"].split()) for one in drawn]) for i in (1, 2))
    assert prompt == pytest.approx(token_files.PROMPT, rel=0.1) and answer == pytest.approx(token_files.ANSWER, rel=0.1)


def log_of(*steps: tuple[float, float, float], name: str = "lm loss") -> str:
    lines = []
    for i, (ms, gb, peak) in enumerate(steps, 1):
        lines.append("STEP " + json.dumps({"ms": ms, "gb": gb, "gb_peak": peak}))
        lines.append(f" [2026] iteration {i:8}/ 8 | consumed samples: 4 | {name}: {1 / i:.6E} | grad norm: 1.0 |")
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["lm loss", "dpo loss"])
def test_figures_of_a_log(name):
    """The peak of the first step, with the building in it, is apart; steps that warm up are not timed."""
    warm_up = [(900.0, 3.0, 9.0), (500.0, 3.0, 5.0), (100.0, 3.1, 6.0)]
    steps = [*warm_up, (20.0, 3.2, 5.5), (40.0, 3.2, 5.5), (30.0, 3.2, 5.0)]
    found = tuning.figures(log_of(*steps, name=name), 3)
    assert (found["ms"], found["ms_min"], found["ms_max"]) == (30.0, 20.0, 40.0)
    assert (found["gb"], found["gb_peak"], found["gb_peak_start"]) == (3.2, 6.0, 9.0)
    assert found["loss"] == pytest.approx(1 / 6, abs=1e-6)
    assert "ms" not in tuning.figures(log_of(*steps[:3]), 3)  # cut off before a step was timed
    assert tuning.figures("Traceback", 3) == {}


@pytest.mark.parametrize(
    ("log", "error", "outcome"),
    [
        ("", None, "ok"),
        ("torch.OutOfMemoryError: CUDA out of memory.", RunFailed("exit code 1", 1), "out of memory"),
        ("", RunFailed("killed after 3 s", -9), "late"),
        ("ValueError", RunFailed("exit code 1", 1), "failed"),
    ],
)
def test_outcomes(log, error, outcome):
    assert tuning.outcome(log, error) == outcome


@pytest.mark.parametrize(
    "words",
    ["--arms sft", "--arms sft:O9", "--arms rl:O3", "--arms ppo:te-delayed", "--mbs sft:O1=2 --arms sft:O3",
     "--arms sft:O3 --mbs sft:O3=x", "--iterations 3", "--warmup 1"],
)  # fmt: skip
def test_a_wrong_command_line_measures_nothing(words):
    with pytest.raises(SystemExit):
        tuning.arguments(words.split())


def test_what_arms_share_and_what_not(tmp_path):
    """Model and batch are one; layers, sample and micro-batch as said; stock finds Transformer Engine where it is."""
    words = "--layers 4 --seq 4096 --arms sft:O3 dpo-file:bf16-repaired --mbs sft:O3=2 --te-path /te --lr 1"
    args = tuning.arguments(words.split())
    assert args.extra == ["--lr", "1"]
    files = tuning.Files(tmp_path, args)
    files.filled = {"sft": 1.0, "dpo": 1.0}  # nothing to write
    (ours, our_env), (stock, its_env) = (tuning.command_of(arm, args, files) for arm in args.arms)
    for command in (ours, stock):
        assert tuning.last(command, "--num-layers") == 4
        assert tuning.last(command, "--seq-length") == tuning.last(command, "--max-position-embeddings") == 4096
        assert tuning.last(command, "--hidden-size") == 4096 and "--mock-data" not in command
    assert "--micro-batch-size=2" in ours and "--sft" in ours and "--fp8-level" in ours
    assert "--micro-batch-size=1" in stock and "--dpo-beta" in stock and "--fp8-level" not in stock
    assert (our_env["TASK"], our_env["TE"]) == ("sft", "none") and "PYTHONPATH" not in our_env
    assert (its_env["TASK"], its_env["TE"]) == ("dpo", "repaired") and its_env["PYTHONPATH"].startswith("/te:")


@pytest.mark.slow
def test_every_task_runs_small(tmp_path, monkeypatch, capsys):
    """On a machine without a GPU nothing is measured but time; the rows are there, and they are whole."""
    arms = ["sft:O3", "dpo:O3", "dpo-file:O3", "lora:O3", "ppo:O3"]
    words = "--shape tiny --gbs 4 --iterations 4 --csv x.csv --timeout 300 --num-workers 0 --arms"
    monkeypatch.setattr(sys, "argv", ["tuning.py", *words.split(), *arms])
    monkeypatch.chdir(tmp_path)
    start_forked(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        tuning.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert [line.split()[0] for line in said.splitlines()] == arms
    with Path(tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [f"{row['task']}:{row['system']}" for row in rows] == arms and {row["outcome"] for row in rows} == {"ok"}
    for row in rows[:-1]:
        assert len(row["steps_ms"].split()) == 4
        tokens = 4 * 64 * float(row["filled"])
        assert float(row["tokens_s"]) == pytest.approx(tokens / float(row["ms"]) * 1e3, rel=0.01)
    sft, dpo, from_file, lora, ppo = rows
    assert float(dpo["loss"]) == pytest.approx(0.693, abs=0.01) and "scored in" in from_file["note"]
    assert float(sft["loss"]) == pytest.approx(float(lora["loss"]), abs=0.05)  # the same model and data
    models = json.loads(ppo["note"])
    for copy, of in (("reference", "policy"), ("reward", "critic")):
        assert models[copy] == {"weight": pytest.approx(models[of]["weight"], rel=0.01)}
        assert {"exp_avg", "exp_avg_sq", "master", "grad"} <= set(models[of])
    assert train_step.SYSTEMS["O3"].te == sft["te"] == "none"
