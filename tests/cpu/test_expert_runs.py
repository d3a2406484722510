"""Mixtures of experts in Megatron's real loop at a level: shared experts are linears of the engine, and with
--fp8-experts routed ones are too."""

import json
import re

import pytest
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path
from torch.distributed.checkpoint import FileSystemReader

from megatron_fp8.checkpoint import convert
from megatron_fp8.flags.level import CELLS
from megatron_fp8.tools.perf.job import Job
from megatron_fp8.tools.perf.memory import ranks_bytes

MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none"
SHARED = f"{MOE} --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 64"
FP8_OFF = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"


def train(flags: str, ranks: int = 1, steps: int = 4):
    few = ["--train-iters", str(steps), "--lr-decay-iters", "10", "--fp8-log-exact"]
    run = run_megatron(ranks, [*TINY_GPT, *few, *flags.split()], timeout=300)
    assert len(run.losses) == steps
    return run


def exact(run, what: str = "lm loss") -> list[str]:
    """With all digits."""
    return re.findall(rf"exact {what} ([^\s;]+)", "\n".join(run.lines))


def linears(run) -> tuple[int, int]:
    """(in FP8, all) of the level's line."""
    return tuple(map(int, re.search(r"the GEMMs of (\d+) of (\d+) linears", "\n".join(run.lines)).groups()))


def test_shared_experts_are_linears_and_train_as_stocks():
    """Two layers of two attention linears, a dense MLP's two, a shared expert's two."""
    assert linears(train(f"{SHARED} --fp8-level O3", steps=1)) == (8, 8)
    stock, ours = train(SHARED, steps=2), train(f"{SHARED} {FP8_OFF}", steps=2)
    assert exact(ours)[:2] == exact(stock)[:2] != []


@pytest.mark.slow
def test_a_shared_expert_of_stocks_is_loaded_and_goes_back(tmp_path):
    """Stock saves two steps, a level goes on, and its weights are stock's again."""
    save = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save-interval 2"
    whole = train(f"{SHARED} {save} --save {tmp_path / 'stock'}", steps=4)
    ours = f"{SHARED} {FP8_OFF} --use-distributed-optimizer --load {tmp_path / 'stock'} --ckpt-step 2"
    again = run_megatron(1, [*TINY_GPT, *f"{ours} --train-iters 4 --lr-decay-iters 10".split(), "--fp8-log-exact"])
    assert exact(again)[0] == exact(whole)[2] and len(again.losses) == 2


@pytest.mark.parametrize("level", ["O3", pytest.param("O2", marks=pytest.mark.slow)])
def test_a_shared_expert_with_a_gate_is_saved_and_goes_on(level, tmp_path):
    """Its module asks for its state twice, and keeps the first."""
    flags = f"{SHARED} --moe-shared-expert-gate --fp8-level {level} --use-distributed-optimizer --global-batch-size 4"
    whole = train(f"{flags} --save {tmp_path} --save-interval 2")
    few = f"{flags} --train-iters 4 --lr-decay-iters 10 --fp8-log-exact --load {tmp_path} --ckpt-step 2"
    again = run_megatron(1, [*TINY_GPT, *few.split()])
    assert exact(again) == exact(whole)[2:] and len(again.losses) == 2


EARLIER = "tests/scripts/stocks_shared_experts.py"


def earlier_then_now(level: str, tmp_path, ranks: int = 1):
    """(A run of an earlier version that saves after two steps, a function that goes on from there)"""
    flags = f"{SHARED} --fp8-level {level} --train-iters 4 --lr-decay-iters 10"
    saving = [*TINY_GPT, *flags.split(), "--save", str(tmp_path), "--save-interval", "2"]
    whole = run_megatron(ranks, saving, script=EARLIER, env={"PYTHONPATH": script_path()})
    assert linears(whole) == (6, 6)
    loading = [*TINY_GPT, *flags.split(), "--load", str(tmp_path), "--ckpt-step", "2"]
    return whole, lambda more="": run_megatron(ranks, [*loading, *more.split()])


