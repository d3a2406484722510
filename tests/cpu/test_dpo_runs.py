"""dpo_gpt_fp8.py in Megatron's loop: policy and reference are equal at first, and the reference does not change."""

import functools
import json
import random
import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.errors import UserError
from megatron_fp8.flags.level import CELLS
from megatron_fp8.tools.perf import job_flags, memory
from megatron_fp8.tuning import no_answer

DPO = "--attention-backend auto --train-iters 6 --lr-decay-iters 10 --lr-warmup-iters 0 --dpo-beta 0.5".split()
DPO += ["--micro-batch-size", "4"]
LOG2 = 0.6931472
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    """Lines of one or two pairs. The prompt is a letter; its successors in order are preferred to the reverse order."""
    path, rng = tmp_path_factory.mktemp("dpo") / "pairs.jsonl", random.Random(1)

    def conversation(asked: str, answer: str) -> list[dict]:
        said = ("system", "s"), ("user", asked), ("assistant", answer)
        return [{"role": role, "content": content} for role, content in said]

    def pair() -> dict:
        letter = rng.randrange(97, 117)
        asked, answer = chr(letter) * rng.randrange(1, 4), "".join(chr(letter + i) for i in range(1, 5))
        return {"chosen": conversation(asked, answer), "rejected": conversation(asked, answer[::-1])}

    lines = ({"pairs": [pair() for _ in range(rng.randrange(1, 3))]} for _ in range(64))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def train(data, level, *flags, nproc=1, **env):
    given = [flag for flag in TINY_GPT if flag != "--mock-data"]
    level = ["--fp8-level", level] if level else []
    env = {"PYTHONPATH": script_path(), "SCRIPT": "dpo_gpt_fp8.py", **env}
    script = str(ROOT / "tests/scripts/sft.py")
    return run_megatron(nproc, [*given, *DPO, *level, "--data-path", data, *flags], script=script, env=env)


def logged(run, name: str) -> list[float]:
    """A logged number of each step; Megatron logs none that is not above 0."""
    lines = [line for line in run.lines if "dpo loss: " in line and "iteration " in line]
    assert lines
    found = (re.search(rf"\| {re.escape(name)}: (\S+)", line) for line in lines)
    return [float(match[1]) if match else 0.0 for match in found]


def bytes_of(run, rank: int = 0) -> tuple[set[str], list[str]]:
    """The hashes of a rank's parameters: all of the reference's, and the policy's by step."""
    found = [line.split() for line in run.lines if line.startswith("reference ")]
    found = [words for words in found if words[5] == str(rank)]
    assert found
    return {words[1] for words in found}, [words[3] for words in found]


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        ("O3", 1, ""),
        pytest.param("O3", 1, "--fp8-recipe tensorwise --fp8-activations", marks=slow),
        pytest.param("O2", 1, "", marks=slow),
        pytest.param("O1", 1, "", marks=slow),
        pytest.param("O1", 1, "--fp8-gemm bf16", marks=slow),
        pytest.param("O3", 1, "--no-fp8-wgrad", marks=slow),
        pytest.param("O3", 1, "--fp8-bf16-layers decoder.layers.0.mlp.linear_fc1", marks=slow),
        pytest.param("O3", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2 --fp8-recipe tensorwise", marks=slow),
        pytest.param("O3", 2, "--pipeline-model-parallel-size 2 --micro-batch-size 1", marks=slow),
        pytest.param(
            "O3", 2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
            "--micro-batch-size 1", marks=slow,
        ),
    ],
)  # fmt: skip
def test_it_learns_and_the_reference_stays(level, nproc, flags, pairs):
    """Step 0: log-probabilities equal to the last bit, so that the loss is log 2, and every margin 0."""
    run = train(pairs, level, *flags.split(), nproc=nproc)
    loss, margin, ratio = (logged(run, name) for name in ("dpo loss", "margin", "abs log-ratio"))
    assert loss[0] == LOG2 and margin[0] == ratio[0] == 0.0 and logged(run, "accuracy")[0] == 0.5
    assert loss[-1] < 0.5 and margin[-1] > 0.4 and logged(run, "accuracy")[-1] == 1.0
    for rank in range(nproc):
        reference, policy = bytes_of(run, rank)
        assert len(reference) == 1 and len(set(policy)) == len(policy) == 6


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_without_a_learning_rate_the_margins_stay_zero(level, pairs):
    """Scales that drift apart would change the result."""
    run = train(pairs, level, "--lr", "0", "--min-lr", "0", "--train-iters", "5")
    assert logged(run, "dpo loss") == [LOG2] * 5 and not any(logged(run, "abs log-ratio"))


