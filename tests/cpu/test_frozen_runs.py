"""Megatron's loop with linears that the script has frozen, and adapters beside them (LoRA)."""

import re
from dataclasses import replace

import pytest
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.checkpoint import convert
from megatron_fp8.flags.level import CELLS
from megatron_fp8.tools.perf import activations, job_flags, memory

LORA = "--lr 3e-2 --min-lr 3e-2".split()  # an adapter's rate: the base alone has it fall by nothing
SIX = "--train-iters 6 --lr-decay-iters 10 --micro-batch-size 4".split()
LINE = re.compile("frozen: (.*), bytes changed: (.*), bytes a weight: (.*), sinks: (.*); weight gradients: (.*)")
slow = pytest.mark.slow


def train(base, level, *flags, nproc=1, **kwargs):
    script = str(ROOT / "tests/scripts/adapters.py")
    env = {"PYTHONPATH": script_path(), "BASE": base}
    return run_megatron(nproc, [*TINY_GPT, *SIX, "--fp8-level", level, *flags], script=script, env=env, **kwargs)


def seen(run) -> set[tuple[float, ...]]:
    """(frozen linears, bytes of them that changed, bytes a weight, sinks, weight gradients) of each step and rank."""
    found = {tuple(map(float, match.groups())) for match in map(LINE.search, run.lines) if match}
    assert found
    return found


@pytest.mark.parametrize(
    ("level", "flags", "size"),
    [
        ("O3", [], 1),
        pytest.param("O2", [], 2, marks=slow),
        pytest.param("O1", ["--fp8-recipe", "tensorwise"], 2, marks=slow),
        pytest.param("O3", ["--fp8-activations"], 1, marks=slow),
        pytest.param("O3", ["--fp8-gemm", "bf16"], 1, marks=slow),
        pytest.param("O3", ["--no-fp8-wgrad"], 1, marks=slow),
        pytest.param("O3", ["--fp8-log-interval", "2"], 1, marks=slow),
    ],
)
def test_adapters_train_on_a_frozen_base(level, flags, size):
    run = train("all", level, *LORA, *flags)
    assert seen(run) == {(8, 0, size, 0, 0)}
    assert run.losses[-1] < run.losses[0] - 0.05
    assert any("frozen by the script, without gradients and states: decoder.layers.0-1" in line for line in run.lines)


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_the_base_holds_what_is_counted(level):
    """`megatron-fp8 memory --frozen-base`, against the tensors of a run."""
    run = train("all", level, *LORA)
    held = {line for line in run.lines if line.startswith("base's bytes: ")}
    job = replace(job_flags.job(job_flags.parse([*TINY_GPT, *SIX]).args, 1), frozen_base=True)
    (rank,) = memory.ranks_bytes(job, {cell.name: cell.at(level) for cell in CELLS})
    kinds = [rank.linears[kind] for kind in ("weight", "weight fp8 copy", "transpose scratch")]
    assert held == {f"base's bytes: {' '.join(map(str, [*kinds, rank.others['weight']]))}"}


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_a_layer_keeps_what_is_estimated(level):
    """`megatron-fp8 estimate --frozen-base`, against autograd's tensors; the norms' and the softmax's sums are FP32."""
    auto = "--attention-backend", "auto"
    run = train("all", level, *LORA, *auto)
    (kept,) = {line for line in run.lines if line.startswith("kept: ")}
    flags = job_flags.parse([*TINY_GPT, *SIX, "--fp8-level", level, *auto])
    flags.args.frozen_base = True
    w = job_flags.workload(flags, 1)
    sums = w.tokens * (16 + 4 * w.job.num_attention_heads)
    # On a CPU attention also keeps q, which rotary has copied, and its output in torch's order of heads.
    of_cpu = 2 * 2 * w.tokens * w.output_channels
    assert sum(map(int, kept.split()[1:])) == activations.layer(w) - sums + of_cpu


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_the_rest_is_trained(level):
    """Of eight linears two are frozen: six weight gradients in each of two micro-batches."""
    run = train("part", level)
    assert seen(run) == {(2, 0, 1 if level == "O3" else 2, 0, 12)}
    assert run.losses[-1] < run.losses[0] - 0.2