@pytest.mark.parametrize(
    ("level", "ranks"),
    [
        ("O3 --use-distributed-optimizer", 1),
        pytest.param("O1 --use-distributed-optimizer", 2, marks=pytest.mark.slow),
        pytest.param("O2 --use-distributed-optimizer --pipeline-model-parallel-size 2", 2, marks=pytest.mark.slow),
        pytest.param("O3 --fp8-recipe tensorwise", 1, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_from_before_shared_experts_were_linears_goes_on(level, ranks, tmp_path):
    """Masters and moments are found; FP8 scales begin anew, which a line says."""
    whole, go_on = earlier_then_now(level, tmp_path, ranks)
    again = go_on()
    assert sum("shared experts were not a level's linears yet" in line for line in again.lines) == 1
    assert linears(again) == (8, 8)
    assert again.losses[0] == pytest.approx(whole.losses[2], abs=5e-4)
    assert again.grad_norms == pytest.approx(whole.grad_norms[2:], rel=0.01)


@pytest.mark.slow
def test_a_compact_checkpoint_from_before_says_what_to_do(tmp_path):
    whole, go_on = earlier_then_now("O3 --use-distributed-optimizer --fp8-ckpt-compact", tmp_path)
    with pytest.raises(RunFailed, match=r"saved for one layout, when shared experts were not .* add --no-load-optim"):
        go_on()
    assert go_on("--no-load-optim").losses[0] == pytest.approx(whole.losses[2], abs=2e-3)


OWNED = f"{MOE} --fp8-experts"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
ZERO = "--use-distributed-optimizer"


QUICK = [(2, f"{ZERO} --expert-model-parallel-size 2 {ALL_TO_ALL}")]
NIGHTLY = [
    (1, ""),
    (2, "--expert-model-parallel-size 2"),
    (1, f"{ALL_TO_ALL} --moe-expert-capacity-factor 0.5"),
    (1, "--moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type aux_loss"),
    (1, "--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input"),
    (1, "--moe-grouped-gemm --moe-shared-expert-intermediate-size 64"),
    (1, "--moe-layer-freq [0,1] --recompute-granularity selective --recompute-modules moe"),
    (4, f"{ZERO} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        "--pipeline-model-parallel-size 2"),
    (2, "--pipeline-model-parallel-size 2 --moe-layer-freq [0,1]"),  # the first stage has no expert
    (4, f"{ZERO} --overlap-grad-reduce --overlap-param-gather --pipeline-model-parallel-size 2 --moe-layer-freq [0,1] "
        f"--expert-model-parallel-size 2 {ALL_TO_ALL}"),
    (1, "--moe-z-loss-coeff 0.1 --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type seq_aux_loss"),
    (2, f"{ZERO} --moe-z-loss-coeff 0.1 --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type global_aux_loss "
        f"--expert-model-parallel-size 2 {ALL_TO_ALL}"),
    (1, "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"),
    (4, f"{ZERO} --expert-model-parallel-size 4 {ALL_TO_ALL}"),  # one expert a rank, all ranks
    (1, f"{ALL_TO_ALL} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"),
    (1, f"{ALL_TO_ALL} --moe-expert-capacity-factor 0.25 --moe-token-drop-policy position --moe-layer-freq 2"),
]  # fmt: skip


CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in NIGHTLY)]


@pytest.mark.parametrize(("ranks", "more"), CASES)
def test_routed_experts_train_as_stocks(ranks, more):
    """With BF16 GEMMs and FP32 gradients: to the last digit until the second update.

    Stock's local layers, without Transformer Engine, refuse sequence parallelism and draw weights as if
    --moe-grouped-gemm were not there: in these cases ours are compared with stock's experts at a level.
    """
    level = FP8_OFF if "--sequence-parallel" in more or "--moe-grouped-gemm" in more else ""
    stock, ours = train(f"{MOE} {level} {more}", ranks, 3), train(f"{OWNED} {FP8_OFF} {more}", ranks, 3)
    assert exact(ours)[:2] == exact(stock)[:2] != []
    assert ours.losses == pytest.approx(stock.losses, abs=1e-4)
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=2e-3)
    for what in ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"):
        assert printed(ours, what)[:2] == printed(stock, what)[:2]
    assert ("z-loss" in more) == bool(printed(ours, "z_loss"))


def printed(run, what: str) -> list[str]:
    """Of each step, one of the router's losses as Megatron's log has it."""
    return re.findall(rf" {what}: (\S+)", "\n".join(run.lines))


@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O3"])
def test_routed_experts_train_in_fp8(level):
    spread = f"{ZERO} --expert-model-parallel-size 2 {ALL_TO_ALL} --fp8-log-interval 2"
    run = train(f"{OWNED} --fp8-level {level} {spread}", 2, 6)
    assert linears(run) == (20, 20)  # of two layers: attention's two, four experts' two
    assert run.losses[-1] < run.losses[0] - 0.2


SCRIPT = "tests/scripts/owned_experts.py"
SPREAD = f"{ZERO} --expert-model-parallel-size 2 {ALL_TO_ALL}"


def experts(flags: str, ranks: int, steps: int = 4, **env: str):
    """(the run, {key of a weight: what owned_experts.py says of it})"""
    env = {"PYTHONPATH": script_path(), **env}
    few = ["--train-iters", str(steps), "--lr-decay-iters", "10"]
    run = run_megatron(ranks, [*TINY_GPT, *few, *f"{OWNED} {flags}".split()], script=SCRIPT, env=env, timeout=300)
    found = [json.loads(line.removeprefix("expert ")) for line in run.lines if line.startswith("expert {")]
    return run, {line["key"]: line for line in found}


@pytest.mark.parametrize(
    ("level", "steps"), [("O3", 4), *(pytest.param(level, 24, marks=pytest.mark.slow) for level in ("O1", "O2", "O3"))]
)
def test_an_expert_without_a_token_trains_as_adam_does_without_a_gradient(level, steps):
    """All tokens go to expert 1, of rank 0's two: neither rank waits for the other's buckets."""
    flags = f"--fp8-level {level} {SPREAD} --overlap-grad-reduce --overlap-param-gather --moe-router-topk 1"
    run, found = experts(f"{flags} --moe-router-pre-softmax --weight-decay 0", 2, steps, FP8_TEST_ONLY="1")
    assert len(run.losses) == steps and not any(step.skipped for step in run.steps) and len(found) == 16
    for key, weight in found.items():
        fed = ".local_experts.1." in key
        assert (weight["m"] > 0, weight["v"] > 0, weight["digest"] != weight["start"]) == (fed,) * 3
        assert weight["gradients"] == steps * 2  # micro-batches of each rank
        assert min(weight["scales"]) > 1.0  # without a token, those of the expert beside it


@pytest.mark.parametrize(
    ("second", "more"),
    [
        (0, ""),
        (3, f"{SPREAD} --moe-grouped-gemm"),  # of rank 1, none of whose experts the first step has reached
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, "--moe-grouped-gemm"), (3, SPREAD)]),
    ],
)
def test_an_expert_whose_first_tokens_come_in_the_second_step_trains(second, more):
    """Its delayed scales were still 1, as if they were known: its gradients were cast to zero."""
    moments = {}
    for recipe in ("delayed", "tensorwise"):
        flags = f"--fp8-level O3 --fp8-recipe {recipe} --moe-router-topk 1 --moe-router-pre-softmax {more}"
        flags += " --init-method-std 0.002"  # gradients of 1e-6
        _, found = experts(flags, 2 if second == 3 else 1, 2, FP8_TEST_ONLY=f"1,{second}")
        moments[recipe] = [weight["m"] for key, weight in found.items() if f".local_experts.{second}." in key]
    assert len(moments["delayed"]) == 4 and min(moments["delayed"]) > 0
    assert moments["delayed"] == pytest.approx(moments["tensorwise"], rel=0.15)