@pytest.mark.parametrize(
    ("level", "flags"),
    [
        ("O3", ""),
        pytest.param("O1", "", marks=slow),
        pytest.param("O3", "--fp8-gemm bf16", marks=slow),
        pytest.param("O3", "--pipeline-model-parallel-size 2 --micro-batch-size 1", marks=slow),
    ],
)
def test_the_reference_holds_what_is_counted(level, flags, pairs):
    """`megatron-fp8 memory` of the command, against the tensors of the run."""
    stages = 2 if "pipeline" in flags else 1
    run = train(pairs, level, *flags.split(), nproc=stages)
    held = {line for line in run.lines if line.startswith("reference's bytes: ")}
    given = [*TINY_GPT, *DPO, "--fp8-level", level, *flags.split()]
    parsed = job_flags.parse(["torchrun", "dpo_gpt_fp8.py", *given])
    job = job_flags.job(parsed.args, 1)
    cells = {cell.name: cell.at(level) for cell in CELLS} | job_flags.cells_given(parsed.args)
    counted = [(rank.linears["reference"], rank.others["reference"]) for rank in memory.ranks_bytes(job, cells)]
    assert held == {f"reference's bytes: {linears} {others}" for linears, others in counted}
    assert len(counted) == stages


def test_a_run_that_reads_scores_has_no_reference_to_count():
    given = [*TINY_GPT, *DPO, "--fp8-level", "O3"]
    for more in ("", "--dpo-reference-scores file", "--dpo-score-reference file"):
        job = job_flags.job(job_flags.parse(["dpo_gpt_fp8.py", *given, *more.split()]).args, 1)
        assert job.dpo_reference == (not more)
    other = ["pretrain_gpt_fp8.py", *TINY_GPT, "--sft"]
    assert not job_flags.job(job_flags.parse(other).args, 1).dpo_reference
    with pytest.raises(UserError, match=r"unrecognized arguments: --dpo-beta 0.5"):
        job_flags.parse([*other, *DPO])


@slow
def test_without_beta_nothing_is_learnt(pairs):
    """Every gradient is exactly 0, and no byte of the policy changes."""
    run = train(pairs, "O3", "--dpo-beta", "0", "--weight-decay", "0")
    assert logged(run, "dpo loss") == [LOG2] * 6 and not any(run.grad_norms)
    _, policy = bytes_of(run)
    assert len(set(policy)) == 1


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
UNBALANCED = f"{EXPERTS} --moe-router-load-balancing-type none"


@slow
@pytest.mark.parametrize(
    ("flags", "norm"),
    [
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0", 0.0),
        (f"{UNBALANCED} --calculate-per-token-loss", 0.0),
        (EXPERTS, 0.03),  # of the routers' loss alone
    ],
)
def test_beside_what_is_not_refused_nothing_else_is_learnt(flags, norm, pairs):
    """Without beta there is no gradient but that of the routers' loss, whose size is stock's for such a coefficient."""
    run = train(pairs, "O1", "--dpo-beta", "0", "--weight-decay", "0", *flags.split())
    assert run.grad_norms[0] == pytest.approx(norm, rel=0.5)


