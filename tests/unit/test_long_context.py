"""benchmarks/long_context.py: its layouts' flags, its search, and what it reads off a log of two steps."""

import sys
from types import SimpleNamespace

import pytest
import torch
from launch import ROOT, RunFailed
from megatron.core import utils
from megatron.training import training

sys.path.insert(0, str(ROOT / "benchmarks"))
import long_context
import profile_gpt

LOG = """
 iteration        1/       2 | elapsed time per iteration (ms): 900.0 | lm loss: 1.2E+01 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 200.0 | reserved: 1.0 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 110.0 | max allocated: 190.0 | reserved: 1.0 |
 iteration        2/       2 | elapsed time per iteration (ms): 600.0 | lm loss: 1.1E+01 |
[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 1000.0 | reserved: 1.0 |
"""


def settings(**changes):
    given = {"start": 32, "growth": 2.0, "shrink": 0.5, "grain": 4, "budget": 1e9, "tries": None} | changes
    return SimpleNamespace(**given)


def search(limit: int, seconds: float = 0.0, **changes) -> list[int]:
    """The lengths that are tried if `limit` tokens fit."""

    def attempt(length: int, left: float) -> dict:
        assert 0 < left <= changes.get("budget", 1e9)
        return {"sequence": length, "seconds": seconds, "outcome": "ok" if length <= limit else "out of memory"}

    return [row["sequence"] for row in long_context.longest(settings(**changes), attempt)]


def test_the_longest_is_found_to_the_grain():
    for limit in range(4, 200):
        tried = search(limit)
        fits = max(length for length in tried if length <= limit)
        assert limit - fits < 4 and fits + 4 in tried and len(tried) == len(set(tried)) < 12, tried


def test_a_search_ends_if_nothing_fits_or_a_try_fails():
    assert search(3)[-1] == 4
    failed = [{"sequence": 32, "seconds": 1.0, "outcome": "exit code 1"}]
    assert list(long_context.longest(settings(), lambda length, left: failed[0])) == failed


def test_a_search_keeps_to_its_budget():
    assert search(1 << 20, seconds=60.0, budget=50) == [32]
    assert search(1 << 20, tries=2) == [32, 64]


def test_a_slower_growth():
    assert search(1000, growth=1.25)[:3] == [32, 40, 52]


def test_a_search_from_a_prediction():
    """Down by a few percent until a length fits, then up by halves of what is left."""
    assert search(900, start=1000, shrink=0.94, grain=8)[:4] == [1000, 944, 888, 920]
    assert search(990, start=960, growth=1.045, grain=8)[:3] == [960, 1008, 984]


def test_a_try_that_ends_at_its_peak_fits(monkeypatch):
    """It has memory and no time, from its own lines; a search goes on from it as from a whole step."""
    args = read_arguments(monkeypatch, "--longest --to-peak --shape tiny --systems O3")

    def torchrun(nproc, command, log, *, timeout, env):
        assert env["PEAK_AFTER"] == "2" and env["PEAK_ENDS"] == "1" and "expandable" in env[long_context.SEGMENTS]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(LOG.split(" iteration        2")[0] + "PEAK 0.25 1.5\nPEAK 0.5 1.25\n")

    monkeypatch.setattr(long_context, "torchrun", torchrun)

    def attempt(length: int, left: float) -> dict:
        return long_context.train("O3", args, "shared", length, 1, profiled=False) | {"seconds": 1e9}

    rows = list(long_context.longest(args, attempt))
    assert [(row["outcome"], row["held_gb"], row["peak_gb"]) for row in rows] == [(long_context.FITS, 0.5, 1.5)]
    assert "ms" not in rows[0] and set(rows[0]) <= set(long_context.COLUMNS)


def read_arguments(monkeypatch, words: str) -> SimpleNamespace:
    monkeypatch.setattr(sys, "argv", ["long_context.py", *words.split()])
    return long_context.arguments("", [], long_context.add)