@pytest.mark.slow
def test_all_experts_of_a_rank_go_from_bf16_to_fp8(tmp_path):
    """Only rank 0 has scales at first, and asks no other rank; then both ranks begin theirs anew."""
    save = f"--fp8-level O3 {SPREAD} --save {tmp_path} --load {tmp_path} --save-interval 2"
    first, found = experts(f"{save} --fp8-bf16-layers *.local_experts.[23].*", 2, 2)
    assert {(weight["rank"], len(weight["scales"])) for weight in found.values()} == {(0, 2), (1, 0)}
    assert len(first.losses) == 2
    second, found = experts(f"{save} --override-opt_param-scheduler", 2, 4)
    assert len(second.losses) == 2 and all(min(weight["scales"]) > 1.0 for weight in found.values())


@pytest.mark.slow  # test_safety.py has a NaN on one rank
@pytest.mark.parametrize("level", ["O3", "O1"])
def test_a_nan_in_one_expert_skips_the_step_on_every_rank(level):
    run, found = experts(f"--fp8-level {level} {SPREAD}", 2, 4, FP8_TEST_NAN="2,3")
    assert [step.skipped for step in run.steps][1] and all(weight["v"] < 1e3 for weight in found.values())


@pytest.mark.slow
def test_ranks_keep_their_own_experts_with_random_starts():
    """--data-parallel-random-init broadcasts rank 0's weights to their replicas: no other expert is one."""
    for more in ("--fp8-level O1", "--fp8-level O3"):
        _, found = experts(f"{more} {SPREAD} --data-parallel-random-init", 2, 1)
        assert len({weight["start"] for weight in found.values()}) == 16


