"""`megatron-fp8 build -- COMMAND`: its lone ranks call the same operations as every rank of the job."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from launch import ROOT
from megatron_runs import run_megatron

from megatron_fp8.cli import main
from megatron_fp8.flags.command import flags_of
from megatron_fp8.tools.rehearsal import ahead
from megatron_fp8.tools.rehearsal.job import Job

SCRIPT = "tests/scripts/ops_called.py"
JOB = """--bf16 --num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --use-distributed-optimizer
--position-embedding-type rope --micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --num-workers 0
--tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 1 --eval-interval 2 --split 98,1,1 --log-interval 1"""


def called(folder: Path, rank: int) -> set[str]:
    """The kinds of calls (tests/scripts/ops_called.py)."""
    return set((folder / f"rank-{rank}.txt").read_text().splitlines())


def for_triton(kinds: set[str]) -> set[str]:
    """The kinds with numbers reduced to what Triton looks at: another rank has another share of a weight or vocabulary.
    """

    def divides(number: re.Match) -> str:
        n = int(number[0])
        return "1" if n == 1 else "16n" if n % 16 == 0 else "n"

    return {re.sub(r"\b\d+\b", divides, kind) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "ranks", "flags"),
    [
        (2, 16, "--tensor-model-parallel-size 4 --sequence-parallel --overlap-grad-reduce --global-batch-size 32 "
         "--fp8-level O3 --fp8-lm-head --fp8-log-interval 4"),
        (3, 6, "--global-batch-size 16 --fp8-level O1 --fp8-sharpness-interval 4 --overlap-grad-reduce"),
        (2, 4, "--global-batch-size 32 --fp8-level O2 --num-layers-per-virtual-pipeline-stage 1 --fp8-grad-accum fp8"),
    ],
)  # fmt: skip
def test_every_rank_of_a_stage_calls_what_its_lone_rank_has_called(tmp_path, stages, ranks, flags):
    job, alone, together = [*JOB.split(), *flags.split()], tmp_path / "alone", tmp_path / "together"
    job += ["--pipeline-model-parallel-size", str(stages)]
    alone.mkdir()
    together.mkdir()
    run_megatron(ranks, job, script=SCRIPT, env={"OPS_CALLED": str(together)})
    command = [sys.executable, "tests/scripts/build_without_gpu.py", "build", "--", "torchrun", "--nproc-per-node"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPS_CALLED": str(alone), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(ranks), SCRIPT, *job], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=900)  # fmt: skip
    of_stage = ranks // stages
    for stage in range(stages):
        said = f"[build] rank {stage * of_stage} of {ranks}, pipeline stage {stage}: 0 kernels compiled in 0 s, 0 were"
        assert said in done.stdout, done.stdout + done.stderr
        expected = called(alone, stage * of_stage)
        assert len(expected) > 10
        assert called(together, stage * of_stage) - expected == set()
        for rank in range(stage * of_stage, (stage + 1) * of_stage):
            assert for_triton(called(together, rank)) - for_triton(expected) == set()
    assert done.returncode == 1 and done.stderr.endswith("no kernel was launched: the ranks saw no GPU\n")


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["build", "--gpus", "4", "--", "pretrain_gpt_fp8.py", *JOB.split()]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("megatron-fp8 build: there is no GPU here, so nothing was compiled. ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--jobs 2 -- pretrain_gpt_fp8.py --bf16", "--jobs 2: works only without a job's command behind --; remove it"),
        ("--gpus 2", "--gpus 2: works only with a job's command behind --; remove it"),
        ("--timeout 9", "--timeout 9: works only with a job's command behind --; remove it"),
        ("--", "the command names no script; give the whole command: -- torchrun ... SCRIPT.py FLAGS"),
        ("--gpus 2 -- torchrun --nproc-per-node 4 pretrain_gpt_fp8.py --bf16",
         "--gpus 2: the command starts 4 processes; remove --gpus, or change the command"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words, line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(["build", *words.split()])
    assert end.value.code == 2 and capsys.readouterr().err == f"megatron_fp8: {line}\n"


@pytest.mark.parametrize(
    ("stages", "by_stage_first", "ranks"),
    [(1, False, {0: 0}), (2, False, {0: 0, 1: 16}), (8, False, {0: 0, 1: 4, 7: 28}), (8, True, {0: 0, 1: 2, 7: 14})],
)
def test_first_second_and_last_stage(stages, by_stage_first, ranks):
    a = Namespace(pipeline_model_parallel_size=stages, tensor_model_parallel_size=2)
    a.use_tp_pp_dp_mapping = by_stage_first
    assert ahead.ranks_of_stages(a, 32) == ranks


def test_periodic_work_is_done_in_the_second_step():
    """Evaluation and statistics have kernels of their own, and so do the other steps."""
    a = Namespace(virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_size=1, data_parallel_size=4)
    a.global_batch_size, a.micro_batch_size, a.rampup_batch_size, a.step_batch_size_schedule = 64, 2, None, None
    a.vocab_size, a.eval_iters, a.tensorboard_dir, a.wandb_project = 256, 10, "logs", None
    a.fp8_log_interval, a.fp8_sharpness_interval, a.fp8_log_grad_snr = None, None, None
    given = list(flags_of("--num-layers 96 --tensorboard-dir logs --fp8-sharpness-interval 50".split()))

    def flags() -> dict[str, list[str]]:
        return dict(flags_of(ahead.flags_of_build(Job(given, args=a))))

    found = flags()
    assert found["--num-layers"] == ["96"] and found["--eval-iters"] == ["1"] and "--tensorboard-dir" not in found
    assert found["--fp8-log-interval"] == ["2"] and found["--fp8-sharpness-interval"] == ["50"]
    a.tensorboard_dir, a.fp8_sharpness_interval, a.eval_iters = None, 50, 0
    found = flags()
    assert found["--fp8-sharpness-interval"] == ["2"] and found["--eval-iters"] == ["0"]
    assert "--fp8-log-interval" not in found
