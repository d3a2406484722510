"""--fp8-on-spike in Megatron's loop with planted spikes: its log and actions, on all ranks and after a restart."""

import ast
import re

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path
from test_checkpoints import same, tensors

FALLBACK = "--fp8-on-spike bf16-fallback --fp8-spike-window 16"
ALL = [
    f"decoder.layers.{layer}.{linear}"
    for layer in (0, 1)
    for linear in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
]


class Spiking:
    """A run with spikes (tests/scripts/spiking.py); `said`: {iteration: the watch's log line}."""

    def __init__(self, nproc, flags, at, *more, by=30.0, where="loss", iterations=26):
        self.run = run_megatron(
            nproc,
            [*TINY_GPT, "--train-iters", str(iterations), "--global-batch-size", "4", *flags.split(), *more],
            script=str(ROOT / "tests/scripts/spiking.py"),
            env={"PYTHONPATH": script_path(), "SPIKE_AT": at, "SPIKE_BY": str(by), "SPIKE_IN": where},
        )
        text = "\n".join(self.run.lines)  # the lines of two ranks may mix
        found = re.findall(r"\[fp8\] iteration (\d+): ((?:loss|gradient norm) spike.*|back to FP8.*)", text)
        self.said = {int(iteration): what for iteration, what in found}
        assert len(self.said) == len(found)
        self.statistics = re.findall(r"\[fp8\] iteration (\d+): (\w+_(?:over|under)flows% spike)", text)
        told = re.findall(r"rank (\d) iteration (\d+): applied (\w+), changed (\d+), BF16 (\[.*?\])", text)
        self._told = {
            (int(rank), int(n)): (applied == "True", int(changed), ast.literal_eval(names))
            for rank, n, applied, changed, names in told
        }

    def at(self, iteration, rank=0):
        """(Whether the step was made, how many tensors it changed, the rank's linears that are in BF16 after it)."""
        return self._told[rank, iteration]


