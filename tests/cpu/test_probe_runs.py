"""The probe and the invariants on runs of Megatron's real loop."""

import json
import math

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, start_forked

from megatron_fp8.cli import main
from megatron_fp8.tools.lab.trial import invariants
from megatron_fp8.tools.lab.trial.invariants import CHECKS, Skipped, Trials

GEMMS, OPERANDS = ("fprop", "dgrad", "wgrad"), ("activation", "weight", "gradient")
NAMES = [
    f"decoder.layers.{layer}.{linear}"
    for layer in (0, 1)
    for linear in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"


class Probed:
    """A probed run: its exact losses and norms, its lines, and the results {step: {linear: ...}}."""

    def __init__(self, folder, nproc, flags, steps):
        flags = [*TINY_GPT, *flags.split(), "--fp8-probe-step", steps, "--fp8-probe-dir", str(folder)]
        run = run_megatron(nproc, [*flags, "--fp8-log-exact"])
        self.exact = exact(run)
        self.lines = [line for line in run.lines if "largest fprop error" in line]
        files = {int(step): folder / f"step-{step}.json" for step in steps.split(",")}
        assert sorted(folder.iterdir()) == sorted(files.values())
        self.linears = {step: json.loads(file.read_text())["linears"] for step, file in files.items()}

    def all_of(self, step, gemm, number):
        assert self.linears[step]
        return [linear[gemm][number] for linear in self.linears[step].values()]


def exact(run):
    found = [line for line in run.lines if "exact lm loss" in line]
    assert found
    return found


def plain(nproc, flags):
    return exact(run_megatron(nproc, [*TINY_GPT, *flags.split(), "--fp8-log-exact"]))


@pytest.fixture(scope="module")
def o1(tmp_path_factory):
    return Probed(tmp_path_factory.mktemp("probe"), 1, "--fp8-level O1 --train-iters 3", "1,3")


def test_o1(o1):
    assert all(list(found) == NAMES for found in o1.linears.values())
    assert [line.split(":")[0] for line in o1.lines] == ["[fp8] iteration 1", "[fp8] iteration 3"]
    for step, found in o1.linears.items():
        assert all(0.03 < error < 0.045 for error in o1.all_of(step, "fprop", "error"))  # two E4M3 operands
        assert all(0.045 < error < 0.07 for g in ("dgrad", "wgrad") for error in o1.all_of(step, g, "error"))
        assert all(0.98 < gain < 1.01 for gemm in GEMMS for gain in o1.all_of(step, gemm, "gain"))
        for linear in found.values():
            assert [linear[operand]["format"] for operand in OPERANDS] == ["E4M3", "E4M3", "E5M2"]
            assert all(0 <= linear[operand]["underflow"] < 0.05 for operand in OPERANDS)
            assert all(2.5 < linear[operand]["kurtosis"] < 200 for operand in OPERANDS)
    # in the first step every scale is made for its micro-batch; in the third the scales are the second's
    assert max(o1.all_of(1, "activation", "saturation")) == 0 < max(o1.all_of(3, "activation", "saturation"))
    first, third = (o1.linears[step][NAMES[0]]["activation"] for step in (1, 3))
    assert first["scale_min"] < first["scale_max"] and third["scale_min"] == third["scale_max"]


def test_probing_changes_nothing(o1):
    assert o1.exact == plain(1, "--fp8-level O1 --train-iters 3")


def test_data_parallel_ranks_add_up(o1, tmp_path):
    """The first step of two ranks has one rank's micro-batches, but the loss is divided by two of them, not by four."""
    two = Probed(tmp_path, 2, "--fp8-level O1 --train-iters 1 --lr-warmup-iters 0", "1")
    for name, linear in o1.linears[1].items():
        for part in (*GEMMS, *OPERANDS):
            twice = {"amax": 2, "scale_min": 0.5, "scale_max": 0.5} if part == "gradient" else {}
            for number, value in linear[part].items():
                expected = value if number == "format" else pytest.approx(value * twice.get(number, 1), rel=1e-5)
                assert two.linears[1][name][part][number] == expected, (name, part, number)


def test_the_gain_of_truncation(tmp_path):
    found = Probed(tmp_path, 1, "--fp8-emulate E8M3:truncate --train-iters 1 --lr-warmup-iters 0", "1")
    assert all(gain == pytest.approx(0.9195, abs=0.012) for g in GEMMS for gain in found.all_of(1, g, "gain"))
    assert "worst gain 0.9" in found.lines[0]


@pytest.mark.slow
def test_the_gain_of_rounding_to_nearest(tmp_path):
    found = Probed(tmp_path, 1, "--fp8-emulate E8M3 --train-iters 1 --lr-warmup-iters 0", "1")
    assert all(gain == pytest.approx(0.9981, abs=0.01) for g in GEMMS for gain in found.all_of(1, g, "gain"))


def test_o3_has_the_rounding_of_its_weights_too(tmp_path):
    """E4M3 weights, and activations gathered in E4M3 under sequence parallelism."""
    found = Probed(tmp_path, 2, f"--fp8-level O3 --train-iters 2 --lr-warmup-iters 0 {TENSOR_PARALLEL}", "2")
    assert list(found.linears[2]) == NAMES
    assert all(0.03 < error < 0.045 for error in found.all_of(2, "fprop", "error"))
    assert all(0.04 < error < 0.075 for g in ("dgrad", "wgrad") for error in found.all_of(2, g, "error"))
    assert all(math.frexp(scale)[0] == 0.5 for scale in found.all_of(2, "weight", "scale_max"))  # powers of two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, f"--fp8-level O3 {TENSOR_PARALLEL}"),
        (2, f"--fp8-level O1 {TENSOR_PARALLEL}"),
        (2, f"--fp8-level O1 --no-fp8-wgrad --fp8-recipe tensorwise {TENSOR_PARALLEL}"),
        (2, f"--fp8-emulate weight=E4M3,gradient=E5M2:stochastic:tensor {TENSOR_PARALLEL}"),
        (2, "--fp8-level O3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, "--fp8-level O2 --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        (1, "--fp8-level O2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)
def test_probing_changes_nothing_whatever_the_layout(tmp_path, nproc, flags):
    flags += " --train-iters 3"
    found = Probed(tmp_path, nproc, flags, "2")
    assert found.exact == plain(nproc, flags)
    layers = 4 if "--num-layers 4" in flags else 2
    assert len(found.linears[2]) == 4 * layers and list(found.linears[2])[:8] == NAMES
    assert all(error is not None for gemm in GEMMS for error in found.all_of(2, gemm, "error"))


def test_the_verb_on_a_checkpoint(tmp_path, monkeypatch, capsys):
    start_forked(monkeypatch)
    flags = [*TINY_GPT, "--fp8-level", "O2"]
    saved = str(tmp_path / "saved")
    run_megatron(1, [*flags, "--save", saved, "--save-interval", "2", "--exit-interval", "2"])
    result = tmp_path / "found.json"
    load = ["--load", saved, "--save", saved, "--save-interval", "1"]  # the probe must not save
    command = ["--", str(ROOT / "pretrain_gpt_fp8.py"), *flags, *load]
    assert main(["lab", "probe", "--json", str(result), "--sort", "error", *command]) == 0
    found = json.loads(result.read_text())
    lines = capsys.readouterr().out.splitlines()
    assert found["step"] == 3 and lines[0] == "step 3" and list(found["linears"]) == NAMES
    worst = max(NAMES, key=lambda name: max(found["linears"][name][gemm]["error"] for gemm in GEMMS))
    assert lines[3].split()[0] == worst
    assert (tmp_path / "saved/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.fixture
def trials(tmp_path, monkeypatch):
    def trials(flags, script="pretrain_gpt_fp8.py", processes=1):
        start_forked(monkeypatch)
        return Trials([str(ROOT / script), *TINY_GPT, *flags.split()], processes, 900, 1, 4, tmp_path)

    return trials


@pytest.mark.slow
def test_all_invariants_hold_at_o2(trials, capsys):
    assert invariants.report(trials("--fp8-level O2")) == 0
    assert [line[17:24].strip() for line in capsys.readouterr().out.splitlines()] == [
        *("PASS", "PASS", "skipped", "PASS", "skipped", "PASS"),
    ]


def test_a_planted_bug_fails(trials):
    found = CHECKS["recompute"](trials("--fp8-level O2", "tests/scripts/broken_recompute.py"))
    assert not found.passed and found.difference > 1e-4


@pytest.mark.slow
def test_a_planted_micro_batch_bug_fails_though_the_twin_has_it(trials):
    """With 4 micro-batches gradients have 4/5 of their size, with 8 they have 8/9."""
    found = CHECKS["micro-batches"](trials("--fp8-level O2", "tests/scripts/broken_micro_batches.py"))
    assert not found.passed and found.name == "grad_norm" and found.difference > 1.5 * found.limit > 0


@pytest.mark.slow
def test_micro_batches_of_one_with_dropout_at_the_first_steps(trials):
    runs = trials("--fp8-level O2 --micro-batch-size 1 --attention-dropout 0.1 --hidden-dropout 0.1")
    runs.steps = 1
    found = CHECKS["micro-batches"](runs)
    assert found.passed, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        (f"--fp8-level O3 {TENSOR_PARALLEL}", {"overlap"}),
        ("--fp8-level O3 --use-distributed-optimizer", {"tp gather"}),
        ("--fp8-emulate E4M3:stochastic:tensor", {"tp gather"}),
    ],
)
def test_all_invariants_hold(trials, flags, left_out):
    runs, skipped = trials(flags, processes=2), set()
    for name, check in CHECKS.items():
        try:
            found = check(runs)
            assert found.passed, (name, str(found))
        except Skipped:
            skipped.add(name)
    assert skipped == left_out