@slow
def test_a_pair_without_an_answer_changes_no_step(pairs, tmp_path):
    """Each fourth pair has a prompt in the place of an answer. Every step is that of the three others."""
    found = [json.loads(line)["pairs"][0] for line in Path(pairs).read_text().splitlines()]
    empty = {**found[0], "chosen": found[0]["chosen"][:2]}
    losses, norms = [], []
    for name, every in (("three", []), ("four", [empty])):
        path = tmp_path / f"{name}.jsonl"
        kept = [pair for i in range(0, 48, 3) for pair in (*found[i : i + 3], *every)]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in kept))
        flags = f"--micro-batch-size 1 --global-batch-size {3 + len(every)} --calculate-per-token-loss"
        flags += " --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"  # no scale sees the other tokens
        run = train(str(path), "O1", *flags.split())
        losses.append(logged(run, "dpo loss"))
        norms.append(run.grad_norms)
    assert losses[0] == losses[1] and norms[0] == norms[1] and losses[0][-1] < LOG2 == losses[0][0]


@slow
def test_a_step_without_a_pair_has_the_loss_0(pairs, tmp_path):
    """The rejected answers have tokens, and are not learnt alone."""
    found = [json.loads(line)["pairs"][0] for line in Path(pairs).read_text().splitlines()]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**pair, "chosen": pair["chosen"][:2]}) + "\n" for pair in found))
    for per_token in ([], ["--calculate-per-token-loss"]):
        run = train(str(path), "O3", *per_token)
        for name in ("dpo loss", "accuracy", "margin", "abs log-ratio", "kl a token"):
            assert logged(run, name) == [0.0] * 6
        assert not any(run.grad_norms) and run.lines.count(no_answer.LINE) == 1
    assert no_answer.LINE not in train(pairs, "O3").lines


LAYERS = ["--num-layers", "4", "--micro-batch-size", "1"]


@pytest.fixture(scope="module")
def began(tmp_path_factory) -> list[str]:
    """Flags that begin with a checkpoint of four layers: stages would draw other weights than one process."""
    folder = str(tmp_path_factory.mktemp("began"))
    once = "--train-iters 1 --lr-decay-iters 10 --save-interval 1 --save".split()
    run_megatron(1, [*TINY_GPT, *LAYERS, *once, folder])
    return [*LAYERS, "--pretrained-checkpoint", folder]


@pytest.fixture(scope="module")
def alone(began, pairs):
    return train(pairs, "O3", *began)


@slow
@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("--pipeline-model-parallel-size 2", 2e-3),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2e-3),
        ("--use-distributed-optimizer", 1e-2),
        ("--tensor-model-parallel-size 2", 1e-2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 1e-2),
    ],
)
def test_layouts_learn_as_one_process(layout, first, began, alone, pairs):
    """Within the bounds of test_layouts.py; a rank's log-probabilities are those of the others that share its data."""
    run = train(pairs, "O3", *began, *layout.split(), nproc=2)
    assert logged(run, "dpo loss")[0] == LOG2
    assert logged(run, "dpo loss") == pytest.approx(logged(alone, "dpo loss"), abs=1e-2)
    assert run.grad_norms[0] == pytest.approx(alone.grad_norms[0], rel=first)
    assert run.grad_norms == pytest.approx(alone.grad_norms, rel=0.1)
    of = {rank: said_by(run, rank) for rank in (0, 1)}
    if "tensor" in layout:
        assert of[0] == of[1] and len(of[0]) == 2 * 6 * 8
    elif "pipeline" in layout:
        assert not of[0] and of[1][:16] == said_by(alone, 0)[:16]  # of the first step


def said_by(run, rank: int) -> list[str]:
    """Hashes of log-probabilities: of reference and policy for each step's micro-batches."""
    return [line.split()[1] for line in run.lines if re.fullmatch(rf"log-probabilities \S+ rank {rank}", line)]