def test_log_says_so_and_changes_no_digit():
    flags = "--fp8-level O1 --fp8-log-interval 1 --micro-batch-size 4 --num-layers 1"
    plain, watched = (Spiking(1, f"{flags} {more}", "20", iterations=22) for more in ("", "--fp8-on-spike log"))
    assert plain.said == {} and list(watched.said) == [20]
    loss, norm = watched.run.losses[19], watched.run.grad_norms[19]
    assert loss > 100
    line = r"deviations above the line through its last 19 "
    found = re.match(rf"loss spike (\S+), \S+ {line}\(4\.\d+\); gradient norm spike (\S+), ", watched.said[20])
    assert found and [float(text) for text in found.groups()] == pytest.approx([loss, norm], rel=1e-3)
    assert watched.statistics == [("20", "gradient_overflows% spike")]  # its delayed scales are too small for it
    assert watched.run.losses == plain.run.losses and watched.run.grad_norms == plain.run.grad_norms


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, "--fp8-level O3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        pytest.param(2, "--fp8-level O1 --pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--fp8-level O2", marks=pytest.mark.slow),
        pytest.param(
            2, "--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow
        ),
        pytest.param(
            2, "--fp8-level O1 --num-experts 2 --moe-layer-freq [0,1] --expert-model-parallel-size 2 "
            "--use-distributed-optimizer", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_a_spike_is_skipped_on_every_rank_and_leaves_no_trace(nproc, flags):
    spiking = Spiking(nproc, f"{flags} --fp8-on-spike skip", "20,21", iterations=24)
    assert [step.skipped for step in spiking.run.steps] == [0] * 19 + [1, 1] + [0] * 3
    assert list(spiking.said) == [20, 21]
    assert all(what.endswith("the step is skipped") for what in spiking.said.values())
    for rank in range(nproc):
        assert [spiking.at(n, rank)[0] for n in range(18, 25)] == [True, True, False, False, True, True, True]
        assert [spiking.at(n, rank)[1] > 0 for n in range(18, 25)] == [True, True, False, False, True, True, True]
    assert spiking.run.losses[-1] < spiking.run.losses[18]


def test_the_linears_that_clipped_fall_back_and_return():
    """O1 over two pipeline stages; the spike comes from one linear's input."""
    linear = "decoder.layers.1.mlp.linear_fc2"
    flags = f"--fp8-level O1 --pipeline-model-parallel-size 2 --micro-batch-size 4 {FALLBACK} --fp8-spike-sigma 5"
    spiking = Spiking(2, flags, "20", where=linear, by=1000.0, iterations=37)
    assert {20, 36} <= set(spiking.said)
    names = re.search(r"; to BF16 for 16 calm steps: (.*)", spiking.said[20])[1].split(", ")
    assert linear in names and names != ALL and set(names) < set(ALL)
    assert spiking.said[36] == f"back to FP8: {', '.join(names)}"
    for iteration, out in ((19, []), (20, names), (35, names), (36, []), (37, [])):
        both = [spiking.at(iteration, rank) for rank in (0, 1)]
        assert all(applied and changed for applied, changed, _ in both)
        assert sorted([*both[0][2], *both[1][2]]) == sorted(out)


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(2, "--fp8-level O3 --use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param(2, "--fp8-level O3 --tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(1, "--fp8-level O2 --fp8-ckpt-compact --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", marks=pytest.mark.slow),
        pytest.param(1, "--fp8-level O1 --fp8-recipe tensorwise", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_restart_in_the_middle_of_a_fallback(nproc, flags, tmp_path):
    """Bit for bit the uninterrupted run: losses, weights, states, and the steps at which linears return."""
    flags = f"{flags} {FALLBACK}"

    def train(folder, every, *more):
        return Spiking(
            nproc, flags, "20", "--save", str(tmp_path / folder), "--save-interval", str(every), *more, iterations=40
        )

    whole = train("whole", 40)
    first, rest = train("cut", 26, "--exit-interval", "26"), train("cut", 40, "--load", str(tmp_path / "cut"))
    assert set(whole.said) == {20, 36} and whole.at(26)[2] and not whole.at(36)[2]
    assert {**first.said, **rest.said} == whole.said
    assert all(rest.at(n, rank) == whole.at(n, rank) for n in range(27, 41) for rank in range(nproc))
    assert first.run.grad_norms + rest.run.grad_norms == whole.run.grad_norms
    resumed, expected = first.run.losses + rest.run.losses, list(whole.run.losses)
    del resumed[27], expected[27]  # stock logs the mean of a resumed run's first two losses there
    assert resumed == expected
    same(tensors(tmp_path / "cut", 40), tensors(tmp_path / "whole", 40))


@pytest.mark.slow
def test_checkpoints_with_and_without_a_watch_load_in_runs_of_the_other_kind(tmp_path):
    def train(flags, until, *more):
        save = "--save", str(tmp_path), "--save-interval", str(until), "--exit-interval", str(until)
        return Spiking(1, f"--fp8-level O3 {flags}", "28", *save, *more, iterations=32)

    load = "--load", str(tmp_path)
    train("", 10)
    later = train(FALLBACK, 30, *load)
    assert list(later.said) == [28] and later.at(30)[2]
    plain = train("", 32, *load)
    assert plain.at(31)[2] == [] and len(plain.run.losses) == 2


@pytest.mark.slow
def test_a_fallback_goes_on_in_another_layout(tmp_path):
    flags = f"--fp8-level O1 {FALLBACK}"
    first = Spiking(
        2, f"{flags} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable", "20",
        "--save", str(tmp_path), "--save-interval", "26", "--exit-interval", "26", iterations=40,
    )  # fmt: skip
    out = first.at(26)[2]
    rest = Spiking(
        2, f"{flags} --pipeline-model-parallel-size 2 --use-distributed-optimizer "
        "--dist-ckpt-optim-fully-reshardable", "20", "--load", str(tmp_path), iterations=40,
    )  # fmt: skip
    assert out and first.at(26, rank=1)[2] == out
    assert sorted(rest.at(27)[2] + rest.at(27, rank=1)[2]) == out
    assert list(rest.said) == [36] and rest.at(36)[2] == rest.at(36, rank=1)[2] == []
