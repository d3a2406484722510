"""--sft through pretrain_gpt_fp8.py: stock's dataset of packed conversations, without Transformer Engine."""

import json
import re
from pathlib import Path

import pytest
from chats import write_conversations
from launch import ROOT, RunFailed
from megatron_runs import TINY_GPT, run_megatron, script_path

from megatron_fp8.tuning import no_answer

SFT = "--sft --attention-backend auto --train-iters 8 --lr-decay-iters 10 --split 1,0,0".split()
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> str:
    return write_conversations(tmp_path_factory.mktemp("sft") / "chat.jsonl")


def train(data, level, *flags, nproc=1, **env):
    """IN_FP32: the script, in which BF16 means FP32."""
    given = [flag for flag in TINY_GPT if flag != "--mock-data"]
    level = [] if level is None else ["--fp8-level", level]
    env = {"PYTHONPATH": script_path(), **env}
    script = str(ROOT / "tests/scripts" / ("in_fp32.py" if "IN_FP32" in env else "sft.py"))
    command = [*given, *SFT, *level, "--data-path", data, *flags]
    return run_megatron(nproc, command, script=script, env=env, cold="IN_FP32" in env)


@pytest.mark.parametrize(
    ("level", "flags"),
    [
        ("O3", ""),
        pytest.param("O1", "", marks=slow),
        pytest.param("O2", "--fp8-recipe tensorwise --no-rope-fusion", marks=slow),
        pytest.param("O3", "--qk-layernorm --group-query-attention --num-query-groups 2", marks=slow),
        pytest.param("O3", "--fp8-activations --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", marks=slow),
        pytest.param("O3", "--position-embedding-type learned_absolute", marks=slow),
        pytest.param("O3", "--calculate-per-token-loss --micro-batch-size 4", marks=slow),
    ],
)  # fmt: skip
def test_tuning_on_conversations(level, flags, conversations):
    run = train(conversations, level, *flags.split())
    assert len(run.losses) == 8 and run.losses[-1] < run.losses[0] - 0.3


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--use-distributed-optimizer", marks=slow),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=slow),
        pytest.param("--pipeline-model-parallel-size 2 --micro-batch-size 1", marks=slow),
    ],
)
def test_layouts_train_alike(layout, conversations):
    alone = train(conversations, "O3")
    run = train(conversations, "O3", *layout.split(), nproc=2)
    assert run.losses[-1] < run.losses[0] - 0.3
    if "parallel" not in layout:
        assert run.losses == pytest.approx(alone.losses, abs=5e-3)