@pytest.mark.parametrize("level", ["O3", pytest.param("O1", marks=slow)])
def test_a_resumed_run_has_the_reference_again(level, pairs, tmp_path):
    """From the checkpoint that the run started with: the same bytes, and the losses of an uninterrupted run."""
    began, save = str(tmp_path / "began"), str(tmp_path / "run")
    flags = [*(flag for flag in TINY_GPT if flag != "--mock-data"), "--mock-data", "--fp8-level", level]
    run_megatron(1, [*flags, "--train-iters", "2", "--lr-decay-iters", "10", "--save", began, "--save-interval", "2"])
    starts = ["--pretrained-checkpoint", began, "--save", save, "--load", save, "--save-interval", "2"]
    starts += ["--train-iters", "4"]
    whole = train(pairs, level, *starts)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(pairs, level, *starts)
    assert bytes_of(resumed)[0] == bytes_of(whole)[0] and len(bytes_of(whole)[0]) == 1
    assert bytes_of(resumed)[1] == bytes_of(whole)[1][2:]
    assert logged(resumed, "dpo loss")[::2] == logged(whole, "dpo loss")[2::2]  # stock logs a mean in between
    assert logged(whole, "dpo loss")[0] == LOG2


@pytest.fixture
def scored(pairs, tmp_path):
    """scored(level, *flags): the flags of a run that reads the scores which another of these flags has written."""

    def scored(level, *flags, nproc=1):
        file = str(tmp_path / "scores")
        run = train(pairs, level, *flags, "--dpo-score-reference", file, nproc=nproc)
        assert any(f"{file}: 64 samples scored" in line for line in run.lines)
        assert not any("dpo loss" in line for line in run.lines)
        return [*flags, "--dpo-reference-scores", file]

    return scored


# A row's scales are those of its own tokens. Two rows a step: a row is a micro-batch, which is what a step costs.
SAME_ROWS = "--micro-batch-size 1 --global-batch-size 2 --fp8-recipe tensorwise".split()


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        ("O3", 1, ""),
        pytest.param("O1", 1, "", marks=slow),
        pytest.param("O3", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=slow),
        pytest.param("O3", 2, "--pipeline-model-parallel-size 2", marks=slow),
        pytest.param("O3", 2, "--pipeline-model-parallel-size 2 --num-layers 4 "
                     "--num-layers-per-virtual-pipeline-stage 1", marks=slow),
    ],
)  # fmt: skip
def test_scores_of_a_file_are_the_resident_reference_s(level, nproc, flags, pairs, scored, tmp_path):
    """To the last bit: every loss and gradient norm, and all bytes of the policy after each step. So a resident
    reference is in no gradient norm; nor is it in a checkpoint."""
    flags = [*SAME_ROWS, "--train-iters", "3", *flags.split()]
    saves = [["--save", str(tmp_path / name), "--save-interval", "3"] for name in ("resident", "file")]
    resident = train(pairs, level, *flags, *saves[0], nproc=nproc)
    run = train(pairs, level, *scored(level, *flags, nproc=nproc), *saves[1], nproc=nproc)
    assert run.grad_norms == resident.grad_norms and len(run.grad_norms) == 3
    beside, without = (
        dcp.FileSystemReader(f"{folder}/iter_0000003").read_metadata().state_dict_metadata for _, folder, *_ in saves
    )
    assert beside.keys() == without.keys() and len(without) > 20
    assert logged(run, "dpo loss") == logged(resident, "dpo loss") and logged(run, "dpo loss")[0] == LOG2
    for rank in range(nproc):
        none, policy = bytes_of(run, rank)
        assert policy == bytes_of(resident, rank)[1] and len(set(policy)) == 3
        assert len(none) == 1 and none != bytes_of(resident, rank)[0]
    assert not any("the reference is on the device" in line for line in run.lines)


@slow
def test_one_layout_scores_and_another_trains(pairs, scored):
    """Rows of two samples too, with delayed scales: the same but for the rounding of other scales."""
    alone = train(pairs, "O3")
    run = train(pairs, "O3", *scored("O3"), "--use-distributed-optimizer", "--split", "8,1,1", "--eval-iters", "1",
                nproc=2)  # fmt: skip
    assert logged(run, "dpo loss") == pytest.approx(logged(alone, "dpo loss"), abs=0.1)
    assert abs(logged(run, "dpo loss")[0] - LOG2) < 5e-3


