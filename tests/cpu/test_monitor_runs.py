"""Statistics in Megatron's loop: who writes what when, the same digits with and without, nothing on other steps."""

import json
import re
from collections import Counter

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

O1 = ["--fp8-level", "O1"]
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
CAST = ("overflows%", "underflows%", "cur_amax", "scale_inv_min", "scale_inv_max")


class Logged:
    """A run with stand-ins for the writers: `tensorboard` and `wandb` {(name, step): value}; `calls` of each rank."""

    def __init__(self, tmp_path, nproc, flags):
        self.run = run_megatron(
            nproc,
            [*TINY_GPT, *O1, *flags.split(), "--tensorboard-dir", str(tmp_path)],
            script=str(ROOT / "tests/scripts/with_writers.py"),
            env={"PYTHONPATH": script_path(), "LOGDIR": str(tmp_path)},
        )
        self.tensorboard, self.wandb = (self.read(tmp_path / f"{writer}.jsonl") for writer in ("tensorboard", "wandb"))
        found = re.findall(r"monitor calls: (\{.*?\})", "\n".join(self.run.lines))  # the lines of two ranks may mix
        self.calls = [Counter(json.loads(text)) for text in found]
        self.lines = [line for line in self.run.lines if line.startswith("[fp8] iteration")]

    @staticmethod
    def read(path):
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        tags = {row["name"]: row["name"].removeprefix("fp8-").partition("/") for row in rows}
        values = {
            (f"{tags[row['name']][2]}_{tags[row['name']][0]}", row["step"]): row["value"]
            for row in rows
            if "layers" in row["name"]
        }
        assert len(values) == sum("layers" in row["name"] for row in rows)  # nothing is written twice
        return values

    @property
    def steps(self):
        return sorted({step for _, step in self.tensorboard})

    def at(self, step):
        return {name: value for (name, found), value in self.tensorboard.items() if found == step}


def names(layers, tensors, extra):
    inside = ["", *(f".{linear}" for linear in LINEARS)]
    parts = [f"decoder.layers.{layer}{linear}" for layer in layers for linear in inside]
    stats = [f"{tensor}_{stat}" for tensor in tensors for stat in CAST] + list(extra)
    return {f"{part}_{stat}" for part in parts for stat in stats}


def plain(nproc, flags):
    return run_megatron(nproc, [*TINY_GPT, *O1, *flags.split(), "--fp8-log-interval", "0"])


def test_one_process_writes_every_name_on_the_steps_that_log_and_nothing_else_runs(tmp_path):
    flags = "--fp8-grad-accum fp8 --train-iters 5"
    wandb = f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}"
    logged = Logged(tmp_path, 1, f"{flags} --fp8-log-interval 2 --fp8-log-grad-snr {wandb}")
    assert logged.steps == [2, 4] and logged.wandb == logged.tensorboard
    expected = names((0, 1), ("activation", "gradient", "weight", "wgrad"), ["wgrad_reduced_snr_db"])
    assert set(logged.at(2)) == set(logged.at(4)) == expected
    # 8 weights; 4 micro-batches cast x, dy and dW, a step casts W.
    assert logged.calls == [{"count_cast": 2 * 8 * (4 * 3 + 1), "gradient": 2 * 8 * 4, "reducing": 2, "write": 2}]
    last = logged.at(4)
    assert all(20 < value < 40 for name, value in last.items() if name.endswith("snr_db"))
    assert all(0 <= value < 1 for name, value in last.items() if name.endswith("%"))
    assert any(value > 0 for name, value in last.items() if name.endswith("underflows%"))
    assert all(value > 0 for name, value in last.items() if name.endswith(("cur_amax", "scale_inv_min")))
    assert [line.split(":")[0] for line in logged.lines] == ["[fp8] iteration 2", "[fp8] iteration 4"]
    worst = max((value, name) for name, value in last.items() if re.search(r"linear_\w+_underflows%", name))
    assert f"most underflows {worst[0]:.4g} %" in logged.lines[1]

    without = plain(1, flags)
    assert without.losses == logged.run.losses and without.grad_norms == logged.run.grad_norms
    assert not any("[fp8] iteration" in line for line in without.lines)