@pytest.mark.parametrize("ends", [False, True])
def test_the_peak_is_looked_at_in_the_second_step(monkeypatch, capsys, ends):
    """Layers' inputs alone are kept. Once the last two layers' backward pass is done, the third last is computed again.
    The first step prints nothing."""
    done, ended = [], []

    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            x = 2 * x
            if x.requires_grad:
                x.register_hook(lambda grad: done.append(self.number))
            return x

    layers = torch.nn.ModuleList([Layer(i) for i in range(4)])
    decoder = SimpleNamespace(layers=layers)

    def train_step(forward_step, data, model):
        x = torch.ones(3, requires_grad=True)
        for layer in layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()

    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(2e9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(1e9 * (5 + len(done))))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: ended.append("barrier"))
    monkeypatch.setattr(profile_gpt.os, "_exit", ended.append)
    profile_gpt.look_at_peak(2, ends)
    for step in range(3):
        training.train_step(None, None, [SimpleNamespace(decoder=decoder)])
        printed = capsys.readouterr().out
        assert printed == ("PEAK 2.0 11.0\n" if step == 1 else ""), (step, printed)
    assert done == [3, 2, 1, 0] * 3 and ended == ["barrier", 0] * ends


def test_two_steps():
    """The second step alone took 2 * 600 - 900 ms; the peak is the larger one of the ranks."""
    figures = long_context.of_second_step(LOG)
    assert figures == {
        "ms": 300.0, "held_gb": pytest.approx(110 * 2**20 / 1e9), "peak_gb": pytest.approx(1000 * 2**20 / 1e9),
        "loss": 11.0,
    }  # fmt: skip
    assert long_context.of_second_step(LOG.split("Rank 1")[0]) == {}


def test_a_first_step_of_short_sequences(monkeypatch):
    """The first call of train_step sees the first tokens of each sequence, later calls all."""
    split = []
    monkeypatch.setattr(training, "train_step", lambda batch: utils.get_batch_on_this_cp_rank(batch, cp_group="group"))
    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", lambda batch, **rest: split.append((batch, rest)))
    profile_gpt.shorten_first_step(3)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(2):
        training.train_step({"tokens": tokens, "attention_mask": None})
    (first, rest), (second, _) = split
    assert torch.equal(first["tokens"], tokens[:, :3]) and second["tokens"] is tokens
    assert first["attention_mask"] is None and rest == {"cp_group": "group"}


@pytest.mark.parametrize("memory", [True, False])
def test_rows_of_all_layouts(monkeypatch, tmp_path, memory):
    """The same tokens a step in all layouts; a run that fails has a row that says why."""
    args = read_arguments(monkeypatch, f"--shape tiny --systems O3 --seq-length 256 --logs {tmp_path}")
    started = []

    def torchrun(nproc, command, log, *, timeout, env):
        started.append((nproc, command, env))
        log.write_text("CUDA out of memory" if memory else "wrong")
        raise RunFailed("exit code 1\nmore", 1)

    monkeypatch.setattr(long_context, "torchrun", torchrun)
    rows = list(long_context.side_by_side(args))
    of = {row["layout"]: (row["sequence"], row["gbs"]) for row in rows}
    assert of == {"shared": (256, 16), "halves": (128, 32), "whole": (256, 16)}
    assert {row["outcome"] for row in rows} == {"out of memory" if memory else "exit code 1"}
    for (nproc, command, env), row in zip(started, rows, strict=True):
        assert nproc == 2 and env["TE"] == "none" and "FIRST_TOKENS" not in env
        last = dict(word.split("=") for word in command if "=" in word)
        assert int(last["--seq-length"]) == row["sequence"] and int(last["--global-batch-size"]) == row["gbs"]
        assert ("--context-parallel-size=2" in command) == (row["layout"] == "shared")
        assert set(row) <= set(long_context.COLUMNS)
    long_context.train("O3", args, "shared", 256, 1, profiled=False)
    assert started[-1][2]["FIRST_TOKENS"] == "8192" and "PEAK_ENDS" not in started[-1][2]
    args.layouts = ["whole"]
    assert [row["layout"] for row in long_context.side_by_side(args)] == ["whole"]
