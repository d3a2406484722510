"""megatron_fp8.enable(): a trainer of megatron.core alone, without Megatron's parser (examples/core_loop.py)."""

import os
import re
import subprocess
import sys

import pytest
from launch import ROOT, RunFailed, forked

LOOP = str(ROOT / "examples/core_loop.py")
BY_HAND = str(ROOT / "tests/scripts/core_loop_by_hand.py")
TOOLS = f"{ROOT}:{ROOT / 'tools'}"
EXACT = "O1 gemm=bf16 grad_accum=fp32 grad_reduce=fp32"


@pytest.fixture
def trained(tmp_path):
    """trained(ranks, words): the losses of ten steps, the gradient norms, and our lines."""

    def trained(ranks: int, words: str, loop: str = LOOP, **env: str) -> tuple[list[float], list[float], list[str]]:
        env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": TOOLS}
        lines = forked(ranks, [loop, *words.split()], tmp_path / "log", timeout=200, env=env)
        steps = [re.fullmatch(r"step \d+: loss (\S+), gradient norm (\S+), made", line) for line in lines]
        losses, norms = zip(*[(float(step[1]), float(step[2])) for step in steps if step], strict=True)
        assert len(losses) == 10
        return list(losses), list(norms), [line for line in lines if line.startswith("[fp8] ")]

    return trained


def test_with_bf16_gemms_and_fp32_gradients_it_trains_as_stock(trained):
    """Within the difference of two attention kernels and norms; then rounding grows, as in any two such runs."""
    stock, stock_norms, said = trained(1, "")
    assert not said
    ours, norms, said = trained(1, EXACT)
    assert said and ours != stock
    assert ours[:2] == pytest.approx(stock[:2], abs=2e-3) and norms[0] == pytest.approx(stock_norms[0], rel=1e-2)
    assert ours[-1] == pytest.approx(stock[-1], rel=0.2)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_o3_trains(trained, ranks):
    stock, *_ = trained(ranks, "")
    ours, _, said = trained(ranks, "O3 bf16_layers=*.0.mlp.linear_fc1")
    assert any("O3: the GEMMs of 7 of 8 linears are in FP8" in line for line in said), said
    assert any("weight gradients BF16, summed" in line for line in said), said
    assert stock[0] > 4 and ours[0] == pytest.approx(stock[0], abs=0.05)
    assert ours[-1] < 0.6 * ours[0] and ours[-1] == pytest.approx(stock[-1], rel=0.4)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_calls_finalize_model_grads_itself(trained, ranks):
    """It trains as through its configuration; the number of tokens divides a sum as the mean does."""
    losses, norms, _ = trained(ranks, "O3")
    assert trained(ranks, "O3", BY_HAND)[:2] == (losses, norms)
    by_token, norms_by_token, _ = trained(ranks, "O3 tokens", BY_HAND)
    assert by_token[:3] == pytest.approx(losses[:3], rel=0.02) and by_token[0] == losses[0]
    assert norms_by_token[0] == pytest.approx(norms[0], rel=0.01)


@pytest.mark.parametrize("way", ["p2p", pytest.param("a2a", marks=pytest.mark.slow)])
def test_two_ranks_share_every_sequence(trained, way):
    """Context parallelism of a trainer's configuration: one rank's losses; then rounding grows."""
    alone, norms, _ = trained(1, EXACT)
    shared, shared_norms, _ = trained(2, EXACT, str(ROOT / "tests/scripts/core_loop_of_context.py"), WAY=way)
    assert shared[:2] == pytest.approx(alone[:2], abs=2e-3) and shared != alone
    assert shared_norms[0] == pytest.approx(norms[0], rel=2e-3) and shared[-1] < 0.6 * shared[0]


def test_gradients_that_nobody_sums(trained):
    with pytest.raises(RunFailed, match=re.escape("call the model's config.finalize_model_grads_func([model]) after")):
        trained(1, "O3 unsummed", BY_HAND)


def test_a_step_that_no_one_begins(trained):
    with pytest.raises(RunFailed, match=re.escape("begin each step with optimizer.zero_grad(), and sum the gradients")):
        trained(1, "O3 unbegun", BY_HAND)


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=pytest.mark.slow)])
def test_an_adapter_gets_the_norms_output(trained, level, tmp_path):
    """Ten steps of two micro-batches, in which two linears of two layers hold their norm."""
    losses, *_ = trained(1, level, str(ROOT / "tests/scripts/core_loop_of_adapters.py"))
    assert losses[-1] < losses[0] - 0.02
    assert "adapters that read a norm's output: 80 of 80" in (tmp_path / "log").read_text()


EXPERTS = str(ROOT / "tests/scripts/core_loop_of_experts.py")


@pytest.fixture
def experts(tmp_path):
    """experts(ranks, words): the losses of ten steps of the example with experts, and its lines."""

    def experts(ranks: int, words: str) -> tuple[list[float], list[str]]:
        env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": TOOLS}
        lines = forked(ranks, [EXPERTS, *words.split()], tmp_path / "log", timeout=200, env=env)
        return [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", "\n".join(lines))], lines

    return experts


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_are_owned_if_it_is_asked_for(experts, ranks):
    """Of two layers: two linears of attention and two of each of four experts."""
    bf16, lines = experts(ranks, "O3")
    assert any("O3: the GEMMs of 4 of 4 linears are in FP8" in line for line in lines), lines
    owned, lines = experts(ranks, "O3 owned")
    assert any("O3: the GEMMs of 20 of 20 linears are in FP8" in line for line in lines), lines
    assert owned != bf16 and owned[0] == pytest.approx(bf16[0], abs=0.05) and owned[-1] < 0.6 * owned[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dense", "TransformerConfig.num_moe_experts: there are no experts; leave experts out of enable()"),
        ("biases", "TransformerConfig.add_bias_linear True: experts with biases; set it to False"),
        ("grad_reduce=shared", "--fp8-experts: --fp8-grad-reduce shared has no scale for an expert without a token"),
    ],
)
def test_experts_that_cannot_be_owned(experts, words, said):
    with pytest.raises(RunFailed, match=re.escape(said)):
        experts(1, f"O1 owned {words}")


def test_the_example_says_that_it_needs_a_launcher():
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, LOOP, "O3"], capture_output=True, text=True, env=clean)
    assert done.returncode == 1 and done.stderr.startswith("core_loop.py: no launcher started this; use torchrun")
    assert len(done.stderr.splitlines()) == 1