@pytest.mark.slow  # blocks stay
def test_two_processes_count_the_shared_scale_and_overlap(tmp_path):
    flags = "--fp8-grad-reduce shared --fp8-grad-scaling post --fp8-grad-accum bf16 --use-distributed-optimizer "
    flags += "--overlap-grad-reduce --ddp-bucket-size 10000 --train-iters 5"
    logged = Logged(tmp_path, 2, f"{flags} --fp8-log-interval 4 --fp8-log-grad-snr")
    assert logged.steps == [4]
    last = logged.at(4)
    assert {value for name, value in last.items() if name.endswith("_wgrad_mu")} == {1.0}
    # With mu = 1, equal gradients saturate in the sum, but not before it.
    assert max(value for name, value in last.items() if name.endswith("wgrad_reduced_saturations%")) > 0.1
    assert {value for name, value in last.items() if name.endswith("wgrad_overflows%")} == {0.0}
    noise = [value for name, value in last.items() if name.endswith("wgrad_reduced_snr_db")]
    assert len(noise) == 2 * 5 and all(15 < value < 35 for value in noise)
    assert len(logged.lines) == 1 and "most saturations" in logged.lines[0]
    assert plain(2, flags).losses == logged.run.losses


@pytest.mark.parametrize("wire", ["block", pytest.param("fp32", marks=pytest.mark.slow)])
def test_two_processes_count_the_cast_for_the_wire(tmp_path, wire):
    """With FP32 storage the wire's blocks are the only cast of dW; an FP32 wire has no cast and no noise."""
    logged = Logged(
        tmp_path,
        2,
        f"--fp8-grad-accum fp32 --fp8-grad-reduce {wire} --fp8-log-interval 2 --fp8-log-grad-snr --train-iters 3",
    )
    tensors = ("activation", "gradient", "weight", *(("wgrad",) if wire == "block" else ()))
    last = logged.at(2)
    assert set(last) == names((0, 1), tensors, ["wgrad_reduced_snr_db"])
    for name, value in last.items():
        if name.endswith("snr_db"):
            assert 25 < value < 45 if wire == "block" else value == float("inf")


def test_pipeline_stages_meet_at_the_writer(tmp_path):
    logged = Logged(
        tmp_path,
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--fp8-log-interval 2 --train-iters 3 --fp8-grad-accum fp32 --fp8-grad-reduce fp32",
    )
    assert set(logged.at(2)) == names(range(4), ("activation", "gradient", "weight"), [])
    assert len(logged.lines) == 1


@pytest.mark.slow
def test_tensor_parallel_parts_add_up(tmp_path):
    logged = Logged(tmp_path, 2, "--fp8-log-interval 2 --train-iters 3 --fp8-margin 6 --tensor-model-parallel-size 2")
    parts = {}
    for name, values in re.findall(r"weight (\S+) (\{.*?\})", "\n".join(logged.run.lines)):
        parts.setdefault(name, []).append(json.loads(values))
    assert len(parts) == 8 and all(len(ranks) == 2 for ranks in parts.values())
    assert any(first != other for first, other in parts.values())
    last = logged.at(2)
    for name, ranks in parts.items():
        elements, underflows = (sum(rank[field] for rank in ranks) for field in ("elements", "underflows"))
        assert last[f"{name}_weight_underflows%"] == 100 * underflows / elements
        assert last[f"{name}_weight_cur_amax"] == max(rank["amax"] for rank in ranks)
    assert any(rank["underflows"] for ranks in parts.values() for rank in ranks)


def test_without_a_writer_or_an_interval_nothing_is_counted(tmp_path):
    run = run_megatron(
        1,
        [*TINY_GPT, *O1, "--train-iters", "3"],
        script=str(ROOT / "tests/scripts/with_writers.py"),
        env={"PYTHONPATH": script_path(), "LOGDIR": str(tmp_path)},
    )
    assert "monitor calls: {}" in run.lines and not any("[fp8] iteration" in line for line in run.lines)
