"""O1 through Megatron's own training loop: every recipe and layout trains, close to stock's BF16."""

import pytest
from launch import ROOT
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron, script_path

FEW = [*TINY_GPT, *SIX_STEPS, "--global-batch-size", "4"]  # two micro-batches, or one on each of two ranks
O1 = ["--fp8-level", "O1"]
THREE = ["--train-iters", "3"]  # of these steps


@pytest.fixture(scope="module")
def stock():
    return run_megatron(1, FEW)


def close_to(run, stock, steps=6):
    assert stock.losses[-1] < stock.losses[0] - 0.25
    assert len(run.losses) == steps
    assert run.losses == pytest.approx(stock.losses[:steps], abs=4e-3)
    assert run.grad_norms == pytest.approx(stock.grad_norms[:steps], abs=2e-2)
    assert run.losses != stock.losses[:steps]  # something was quantised
    assert sum(step.skipped for step in run.steps) == 0


nightly = pytest.mark.slow
VARIANTS = [
    pytest.param(1, "", id="one process"),
    pytest.param(2, "", id="all-reduce", marks=nightly),
    pytest.param(
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="distributed optimizer"
    ),
    pytest.param(1, "--fp8-recipe tensorwise", id="just-in-time scaling"),
    pytest.param(
        2, "--fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-margin 1", id="history", marks=nightly
    ),
    pytest.param(1, "--fp8-format e4m3", id="E4M3 everywhere", marks=nightly),
    pytest.param(1, "--no-fp8-wgrad", id="BF16 wgrad"),
    pytest.param(1, "--num-layers 3 --first-last-layers-bf16", id="first and last layer BF16", marks=nightly),
    pytest.param(1, "--attention-backend auto", id="torch attention", marks=nightly),
]


@pytest.mark.parametrize(("nproc", "flags"), VARIANTS)
def test_o1_trains_like_stock(nproc, flags, stock):
    if "--num-layers" in flags:
        stock = run_megatron(1, [*FEW, "--num-layers", "3"])
    close_to(run_megatron(nproc, [*FEW, *flags.split(), *O1]), stock)


def test_tensor_and_sequence_parallel():
    """Stock's torch norm refuses sequence parallelism; the reference is tensor parallelism without it.

    A level without it: test_layouts.py.
    """
    tp = [*FEW, "--micro-batch-size", "4", "--tensor-model-parallel-size", "2"]
    close_to(run_megatron(2, [*tp, "--sequence-parallel", *O1]), run_megatron(2, tp))


@nightly  # test_layouts.py has stages at O1 for every change
def test_pipeline_parallel():
    pp = [*FEW, "--pipeline-model-parallel-size", "2"]
    close_to(run_megatron(2, [*pp, *O1]), run_megatron(2, pp))


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        pytest.param("--keep-fp8-transpose-cache", marks=nightly),
    ],
)
def test_what_trades_memory_for_time_changes_no_digit(flags):
    plain = run_megatron(1, [*FEW, *O1])
    traded = run_megatron(1, [*FEW, *O1, *THREE, *flags.split()])
    assert traded.losses == plain.losses[:3] and traded.grad_norms == plain.grad_norms[:3]


def test_evaluation_in_the_middle_changes_no_step():
    data = "--split 80,20,0 --eval-iters 2".split()
    flags = [*FEW, *O1, *THREE, *data, "--use-distributed-optimizer"]
    plain, evaluated = (run_megatron(2, [*flags, *often]) for often in ([], ["--eval-interval", "1"]))
    assert evaluated.losses == plain.losses
    assert len(evaluated.validation_losses) > 2
    assert evaluated.validation_losses[2] < evaluated.validation_losses[0]


def test_ranks_and_accumulation_change_only_the_wire():
    """The same global batch on 1 and 2 ranks: the gradients differ by one FP8 rounding on the wire."""
    few = [*TINY_GPT, *SIX_STEPS, *O1, "--train-iters", "5"]  # two micro-batches on each of two ranks
    one = run_megatron(1, [*few, *"--fp8-grad-accum fp32 --fp8-grad-reduce fp32".split()])
    two = run_megatron(2, [*few, *"--fp8-grad-accum fp32 --fp8-grad-reduce fp32".split()])
    # The order of a sum, until it tips an FP8 rounding: what is cast is not on BF16's grid, which hid differences.
    assert len(two.losses) == 5 and two.losses == pytest.approx(one.losses, abs=1e-5)
    wire = run_megatron(2, few)
    assert wire.losses != two.losses and wire.losses == pytest.approx(two.losses, abs=1e-3)


def test_a_command_for_transformer_engine_and_apex_runs_unchanged(stock):
    """None of the flags that stock needs where neither is installed."""
    te_only = [f for f in FEW if not f.startswith("--no-") and f not in ("--transformer-impl", "local")]
    run = run_megatron(1, [*te_only, *O1, *THREE])
    close_to(run, stock, 3)
    assert sum("[fp8] " in line and "rope-fusion" in line for line in run.lines) == 1


def test_gpt2_style_model():
    dropped = ("--disable-bias-linear", "--swiglu", "--untie-embeddings-and-output-weights")
    flags = "--normalization LayerNorm --position-embedding-type learned_absolute --num-query-groups 2 "
    flags += "--group-query-attention --apply-layernorm-1p --qk-layernorm"
    run = run_megatron(2, [*(f for f in FEW if f not in dropped), *flags.split(), *O1])
    assert run.losses[-1] < run.losses[0] - 0.15


def test_experts_stay_in_bf16():
    run = run_megatron(1, [*FEW, *"--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1]".split(), *O1])
    assert run.losses[-1] < run.losses[0] - 0.15
    assert sum("[fp8] " in line and "experts" in line for line in run.lines) == 1


def test_model_provider_scripts_work(stock):
    script = str(ROOT / "tests/scripts/legacy_gpt.py")
    tools = {"PYTHONPATH": script_path()}
    new = run_megatron(1, [*FEW, *O1, *THREE], script=["-m", "megatron_fp8", script], env=tools)
    close_to(new, stock, 3)


def test_the_log_says_what_is_held_and_sent():
    two = "--global-batch-size 8".split()  # micro-batches on each rank
    run = run_megatron(2, [*FEW, *two, *O1, "--use-distributed-optimizer", "--train-iters", "2"])
    (at,) = [i for i, line in enumerate(run.lines) if "[fp8] O1: " in line]
    assert run.lines[at].endswith(
        "[fp8] O1: the GEMMs of 8 of 8 linears are in FP8 (E4M3 and E5M2, delayed scales, by this package's emulation "
        "on the CPU); weights BF16; moments FP32 and FP32; masters FP32; weight gradients BF16, summed over ranks in "
        "FP8 blocks"
    )
    assert at < next(i for i, line in enumerate(run.lines) if " iteration        1/" in line)
    lines = [line for line in run.lines if "bytes a parameter on this rank" in line or "MB sent a step" in line]
    assert len(lines) == 2 and "weight fp8 copy" in lines[0] and "grad_reduce" in lines[1]
    assert sum("the linears' weights, gradients and states" in line for line in run.lines) == 1