@pytest.mark.parametrize("level", ["O3", pytest.param("O0", marks=slow)])
def test_the_example(level):
    """examples/lora.py beside any training script, with a level or without: the loss falls, by its adapters alone."""
    script = str(ROOT / "examples/lora.py")
    env = {"PYTHONPATH": str(ROOT)}
    flags = [str(ROOT / "pretrain_gpt_fp8.py"), *TINY_GPT, *SIX, *LORA, "--fp8-level", level]
    run = run_megatron(1, flags, script=script, env=env)
    assert run.losses[-1] < run.losses[0] - 0.02
    frozen = "frozen by the script, without gradients and states: decoder.layers.0-1"
    assert any(frozen in line for line in run.lines) == (level == "O3")


@pytest.mark.parametrize("level", ["O3", pytest.param("O0", marks=slow)])
def test_the_example_trains_layers_that_are_recomputed(level):
    """As those that are not: the frozen embedding asks for no gradient, and Megatron then makes none."""
    script, env = str(ROOT / "examples/lora.py"), {"PYTHONPATH": str(ROOT)}
    flags = [str(ROOT / "pretrain_gpt_fp8.py"), *TINY_GPT, *SIX, *LORA, "--fp8-level", level]
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    again += "--train-iters 3".split()
    kept, recomputed = (run_megatron(1, [*flags, *more], script=script, env=env) for more in ([], again))
    assert recomputed.losses == kept.losses[:3] and recomputed.grad_norms == kept.grad_norms[:3]
    assert min(kept.grad_norms) > 0
    assert not any(CUT_OFF in line for line in recomputed.lines)


CUT_OFF = "layers under --recompute-granularity full get no gradient"


@pytest.mark.parametrize("base", ["all", pytest.param("bare", marks=slow)])
def test_a_frozen_embedding_below_recomputed_layers_is_said(base):
    """`all` has no hook that asks for the gradient; `bare` trains its embedding."""
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    run = train(base, "O3", *LORA, *again)
    said = [line for line in run.lines if CUT_OFF in line]
    assert len(said) == (base == "all") and any(run.grad_norms) == (base == "bare")


@pytest.mark.parametrize(
    "flags",
    [
        "--sequence-parallel --tensor-model-parallel-size 2",
        pytest.param("--num-experts 2", marks=slow),
        pytest.param("--multi-latent-attention", marks=slow),
    ],
)
def test_the_example_says_in_a_line_what_it_does_not_fit(flags):
    script, env = str(ROOT / "examples/lora.py"), {"PYTHONPATH": str(ROOT)}
    with pytest.raises(RunFailed) as failed:
        command = [str(ROOT / "pretrain_gpt_fp8.py"), *TINY_GPT, *SIX, "--fp8-level", "O3", *flags.split()]
        run_megatron(2 if "tensor" in flags else 1, command, script=script, env=env)
    assert failed.value.code == 2 and "Traceback" not in str(failed.value)
    lines = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert lines and all(line.startswith(f"megatron_fp8: {flags.split()[0]}: the adapters of") for line in lines)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple[str, float]:
    """A checkpoint of a whole run without adapters, and the loss that the next step begins with."""
    folder = str(tmp_path_factory.mktemp("base"))
    flags = [*TINY_GPT, "--micro-batch-size", "4", "--use-distributed-optimizer", "--fp8-level", "O3", "--lr", "1e-2"]
    run_megatron(1, [*flags, "--save", folder, "--save-interval", "10"])
    once = ["--finetune", "--train-iters", "1", "--lr-decay-iters", "10"]
    return folder, run_megatron(1, [*flags, "--load", folder, *once]).losses[0]