SPLIT = f"{ZERO} --tensor-model-parallel-size 2 --sequence-parallel {ALL_TO_ALL}"  # experts too, Megatron's default


@pytest.mark.parametrize(
    ("level", "layout", "of"),
    [
        ("O3", "", {}),
        *(
            pytest.param(level, layout, of, marks=pytest.mark.slow)
            for level in ("O1", "O3")
            for layout, of in (
                (SPREAD, {"data_parallel_size": 2, "expert_model_parallel_size": 2}),
                (ZERO, {"data_parallel_size": 2}),
                (SPLIT, {"tensor_model_parallel_size": 2}),
            )
        ),
    ],
)
def test_bytes_a_parameter(level, layout, of):
    """One micro-batch a step: at O3 7 without an optimizer on other ranks; and what megatron-fp8 memory counts."""
    ranks, data = 2 if layout else 1, of.get("data_parallel_size", 1)
    flags = f"--fp8-level {level} --micro-batch-size 2 --global-batch-size {2 * data} {layout}"
    _, found = experts(f"{flags} --hidden-size 256 --moe-ffn-hidden-size 256", ranks, 2)
    ((held, numel),) = {(weight["bytes"], weight["numel"]) for weight in found.values()}
    print(held / numel)
    if (level, layout) in (("O3", ""), ("O3", SPREAD)):
        assert 7.0 < held / numel <= 7.1
    job = Job(
        *(2, 256, 4, 256), ffn_hidden_size=128, swiglu=True, disable_bias_linear=True, normalization="RMSNorm",
        position_embedding_type="rope", num_experts=4, moe_ffn_hidden_size=256, fp8_experts=True, **of,
    )  # fmt: skip
    cells = {cell.name: cell.at(level) for cell in CELLS} | {"grad_accum": "fp8"}
    counted = {sum(rank.experts.values()) - rank.experts["transpose scratch"] for rank in ranks_bytes(job, cells)}
    assert counted == {held} and sum(job.experts()) == numel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(SPREAD, ZERO), (ZERO, SPREAD), (SPREAD, SPREAD), (f"{SPREAD} --pipeline-model-parallel-size 2", ZERO)],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_experts_are_saved_and_go_to_other_ranks(level, before, after, tmp_path):
    """From and to one layout bit for bit."""
    ranks = {ZERO: 1, SPREAD: 2}
    save = f"--fp8-level {level} --save {tmp_path} --save-interval 3 {before}"
    whole, _ = experts(save, ranks.get(before, 4), 5)
    again, _ = experts(f"--fp8-level {level} --load {tmp_path} --ckpt-step 3 {after}", ranks[after], 5)
    # Stock's log has the mean of the first two losses after a start as the second.
    if before == after:
        assert again.losses[0] == whole.losses[3] and again.grad_norms == whole.grad_norms[3:]
    assert again.losses[0] == pytest.approx(whole.losses[3], abs=2e-3)
    assert again.grad_norms == pytest.approx(whole.grad_norms[3:], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("after", [ZERO, SPREAD])
def test_stocks_experts_become_owned_ones_and_keep_their_names(after, tmp_path):
    """Stock trains and saves, a level goes on with its optimizer's state, and saves under stock's names.

    Stock's local layers read no level's checkpoint of experts, for the name of a norm (docs/checkpoints.md).
    """
    save = f"{ZERO} --dist-ckpt-optim-fully-reshardable --save-interval 2"
    whole = train(f"{MOE} {save} --save {tmp_path / 'stock'}")
    ours = f"{after} {FP8_OFF} --load {tmp_path / 'stock'} --ckpt-step 2 --save {tmp_path / 'ours'} --save-interval 3"
    again, _ = experts(ours, 1 if after == ZERO else 2, 4)
    assert again.losses[0] == pytest.approx(whole.losses[2], abs=2e-4)
    assert again.grad_norms == pytest.approx(whole.grad_norms[2:], rel=2e-3)
    stocks, own = (weights(tmp_path / name) for name in ("stock/iter_0000002", "ours/iter_0000003"))
    assert own == stocks != {}


@pytest.mark.slow
def test_grouped_experts_of_transformer_engine_become_owned_ones_and_go_back(tmp_path):
    """Stock's TEGroupedMLP, over a stand-in for that library: its optimizer state loads at a level, to the last digit;
    a level's weights load there."""
    script = str(ROOT / "tests/scripts/with_stand_in_te.py")
    few = "--train-iters 4 --lr-decay-iters 10 --moe-grouped-gemm"

    def stock(more: str):
        flags = f"{MOE} {ZERO} {few} {more} --transformer-impl transformer_engine"
        return run_megatron(1, [*TINY_GPT, *flags.split()], script=script, cold=True)

    whole = stock(f"--dist-ckpt-optim-fully-reshardable --save {tmp_path / 'stock'} --save-interval 2")
    ours = f"{ZERO} {FP8_OFF} {few} --load {tmp_path / 'stock'} --ckpt-step 2 --save {tmp_path / 'ours'}"
    again, _ = experts(f"{ours} --save-interval 3", 1, 4)
    assert again.losses[0] == whole.losses[2] and again.grad_norms[0] == whole.grad_norms[2]
    back = stock(f"--load {tmp_path / 'ours'} --ckpt-step 3 --no-load-optim --dist-ckpt-strictness log_all")
    assert back.losses == pytest.approx(whole.losses[3:], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "ranks"), [("O3 --fp8-experts", 2), ("O1", 1)])
