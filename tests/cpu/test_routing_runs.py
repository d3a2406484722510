"""--fp8-log-routing in Megatron's real loop: the numbers are what the routers' own outputs say, in any layout."""

import json
import math
import re

import pytest
import torch
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
)
LOG = "--fp8-log-routing"
_LINE = re.compile(
    r"\[fp8\] iteration (\d+): router entropy (\S+) nats; tokens by expert: entropy (\S+) of (\S+) nats, "
    r"load (\S+) to (\S+)$"
)


def train(tmp_path, flags: str, ranks: int = 1, steps: int = 4, **how):
    """(The run, {step: {name: value}} of its file)."""
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    every = [*TINY_GPT, *MOE.split(), "--train-iters", str(steps), "--lr-decay-iters", "10", *flags.split()]
    env = {"MEGATRON_FP8_METRICS": str(file), **how.pop("env", {})}
    run = run_megatron(ranks, every, timeout=300, env=env, **how)
    found: dict[int, dict[str, float]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        found.setdefault(line.pop("step", 0), {}).update(line)
    return run, found


def loads(values: dict[str, float]) -> dict[str, list[float]]:
    """{layer's mixture: the loads of its experts}."""
    found: dict[str, list[float]] = {}
    for name, value in values.items():
        if match := re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)_load", name):
            found.setdefault(match[1], []).append(value)
            assert len(found[match[1]]) == int(match[2]) + 1
    return found


@pytest.mark.parametrize("level", ["", pytest.param("--fp8-level O3 --fp8-experts", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_the_routers_outputs(level, tmp_path):
    """A script that keeps each router's logits and its choice, of every micro-batch."""
    kept = tmp_path / "kept"
    kept.mkdir()
    script = str(ROOT / "tests/scripts/kept_routing.py")
    env = {"PYTHONPATH": script_path(), "KEPT": str(kept)}
    run, found = train(tmp_path, f"{level} {LOG} 2 --eval-iters 2 --eval-interval 2", script=script, env=env)
    lines = {int(line[1]): [float(x) for x in line.groups()[1:]] for line in map(_LINE.match, run.lines) if line}
    assert sorted(lines) == [2, 4] and sorted(step for step in found if loads(found[step])) == [2, 4]
    for step in (2, 4):
        entropies, balance = [], []
        for layer in (1, 2):
            passes = torch.load(kept / f"{step}_{layer}.pt")
            assert len(passes) == 4  # micro-batches of the step, and none of the evaluation after it
            logits = torch.cat([logits.reshape(-1, 4) for logits, _ in passes]).double()
            counts = sum(chosen.sum(0) for _, chosen in passes).double()
            assert counts.sum() == 2 * len(logits) == 2 * 8 * 64
            p = logits.softmax(-1)
            entropies.append(float(-(p * p.log()).sum(-1).mean()))
            share = counts / counts.sum()
            balance.append(float(-(share * share.clamp(min=1e-30).log()).sum()))
            assert loads(found[step])[f"decoder.layers.{layer - 1}.mlp"] == pytest.approx((4 * share).tolist())
        each = [load for of in loads(found[step]).values() for load in of]
        wanted = [sum(entropies) / 2, sum(balance) / 2, math.log(4), min(each), max(each)]
        assert lines[step][:3] == pytest.approx(wanted[:3], rel=5e-5)
        assert lines[step][3:] == pytest.approx(wanted[3:], rel=5e-3)
        names = ("router_entropy", "load_entropy", "load_least", "load_most")
        assert [found[step][name] for name in names] == pytest.approx([*wanted[:2], *wanted[3:]], rel=1e-5)


def test_nothing_else_is_another(tmp_path):
    plain, logged = (
        train(tmp_path, f"--fp8-level O1 --fp8-experts {flags}", steps=2)[0] for flags in ("", f"{LOG} 1")
    )
    assert plain.losses == logged.losses and plain.grad_norms == logged.grad_norms


LAYOUTS = {
    "ep": "--expert-model-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2",
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "again": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.mark.parametrize(
    "layout", ["pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ep", "tp", "again"))]
)
def test_layouts_count_the_same_tokens(layout, tmp_path):
    """All begin with the weights of one checkpoint."""
    train(tmp_path, f"--save {tmp_path}/saved --save-interval 1", steps=1)
    level = "--fp8-level O1 --fp8-gemm bf16"  # stock's own layers have no sequence parallelism
    same = f"--load {tmp_path}/saved --finetune --no-load-optim --no-load-rng {LOG} 1 {level}"
    _, one = train(tmp_path, same, steps=1)
    _, other = train(tmp_path, f"{same} {LAYOUTS[layout]}", ranks=1 if layout == "again" else 2, steps=1)
    assert list(loads(one[1])) == ["decoder.layers.0.mlp", "decoder.layers.1.mlp"] == list(loads(other[1]))
    for name, each in loads(one[1]).items():
        assert loads(other[1])[name] == pytest.approx(each, abs=0.02)  # a token between two experts may tip over
        assert sum(each) == pytest.approx(4)
    assert other[1]["router_entropy"] == pytest.approx(one[1]["router_entropy"], rel=1e-3)


def test_without_experts_it_is_refused(tmp_path):
    with pytest.raises(RunFailed, match="--fp8-log-routing 2: no --num-experts: there are no routers; remove it"):
        run_megatron(1, [*TINY_GPT, LOG, "2"])