@pytest.mark.parametrize(
    "layout",
    ["", *(pytest.param(f"--{kind}-model-parallel-size 2", marks=slow) for kind in ("tensor", "pipeline"))],
)
def test_the_examples_adapters_begin_on_a_trained_base(layout, base, tmp_path):
    """They add nothing at first. Their checkpoint goes on in one process, as in the layout that saved it."""
    folder, loss = base
    script, env = str(ROOT / "examples/lora.py"), {"PYTHONPATH": str(ROOT)}
    flags = [str(ROOT / "pretrain_gpt_fp8.py"), *TINY_GPT, *SIX, "--lr", "2e-3", "--fp8-level", "O3"]
    flags += ["--use-distributed-optimizer", "--pretrained-checkpoint", folder]
    flags += ["--dist-ckpt-strictness", "log_unexpected"]
    keep = ["--save", str(tmp_path), "--save-interval", "3", "--load", str(tmp_path)]
    ranks = 2 if layout else 1
    whole = run_megatron(ranks, [*flags, *layout.split(), *keep], script=script, env=env)
    assert whole.losses[0] == pytest.approx(loss, abs=2e-3) and loss < 5.2
    assert whole.losses[-1] < whole.losses[0] - 0.02
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run_megatron(1, [*flags, *keep], script=script, env=env)
    assert len(resumed.losses) == 3
    assert resumed.losses[-1] == pytest.approx(whole.losses[-1], abs=2e-3 if layout else 0)


@slow
@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2"])
def test_merged_adapters_are_the_model_with_them(layout, base, tmp_path):
    """`convert to-hf --merge-adapters`, and back: the loss of a step is the base's with its adapters, within BF16."""
    folder, without = base
    script, env = str(ROOT / "examples/lora.py"), {"PYTHONPATH": str(ROOT)}
    tuned, merged, hf = str(tmp_path / "tuned"), str(tmp_path / "merged"), str(tmp_path / "hf")
    flags = [*TINY_GPT, "--use-distributed-optimizer"]
    adapted = [str(ROOT / "pretrain_gpt_fp8.py"), *flags]
    begin = ["--pretrained-checkpoint", folder, "--dist-ckpt-strictness", "log_unexpected"]
    run_megatron(2 if layout else 1, [*adapted, *SIX, *LORA, *begin, "--fp8-level", "O3", *layout.split(),
                 "--save", tuned, "--save-interval", "6"], script=script, env=env)  # fmt: skip
    convert.to_hf(tuned, hf, vocab_size=256, merge_adapters=True)
    convert.to_megatron(hf, merged)
    once = ["--train-iters", "1", "--lr-decay-iters", "10", "--fp8-level", "O1", "--fp8-gemm", "bf16", "--finetune"]
    beside = run_megatron(1, [*adapted, *once, "--load", tuned], script=script, env=env).losses[0]
    found = run_megatron(1, [*flags, *once, "--load", merged]).losses[0]
    assert found == pytest.approx(beside, abs=2e-3) and abs(found - without) > 0.05


@pytest.mark.parametrize(
    ("layout", "here"),
    [
        pytest.param("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 8, marks=slow),
        pytest.param("--tensor-model-parallel-size 2", 8, marks=slow),
        pytest.param("--pipeline-model-parallel-size 2 --use-distributed-optimizer", 4, marks=slow),
        pytest.param("--fp8-grad-reduce shared --fp8-log-interval 2", 8, marks=slow),
    ],
)
def test_adapters_in_layouts(layout, here):
    alone, run = train("all", "O3", *LORA), train("all", "O3", *LORA, *layout.split(), nproc=2)
    assert seen(run) == {(here, 0, 1, 0, 0)}
    assert run.losses[-1] < run.losses[0] - 0.05
    if "parallel" not in layout:  # what a part of the model draws first differs with the layout
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)