def test_rows_that_pad_the_vocabulary_are_no_other_model(pairs, scored, tmp_path):
    """Two tensor-parallel ranks have four rows more than one, which a checkpoint of theirs has too."""
    model = "--vocab-size 259 --make-vocab-size-divisible-by 4".split()
    two, folder = ["--tensor-model-parallel-size", "2"], str(tmp_path / "began")
    once = "--train-iters 1 --lr-decay-iters 10 --save-interval 1 --save".split()
    run_megatron(2, [*TINY_GPT, *model, *two, *once, folder])
    start = [*SAME_ROWS, *model, "--pretrained-checkpoint", folder]
    _, *scores = scored("O1", *two, *start, nproc=2)
    run = train(pairs, "O1", *scores[1:], "--train-iters", "1")
    assert logged(run, "dpo loss") == [pytest.approx(LOG2, abs=5e-3)]


@slow
def test_a_resumed_run_reads_the_file_again(pairs, scored, tmp_path):
    save = str(tmp_path / "run")
    flags = [*scored("O3", *SAME_ROWS), "--save", save, "--load", save, "--save-interval", "3"]
    whole = train(pairs, "O3", *flags)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("3")
    assert bytes_of(train(pairs, "O3", *flags))[1] == bytes_of(whole)[1][3:]


def test_scores_that_do_not_fit_are_refused(pairs, scored, tmp_path):
    """In one line: other data at once, another model or tokenizer at the first sample; and a file is never written
    twice."""
    flags = scored("O1", *SAME_ROWS)
    other = tmp_path / "other.jsonl"
    other.write_text(Path(pairs).read_text() * 2)
    said = {}
    for name, data, more, env in (
        ("data", str(other), flags, {}),
        ("tokens", pairs, flags, {"SHIFT": "1"}),
        ("model", pairs, [*flags, "--seed", "7"], {}),
        ("twice", pairs, [*SAME_ROWS, "--dpo-score-reference", flags[-1]], {}),
    ):
        with pytest.raises(RunFailed) as failed:
            train(data, "O1", *more, **env)
        (said[name],) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert f"has no scores of --data-path {other}" in said["data"]
    assert "other tokens than when it was scored" in said["tokens"]
    assert "another model than this run begins with has scored" in said["model"]
    assert f"--dpo-score-reference {flags[-1]}: the file exists" in said["twice"]


# --- adapters on a frozen base


LORA = "--lr 1e-2 --min-lr 1e-2".split()


@pytest.mark.parametrize(
    ("level", "nproc", "flags"),
    [
        ("O3", 1, ""),
        pytest.param("O1", 1, "--fp8-recipe tensorwise", marks=slow),
        pytest.param("O3", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", marks=slow),
        pytest.param("O3", 2, "--tensor-model-parallel-size 2", marks=slow),
        pytest.param("O3", 2, "--pipeline-model-parallel-size 2 --micro-batch-size 1", marks=slow),
    ],
)  # fmt: skip
def test_with_adapters_the_reference_is_the_policy_without_them(level, nproc, flags, pairs):
    """At first an adapter adds nothing: the loss is log 2. There is no second model, and the base stays."""
    run = train(pairs, level, *LORA, *flags.split(), nproc=nproc, ADAPTED="dpo_gpt_fp8.py",
                SCRIPT="tests/scripts/adapters.py")  # fmt: skip
    loss = logged(run, "dpo loss")
    assert loss[0] == LOG2 and loss[-1] < 0.6 and logged(run, "accuracy")[-1] > 0.9
    assert not any("the reference is on the device" in line for line in run.lines)
    assert all("bytes changed: 0," in line for line in run.lines if line.startswith("frozen: "))


@slow
def test_a_resumed_run_with_adapters_needs_no_other_weights(pairs, tmp_path):
    save = str(tmp_path / "run")
    flags = [*LORA, "--save", save, "--load", save, "--save-interval", "3"]
    env = {"ADAPTED": "dpo_gpt_fp8.py", "SCRIPT": "tests/scripts/adapters.py"}
    whole = train(pairs, "O3", *flags, **env)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(pairs, "O3", *flags, **env)
    assert bytes_of(resumed)[1] == bytes_of(whole)[1][3:] and len(bytes_of(resumed)[1]) == 3


def test_what_is_trained_beside_adapters_is_refused(pairs):
    with pytest.raises(RunFailed) as failed:
        train(pairs, "O3", ADAPTED="dpo_gpt_fp8.py", SCRIPT="tests/scripts/adapters.py", BASE="part")
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert "embedding.word_embeddings.weight is trained beside adapters" in line


MOVED = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type none --moe-router-enable-expert-bias --moe-router-bias-update-rate"
)


