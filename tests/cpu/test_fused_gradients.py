"""Embedding and head add their gradients to main_grad (layers/embedding.py, gemm/fused_wgrad.py): Megatron's loop
learns the same but for the roundings to BF16 that are gone, tied and untied, however the ranks are laid out."""

import pytest
from launch import ROOT
from megatron_runs import TINY_GPT, run_megatron, script_path

FEW = "--train-iters 4 --micro-batch-size 4".split()
UNTIED = [flag for flag in TINY_GPT if flag != "--no-gradient-accumulation-fusion"] + FEW
TIED = [flag for flag in UNTIED if flag != "--untie-embeddings-and-output-weights"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("base", "ranks", "flags"),
    [
        (TIED, 1, "--position-embedding-type learned_absolute"),
        pytest.param(UNTIED, 1, "--mtp-num-layers 1", marks=SLOW),
        pytest.param(
            TIED, 2, "--mtp-num-layers 1 --mtp-loss-scaling-factor 100 --pipeline-model-parallel-size 2", marks=SLOW
        ),
        pytest.param(UNTIED, 1, "", marks=SLOW),
        pytest.param(TIED, 1, "--fp8-lm-head", marks=SLOW),
        pytest.param(TIED, 2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=SLOW),
        pytest.param(TIED, 2, "--pipeline-model-parallel-size 2", marks=SLOW),
        pytest.param(UNTIED, 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", marks=SLOW),
        pytest.param(TIED, 2, "--use-distributed-optimizer --overlap-grad-reduce", marks=SLOW),
    ],
)
def test_it_learns_the_same(base, ranks, flags):
    flags = [*base, "--fp8-level", "O3", *flags.split()]
    script = str(ROOT / "tests/scripts/fused_weight_gradients.py")
    run = run_megatron(ranks, flags, script=script, env={"PYTHONPATH": script_path()})
    stock = run_megatron(ranks, flags)
    assert run.losses == pytest.approx(stock.losses, rel=1e-4)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=3e-3, abs=2e-3)
    assert run.losses[0] == stock.losses[0] and run.losses != stock.losses
    added = [int(line.split()[1]) for line in run.lines if line.startswith("added ")]
    micro_batches = 4 * 2 // (2 if "distributed" in " ".join(flags) else 1)
    # of the tables, in a micro-batch
    reads = 2 if "--mtp-num-layers" in flags or "learned_absolute" in flags else 1
    stages = 2 if "--pipeline-model-parallel-size" in flags else 1
    if stages == 2 and reads == 2:  # one on each
        assert added == [micro_batches] * 2
    else:
        assert sorted(added) == sorted([reads * micro_batches] * (ranks // stages) + [0] * (ranks - ranks // stages))


@SLOW
def test_nothing_is_deferred():
    """Stock would keep inputs of all column-parallel linears, where an LM head alone has a list for them."""
    flags = [*UNTIED, *"--fp8-level O3 --pipeline-model-parallel-size 2".split()]
    script, env = str(ROOT / "tests/scripts/fused_weight_gradients.py"), {"PYTHONPATH": script_path()}
    deferred = run_megatron(2, [*flags, "--defer-embedding-wgrad-compute"], script=script, env=env)
    assert sum("defer-embedding-wgrad-compute: switched off" in line for line in deferred.lines) == 1
    assert deferred.losses == run_megatron(2, flags, script=script, env=env).losses


def test_an_emulated_tied_head_leaves_it_to_autograd():
    """Its gradient comes in autograd, so that the embedding's must too."""
    flags = [*TIED, "--fp8-level", "O1", "--fp8-emulate", "E8M7", "--fp8-emulate-lm-head"]
    script = str(ROOT / "tests/scripts/fused_weight_gradients.py")
    run = run_megatron(1, flags, script=script, env={"PYTHONPATH": script_path()})
    assert run.losses == pytest.approx(run_megatron(1, flags).losses, rel=1e-4)
    assert "added 0" in run.lines