def test_a_level_s_experts_go_to_hugging_face_and_back(level, ranks, tmp_path):
    """All digits of the first loss. Expert parallelism leaves no trace in a checkpoint."""
    saved, hf, back = (str(tmp_path / name) for name in ("saved", "hf", "back"))
    spread = SPREAD if ranks == 2 else ZERO
    whole = train(f"{MOE} --qk-layernorm --fp8-level {level} {spread} --save {saved} --save-interval 4", ranks)
    convert.to_hf(saved, hf, vocab_size=256)  # with the row of the end of a document
    convert.to_megatron(hf, back)
    flags = f"{MOE} --qk-layernorm --fp8-level O1 --fp8-gemm bf16 --finetune"
    again = [exact(train(f"{flags} --load {folder}", steps=1)) for folder in (saved, back)]
    assert again[0] == again[1] != [] and float(again[0][0]) < whole.losses[0]


def weights(checkpoint) -> dict:
    """{name: shape} of the experts' weights and their optimizer's states, each once for all experts."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key: entry.size for key, entry in entries.items() if re.search(r"experts\.linear_fc\d\.weight", key)}


@pytest.mark.slow
def test_a_checkpoint_says_whether_experts_are_owned(tmp_path):
    experts(f"--fp8-level O3 {ZERO} --save {tmp_path} --save-interval 2", 1, 2)
    with pytest.raises(Exception, match=r"saved with --fp8-experts, which decides .*; add it, or add --no-load-optim"):
        run_megatron(1, [*TINY_GPT, *f"{MOE} --fp8-level O3 {ZERO} --load {tmp_path}".split()], timeout=300)


ONE = "--num-experts 1 --moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type none --fp8-experts"
OVERLAPPED = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(
    ("level", "ranks"),
    [
        ("O1", 1),
        pytest.param("O3", 1, marks=pytest.mark.slow),
        pytest.param(f"O2 {OVERLAPPED}", 2, marks=pytest.mark.slow),
    ],
)
def test_one_expert_trains_as_a_dense_mlp(level, ranks):
    """The losses of four steps to the last digit: scales, masters and moments are the same. The squares in the norm
    are added up in another order."""
    flags = f"--train-iters 4 --lr-decay-iters 10 --global-batch-size 4 --fp8-log-exact --fp8-level {level}"
    script, env = "tests/scripts/one_expert.py", {"PYTHONPATH": script_path()}
    dense, expert = (
        run_megatron(ranks, [*TINY_GPT, *f"{flags} {more}".split()], script=script, env=env) for more in ("", ONE)
    )
    assert exact(expert) == exact(dense) and len(exact(dense)) == 4
    norms = [[float(norm) for norm in exact(run, "grad norm")] for run in (expert, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