CONTEXT = "--context-parallel-size"
SPLIT_ROWS = {
    "two": (2, f"{CONTEXT} 2"),
    "four": (4, f"{CONTEXT} 4 --group-query-attention --num-query-groups 2 --qk-layernorm"),
    "sequence": (4, f"{CONTEXT} 2 --tensor-model-parallel-size 2 --sequence-parallel --no-rope-fusion"),
    "pipeline": (4, f"{CONTEXT} 2 --pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "recomputed": (2, f"{CONTEXT} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "learned": (2, f"{CONTEXT} 2 --position-embedding-type learned_absolute --recompute-granularity selective"),
}


@slow
@pytest.mark.parametrize("case", SPLIT_ROWS)
def test_rows_that_ranks_share_in_fp32(case, conversations):
    """Context parallelism: losses, and norms of gradients, of ranks that each have whole rows, within 1e-5."""
    ranks, flags = SPLIT_ROWS[case]
    _, size, *others = flags.split()
    exact = "--fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --fp8-log-exact --calculate-per-token-loss"
    numbers = []
    for nproc, given in ((ranks // int(size), others), (ranks, flags.split())):
        run = train(conversations, "O1", *exact.split(), *given, nproc=nproc, IN_FP32="tests/scripts/sft.py")
        numbers.append([list(map(float, re.findall(rf"exact {name} ([^\s;]+)", "\n".join(run.lines))))
                        for name in ("lm loss", "grad norm")])  # fmt: skip
    for alone, shared in zip(*numbers, strict=True):
        assert len(alone) == 8 and shared == pytest.approx(alone, abs=1e-5, rel=1e-5)


def test_rows_that_ranks_share(conversations):
    """--cp-comm-type has one way here, and a line says so."""
    flags = "--calculate-per-token-loss --micro-batch-size 4".split()
    alone = train(conversations, "O3", *flags)
    run = train(conversations, "O3", *flags, "--cp-comm-type", "a2a", CONTEXT, "2", nproc=2)
    assert run.losses == pytest.approx(alone.losses, abs=5e-3) and run.losses[-1] < run.losses[0] - 0.3
    assert any("--cp-comm-type a2a: p2p instead: of packed documents" in line for line in run.lines)


def test_an_evaluation_of_rows_that_ranks_share(tmp_path):
    """Stock's mean is of micro-batches' and ranks' means. The second rank has no document, but the rows' padding: its
    mean would be 0, and the validation loss a half."""
    data = write_conversations(tmp_path / "short.jsonl", most=1)
    flags = "--micro-batch-size 1 --calculate-per-token-loss --split 50,50,0 --eval-iters 2 --eval-interval 4".split()
    flags += "--train-iters 4 --global-batch-size 4".split()
    alone, shared = (train(data, "O3", *flags, CONTEXT, str(n), nproc=n) for n in (1, 2))
    assert len(shared.validation_losses) == len(alone.validation_losses) > 0
    assert shared.validation_losses == pytest.approx(alone.validation_losses, abs=5e-3)
    assert shared.losses == pytest.approx(alone.losses, abs=5e-3)


@slow
def test_three_stages_of_which_one_has_no_data_of_its_own(conversations):
    flags = "--num-layers 3 --pipeline-model-parallel-size 3 --micro-batch-size 1".split()
    run = train(conversations, "O3", *flags, nproc=3)
    assert run.losses[-1] < run.losses[0] - 0.3


LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--init-method-std 0.1"  # with smaller weights the positions change a loss by 0.002 only
)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--no-rope-fusion", marks=slow),
        pytest.param(LATENT, marks=slow),
        pytest.param(f"{LATENT} --rope-type rope --q-lora-rank 48 --qk-layernorm", marks=slow),
    ],
)
def test_a_document_is_as_if_alone_in_the_model(flags, conversations):
    """With BF16 GEMMs: their operands have no scale that a neighbour could change."""
    run = train(conversations, "O1", "--fp8-gemm", "bf16", "--train-iters", "1", *flags.split(), LOOK="1")
    (line,) = (line for line in run.lines if line.startswith("apart: "))
    apart, together = re.match("apart: (.*); one document: (.*)", line).groups()
    leak, first, second = map(float, apart.split())
    assert leak == 0 and first < 0.001 and second < 0.001 and float(together) > 0.02


@slow
@pytest.mark.parametrize(
    ("level", "flags", "apart"),
    [
        ("O1", "--fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32", 0.0),  # no scale sees the foreign tokens
        ("O3", "--fp8-recipe tensorwise", 2e-3),  # gradients are rounded at random in another order
        ("O3", "", 2e-2),
    ],
)
def test_a_micro_batch_without_an_answer_changes_no_step(level, flags, apart, conversations, tmp_path):
    """Each fourth line is a prompt alone. Every step is that of the three others."""
    lines = Path(conversations).read_text().splitlines()
    prompt = {"messages": json.loads(lines[0])["messages"][:2]}
    with_prompts = [line for i in range(0, 48, 3) for line in (*lines[i : i + 3], json.dumps(prompt))]
    losses, norms = [], []
    for name, chosen, batch in (("three", lines[:48], "3"), ("four", with_prompts, "4")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(chosen) + "\n")
        run = train(str(path), level, "--micro-batch-size", "1", "--global-batch-size", batch,
                    "--calculate-per-token-loss", *flags.split())  # fmt: skip
        losses.append(run.losses)
        norms.append(run.grad_norms)
    assert losses[1] == pytest.approx(losses[0], abs=apart) and norms[1] == pytest.approx(norms[0], rel=5 * apart)
    assert len(losses[0]) == 8 and losses[0][-1] < losses[0][0]


