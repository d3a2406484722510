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
    given = {"start": 32, "growth": 2.0, "grain": 4, "budget": 1e9} | changes
    return SimpleNamespace(**given)


def search(limit: int, seconds: float = 0.0, **changes) -> list[int]:
    """The lengths that are tried if `limit` tokens fit."""

    def attempt(length: int) -> dict:
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
    assert list(long_context.longest(settings(), lambda length: failed[0])) == failed


def test_a_search_keeps_to_its_budget():
    assert search(1 << 20, seconds=60.0, budget=50) == [32]


def test_a_slower_growth():
    assert search(1000, growth=1.25)[:3] == [32, 40, 52]


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
    words = f"--shape tiny --systems O3 --seq-length 256 --logs {tmp_path}".split()
    monkeypatch.setattr(sys, "argv", ["long_context.py", *words])
    args = long_context.arguments("", [], long_context.add)
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
    assert started[-1][2]["FIRST_TOKENS"] == "8192"