@slow
@pytest.mark.parametrize(
    ("base", "layout", "expected"),
    [
        ("bare", "--tensor-model-parallel-size 2 --sequence-parallel", (8, 0, 1, 0, 0)),
        ("part", "--pipeline-model-parallel-size 2", (2, 0, 1, 0, 4)),  # of the first stage; the second has none
    ],
)
def test_a_part_in_layouts(base, layout, expected):
    run = train(base, "O3", *layout.split(), "--use-distributed-optimizer", nproc=2)
    assert seen(run) == {expected} and run.losses[-1] < run.losses[0] - 0.2


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        ("all", []),
        pytest.param("part", [], marks=slow),
        pytest.param("part", ["--fp8-ckpt-compact"], marks=slow),
        pytest.param("part", ["--fp8-recipe", "tensorwise"], marks=slow),
    ],
)
def test_a_resumed_run_has_the_same_losses(base, flags, tmp_path):
    flags = [*(LORA if base == "all" else []), *flags, "--use-distributed-optimizer"]
    flags += ["--train-iters", "4"]
    whole = train(base, "O3", *flags, "--save", str(tmp_path), "--save-interval", "2", nproc=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(base, "O3", *flags, "--load", str(tmp_path), nproc=2)
    assert len(resumed.losses) == 2 and resumed.grad_norms == whole.grad_norms[2:]
    assert resumed.losses[0] == whole.losses[2]  # stock logs the mean of the first two losses next


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none --fp8-experts"


@pytest.mark.parametrize(
    ("base", "level", "nproc", "layout"),
    [
        ("expert", "O3 --moe-grouped-gemm", 2, "--expert-model-parallel-size 2"),
        # Each linear has an adapter.
        pytest.param("all", "O3 --moe-grouped-gemm", 2, "--expert-model-parallel-size 2", marks=slow),
        pytest.param("expert", "O2", 1, "", marks=slow),
        # A rank with one expert, and that is frozen.
        pytest.param("first-rank", "O3", 4, "--expert-model-parallel-size 4", marks=slow),
    ],
)
def test_experts_of_which_some_are_frozen_go_on(base, level, nproc, layout, tmp_path):
    """A layer's experts are one tensor in a checkpoint: it had a hole, and the first save ended in a traceback."""
    flags = [*f"{EXPERTS} {layout} --moe-token-dispatcher-type alltoall --train-iters 4".split()]
    flags += ["--use-distributed-optimizer"]
    whole = train(base, *level.split(), *flags, "--save", str(tmp_path), "--save-interval", "2", nproc=nproc)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(base, *level.split(), *flags, "--load", str(tmp_path), nproc=nproc)
    assert resumed.losses[0] == whole.losses[2] and resumed.grad_norms == whole.grad_norms[2:]
    assert len(resumed.losses) == 2


def test_adapters_beside_experts_that_are_trained_are_not_left_out():
    """Experts with adapters run one by one: a product of all experts would not see an adapter."""
    flags = f"{EXPERTS} --moe-grouped-gemm --train-iters 1".split()
    without = run_megatron(1, [*TINY_GPT, *SIX, "--fp8-level", "O3", *flags]).losses
    with_adapters = train("beside", "O3", *flags).losses
    assert abs(with_adapters[0] - without[0]) > 1e-3  # noise alone: 1e-4


@slow
def test_a_checkpoint_of_a_frozen_base_loads_as_any(tmp_path):
    """It has the weights in BF16, and nothing else of what is frozen."""
    ends = "--split 8,1,1 --eval-iters 1".split()
    frozen = train("bare", "O3", *ends, "--save", str(tmp_path), "--save-interval", "6")
    flags = [*TINY_GPT, *SIX, *ends, "--fp8-level", "O3", "--load", str(tmp_path)]
    again = run_megatron(1, [*flags, "--skip-train"])
    assert again.validation_losses[0] == pytest.approx(frozen.validation_losses[0], abs=2e-3)
    trained = run_megatron(1, [*flags, "--finetune"])
    assert trained.losses[0] == pytest.approx(frozen.losses[-1], abs=0.1)
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*flags, "--train-iters", "8"])
    assert failed.value.code == 2


@slow
def test_a_compact_checkpoint_knows_what_was_frozen(tmp_path):
    compact = ["--fp8-ckpt-compact", "--save", str(tmp_path), "--save-interval", "3"]
    train("part", "O3", *compact)
    with pytest.raises(RunFailed) as failed:
        run_megatron(1, [*TINY_GPT, *SIX, "--fp8-level", "O3", "--load", str(tmp_path), "--train-iters", "8"])
    assert failed.value.code == 2