@slow
def test_a_step_without_an_answer_has_no_gradient_and_the_loss_0(conversations, tmp_path):
    """It is made all the same, and each process says once what is wrong with the data."""
    prompt = {"messages": json.loads(Path(conversations).read_text().splitlines()[0])["messages"][:2]}
    path = tmp_path / "prompts.jsonl"
    path.write_text((json.dumps(prompt) + "\n") * 64)
    for per_token in ([], ["--calculate-per-token-loss"]):
        run = train(str(path), "O3", *per_token)
        assert not any(run.grad_norms) and not any(step.skipped for step in run.steps) and len(run.steps) == 8
        assert run.losses == [0.0] * 8 and run.lines.count(no_answer.LINE) == 1
    assert no_answer.LINE not in train(conversations, "O3").lines


@slow
@pytest.mark.parametrize("per_token", [True, False])
def test_a_rank_without_an_answer(per_token, conversations, tmp_path):
    """The second of two data-parallel ranks has prompts alone. The loss is the first one's; so are the gradients, or
    their half without --calculate-per-token-loss, whose mean is over micro-batches."""
    lines = Path(conversations).read_text().splitlines()
    prompt = json.dumps({"messages": json.loads(lines[0])["messages"][:2]})
    path = tmp_path / "half.jsonl"
    path.write_text("".join(f"{line}\n{prompt}\n" for line in lines))
    flags = "--micro-batch-size 1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32 --clip-grad 0".split()
    flags += ["--calculate-per-token-loss"] * per_token
    alone = train(conversations, "O1", *flags, "--global-batch-size", "1")
    run = train(str(path), "O1", *flags, "--global-batch-size", "2", nproc=2)
    share = 1 if per_token else 0.5
    assert run.losses[0] == pytest.approx(alone.losses[0], abs=1e-5)
    assert run.grad_norms[0] == pytest.approx(share * alone.grad_norms[0], rel=2e-3)
    assert run.losses == pytest.approx(alone.losses, abs=0.02) and run.lines.count(no_answer.LINE) == 1


@slow
def test_what_a_tokenizer_without_pad_does_is_said(conversations):
    line = "[fp8] --sft: the tokenizer pads with its end token (253), and labels equal to the pad are masked"
    assert not any(line in text for text in train(conversations, "O3").lines)
    assert any(line in text for text in train(conversations, "O3", PAD="end").lines)


@slow
def test_what_a_format_does_is_said(conversations):
    flags = ["--sft-tokenizer-prompt-format", "default"]
    assert any("prompts are learnt like answers" in line for line in train(conversations, "O3", *flags).lines)


@slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--attention-dropout 0.1", "--attention-dropout 0.1"),
        ("--attention-backend unfused", "--attention-backend unfused"),
        ("--pipeline-model-parallel-size 2", "use --micro-batch-size 1"),
        (f"{CONTEXT} 2", "--calculate-per-token-loss: add it"),
        (f"{CONTEXT} 2 --calculate-per-token-loss --mtp-num-layers 1", "--mtp-num-layers 1: remove it"),
        (f"{CONTEXT} 2 --calculate-per-token-loss {LATENT}", "--multi-latent-attention: remove it"),
        (f"{CONTEXT} 2 --calculate-per-token-loss --fp8-level O0", "run Megatron's own script"),
    ],
)
def test_what_it_cannot_do_is_one_line(flags, words, conversations):
    with pytest.raises(RunFailed) as failed:
        train(conversations, "O3", *flags.split(), nproc=2 if "pipeline" in flags or CONTEXT in flags else 1)
    assert failed.value.code == 2
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"chosen": [], "rejected": []}\n', 'sample 0 is not {"messages": [{"role": "...", "content": "..."}, ...]}'),
        pytest.param("no JSON\n", "cannot be read as lines of JSON", marks=slow),
        pytest.param("", "the file is empty", marks=slow),
    ],
)
def test_data_of_another_form_are_one_line(text, words, tmp_path):
    (tmp_path / "chat").write_text(text)
    with pytest.raises(RunFailed) as failed:
        train(str(tmp_path / "chat"), "O3", "--num-workers", "1")
    (line,) = {line for line in str(failed.value).splitlines() if line.startswith("megatron_fp8: ")}
    assert f"--data-path {tmp_path}/chat: " in line and words in line and "Traceback" not in line