def test_adapters_beside_a_routers_bias_that_moves_are_refused(pairs):
    """It would lead the policy without its adapters away from the reference. With a rate of 0 it stays."""
    env = {"ADAPTED": "dpo_gpt_fp8.py", "SCRIPT": "tests/scripts/adapters.py"}
    with pytest.raises(RunFailed) as failed:
        train(pairs, "O3", *MOVED.split(), "0.05", **env)
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert "--moe-router-enable-expert-bias: each step moves" in line and "--moe-router-bias-update-rate 0," in line
    run = train(pairs, "O3", *LORA, *MOVED.split(), "0", "--train-iters", "2", **env)
    assert logged(run, "dpo loss")[0] == LOG2


@slow
def test_an_evaluation_has_a_reference_too(pairs):
    run = train(pairs, "O3", "--split", "8,1,1", "--eval-iters", "2", "--eval-interval", "6")
    (line, *_) = [line for line in run.lines if "validation loss at iteration 6" in line]
    assert 0 < float(re.search(r"dpo loss value: (\S+)", line)[1]) < LOG2


@slow
def test_all_numbers_are_in_the_metrics(pairs, tmp_path):
    file = tmp_path / "metrics.jsonl"
    train(pairs, "O3", MEGATRON_FP8_METRICS=str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = next(row for row in reversed(rows) if "dpo_loss" in row)
    assert last["rejected_reward"] < 0 < last["chosen_reward"] and last["accuracy"] == 1.0


@slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dpo-label-smoothing 0.7", "--dpo-label-smoothing 0.7: use a number of 0 to 0.5"),
        ("--dpo-beta -1", "--dpo-beta -1.0: use a number of 0 or more"),
        ("--dpo-beta inf", "--dpo-beta inf: use a number of 0 or more"),
        ("--dpo-beta 0.5", "--data-path is missing: give a file of preference pairs"),
        ("--hidden-dropout 0.1", "--hidden-dropout"),
        ("--fp8-on-spike bf16-fallback", "the reference stays in FP8"),
        ("--context-parallel-size 2 --calculate-per-token-loss", "--context-parallel-size 2: DPO sums"),
        ("--fp8-level O0 --context-parallel-size 2", "--context-parallel-size 2: DPO sums"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: its loss would teach the rejected answers"),
        (f"{EXPERTS} --calculate-per-token-loss", "--calculate-per-token-loss with --moe-aux-loss-coeff 0.01: "),
        (f"{UNBALANCED} --moe-z-loss-coeff 0.1 --calculate-per-token-loss", "with --moe-z-loss-coeff 0.1: "),
    ],
)
def test_what_it_cannot_do_is_one_line(flags, words):
    """The first time the script alone, which installs the plugin before it imports Megatron."""
    alone, ranks = "smoothing" in flags, 2 if "context" in flags else 1
    with pytest.raises(RunFailed) as failed:
        run_megatron(ranks, [*TINY_GPT, *DPO, "--fp8-level", "O3", *flags.split()], script="dpo_gpt_fp8.py", cold=alone)
    assert "Traceback" not in str(failed.value)
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert words in line


def said_of(call, *args, **kwargs) -> str:
    """The line of a run that a user's mistake ends."""
    with pytest.raises(RunFailed) as failed:
        call(*args, **kwargs)
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    return line


