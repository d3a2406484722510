"""`megatron-fp8 rehearse` from the command line: jobs that pass, that cannot start, and that fail on the way."""

import tempfile
from pathlib import Path

import pytest
from launch import ROOT, RunFailed, forked

nightly = pytest.mark.slow
pytestmark = pytest.mark.timeout(1600)
FLAGS = """--num-layers 24 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 2048
--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 256 --train-samples 1000000
--lr-warmup-samples 1000 --lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 50303
--use-distributed-optimizer --overlap-grad-reduce --save /nowhere/at/all --save-interval 500 --tensorboard-dir /logs
--eval-interval 1000 --fp8-level O3"""
TORCHRUN = "torchrun --nnodes 4 --nproc-per-node 8"


def rehearse(command: str, *own: str) -> tuple[int, str]:
    """The exit code, and the page. The verb is forked: what it imports first, a warm process has."""
    words = ["-m", "megatron_fp8.cli", "rehearse", *own, "--", *command.split()]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        try:
            return 0, "\n".join(forked(1, words, Path(log.name), timeout=1500, env={"CUDA_VISIBLE_DEVICES": ""}))
        except RunFailed as failed:
            return failed.code, Path(log.name).read_text()


def test_a_job_passes(tmp_path):
    report, probes = tmp_path / "report.json", tmp_path / "probes"
    report.write_text("mine")
    layout = f"--tensor-model-parallel-size 2 --fp8-probe-step 2 --fp8-probe-dir {probes}"
    command = f"MEGATRON_FP8_REPORT={report} {TORCHRUN} pretrain_gpt_fp8.py {FLAGS} {layout}"
    code, said = rehearse(command, "--ranks", "2", "--folder", str(tmp_path / "kept"))
    assert code == 0, said[-3000:]
    page = (tmp_path / "kept/page.md").read_text()
    for line in (
        "# Rehearsal: passed",
        "- O3 on 32 GPUs: TP 2 x PP 1, DP 16.",
        "- Here: 2 ranks on the CPU, the same with DP 1.",
        "repeats step 4: loss",
        "the same to the last digit",
        "- An evaluation: loss",
        "| --num-layers | 24 | 2 |",
        "| data parallelism | 16 | 1 |",
        "| GB on a rank; TP 2, PP 1, DP 16 | stock BF16 | O3 |",
        "Left out: --tensorboard-dir --fp8-probe-step --fp8-probe-dir",
    ):
        assert line in page, page
    kept = {"page.md", *(f"{start}.{form}" for start in ("train", "resume") for form in ("log", "jsonl"))}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == kept
    assert report.read_text() == "mine" and not probes.exists()  # the job's files are not touched


@nightly
def test_a_job_of_stages_passes_with_two_replicas(tmp_path):
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    code, said = rehearse(f"{TORCHRUN} pretrain_gpt_fp8.py {FLAGS} {layout}", "--folder", str(tmp_path))
    assert code == 0, said[-3000:]
    page = (tmp_path / "page.md").read_text()
    assert "- O3 on 32 GPUs: TP 2 x PP 2, sequence parallel, DP 8." in page
    assert "- Here: 8 ranks on the CPU, the same with DP 2." in page and "| --num-layers | 24 | 4 |" in page


@nightly
def test_a_job_of_context_parallelism_passes(tmp_path):
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --attention-dropout 0"
    code, said = rehearse(f"{TORCHRUN} pretrain_gpt_fp8.py {FLAGS} {layout}", "--folder", str(tmp_path))
    assert code == 0, said[-3000:]
    page = (tmp_path / "page.md").read_text()
    assert "- O3 on 32 GPUs: TP 2 x PP 1, sequence parallel, CP 2, DP 8." in page
    assert "- Here: 8 ranks on the CPU, the same with DP 2." in page and "the same to the last digit" in page


@nightly
def test_a_job_that_cannot_start(tmp_path):
    code, said = rehearse(f"{TORCHRUN} pretrain_gpt_fp8.py {FLAGS} --global-batch-size 7")
    assert code == 2 and "# Rehearsal: FAILED" in said and "would not start on 32 GPUs" in said
    assert "Traceback" not in said
    code, said = rehearse(f"{TORCHRUN} pretrain_gpt_fp8.py {FLAGS} --fp8-level O0")
    assert code == 2 and "megatron_fp8: rehearse: the command has no --fp8-level" in said


@nightly
def test_a_rank_that_fails_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"""import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from megatron_fp8.plugin import install
install()
import megatron.training.training as training
stock, calls = training.train_step, []
def train_step(*given, **named):
    calls.append(1)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("a planted fault")
    return stock(*given, **named)
training.train_step = train_step
runpy.run_path({str(ROOT / "pretrain_gpt_fp8.py")!r}, run_name="__main__")
"""
    )
    code, said = rehearse(f"{TORCHRUN} {script} {FLAGS} --tensor-model-parallel-size 2")
    assert code == 1 and "FAILED in the start to train: rank 1 of 4 failed first, with exit code 1" in said
    assert "a planted fault" in said