TURN = {"role": "assistant", "content": "z"}
NO_MESSAGES = {"chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("lines", "flags", "words"),
    [
        ([NO_MESSAGES], "--num-workers 1", 'sample 0 is neither {"chosen": [messages], "rejected": [messages]} nor'),
        pytest.param([{"chosen": [{"content": "z"}], "rejected": [TURN]}], "", 'message being {"role": ', marks=slow),
        pytest.param([], "", "the file is empty; give one with a sample in each line", marks=slow),
        pytest.param(
            [{"chosen": [TURN], "rejected": [TURN]}], "--vocab-size 80 --make-vocab-size-divisible-by 1",
            "sample 0 has token 254, and the model has 80: raise --vocab-size", marks=slow,
        ),
    ],
)  # fmt: skip
def test_data_of_another_form_are_one_line(lines, flags, words, tmp_path):
    """Also in a process that reads data, from which torch brings a traceback."""
    (tmp_path / "pairs").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = said_of(train, str(tmp_path / "pairs"), "O3", *flags.split())
    assert f"--data-path {tmp_path}/pairs: " in line and words in line and "Traceback" not in line


def test_a_resumed_run_with_another_reference_is_refused(pairs, scored, tmp_path):
    """Of the same shape: other weights in a folder, or the scores of other weights. What else it changes is said."""
    folders, once = {}, "--train-iters 1 --lr-decay-iters 10 --save-interval 1 --save".split()
    for name, seed in (("began", "1"), ("other", "2")):
        folders[name] = ["--pretrained-checkpoint", str(tmp_path / name)]
        run_megatron(1, [*TINY_GPT, "--seed", seed, *once, str(tmp_path / name)])
    keep = [*SAME_ROWS, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--save-interval", "1"]
    train(pairs, "O3", *keep, *folders["began"], "--exit-interval", "1")
    _, *of_other = scored("O3", *SAME_ROWS, *folders["other"])[-3:]
    for given in folders["other"], of_other:
        line = said_of(train, pairs, "O3", *keep, *given)
        assert f"{' '.join(given)}: another reference than the run in --load {tmp_path}/run has" in line
    for bent in "layers.1.mlp.linear_fc2.weight", "layers.0.self_attention.linear_qkv.layer_norm_weight":
        line = said_of(functools.partial(train, BEND=bent), pairs, "O3", *keep, *folders["began"])
        assert f"{tmp_path}/began: another reference than the run" in line
    run = train(pairs, "O3", *keep, *folders["began"], "--dpo-beta", "0.25")
    assert any("the run that goes on had --dpo-beta 0.5, and now has 0.25" in line for line in run.lines)


@slow
@pytest.mark.parametrize(
    ("layout", "other"),
    [("", "--tensor-model-parallel-size 2"), ("--pipeline-model-parallel-size 2", "--use-distributed-optimizer")],
)
def test_the_reference_is_known_in_another_layout(layout, other, pairs, tmp_path):
    """Also at another level, and on all ranks."""
    began, save = str(tmp_path / "began"), str(tmp_path / "run")
    run_megatron(1, [*TINY_GPT, *"--train-iters 1 --lr-decay-iters 10 --save-interval 1 --save".split(), began])
    flags = ["--pretrained-checkpoint", began, "--save", save, "--load", save, "--save-interval", "1"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "2"]
    train(pairs, "O3", *flags, *layout.split(), "--exit-interval", "1", nproc=2 if layout else 1)
    run = train(pairs, "O1", *flags, *other.split(), "--exit-interval", "2", nproc=2)
    assert len(logged(run, "dpo loss")) == 1
    more = [*flags, *layout.split(), "--ckpt-step", "2", "--pretrained-checkpoint", save]
    assert "another reference" in said_of(train, pairs, "O3", *more, nproc=2 if layout else 1)


@slow
def test_a_reference_of_another_shape_is_refused(pairs, tmp_path):
    keep = ["--save", str(tmp_path / "a"), "--save-interval", "3", "--load", str(tmp_path / "a")]
    other = ["--save", str(tmp_path / "b"), "--save-interval", "6", "--ffn-hidden-size", "192"]
    train(pairs, "O3", *keep, "--exit-interval", "3")
    train(pairs, "O3", *other)
    line = said_of(train, pairs, "O3", *keep, "--pretrained-checkpoint", str(tmp_path / "b"))
    assert f"--pretrained-checkpoint {tmp_path}/b: the checkpoint does not fit this run" in line
