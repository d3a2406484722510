"""`megatron-fp8 rehearse --full`: one rank of a larger job trains alone, in stock's fake process group."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
from launch import ROOT, RunFailed, forked

from megatron_fp8.errors import UserError
from megatron_fp8.flags.command import Launch
from megatron_fp8.tools.rehearsal import full
from megatron_fp8.tools.rehearsal.job import Job
from megatron_fp8.tools.rehearsal.one_rank import Ran

JOB = """torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt_fp8.py --bf16 --num-layers 4 --hidden-size 64
--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 64
--train-iters 20 --lr 1e-3 --data-path /no/such/data --tokenizer-type GPT2BPETokenizer --vocab-size 256
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --eval-iters 0 --eval-interval 1000 --save /no/such/folder
--save-interval 10"""


def rehearse(log: Path, *argv: str, flags: str = "--fp8-level O3", job: str = JOB) -> str:
    """The verb's output. The verb is forked; of the processes that a user sees, only its rank starts cold here."""
    command = ["-m", "megatron_fp8.cli", "rehearse", "--full", *argv, "--", *job.split(), *flags.split()]
    return "\n".join(forked(1, command, log, timeout=900))


def iterations(log: str) -> list[str]:
    return [line for line in log.splitlines() if re.search(r"iteration +\d+/", line)]


def trains(tmp_path, *argv: str, flags: str, job: str = JOB) -> str:
    """The page of a rank that made all its steps, with none skipped."""
    page = rehearse(tmp_path / "verb.log", *argv, "--folder", str(tmp_path), flags=flags, job=job)
    steps = iterations((tmp_path / "full.log").read_text())
    assert len(steps) == full.STEPS
    for step in steps:
        assert re.search(r"grad norm: [\d.]+ \| number of skipped iterations:   0 \|", step), step
    assert not os.path.exists("/no/such")  # the job's folders are left alone
    return page


def test_the_first_rank_of_the_last_stage(tmp_path):
    """Its collectives return at once, and what it receives is finite: no step is skipped."""
    page = trains(tmp_path, "--rank", "9", flags="--fp8-level O3")
    assert "Rank 8 of 16 at full size: passed" in page and "You asked for rank 9" in page
    assert "O3: TP 2, PP 2 (stage 1), DP 4; 3 steps of 3 micro-batches of 2" in page
    estimate = re.search(r"the estimate: ([\d.]+) GB held, ([\d.]+) at the peak", page)
    assert 0 < float(estimate[1]) <= float(estimate[2]) < 1
    log = (tmp_path / "full.log").read_text()
    assert "--fake-process-group" in log and "/no/such" not in log and "lm loss: 5.5" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--fp8-level O1", "--fp8-level O2", "--fp8-level O3 --num-layers-per-virtual-pipeline-stage 1", ""]
)
def test_other_ranks(tmp_path, flags):
    """Levels O1 and O2, virtual stages, and stock with its local layers, which need no Transformer Engine."""
    local = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    local += "--no-gradient-accumulation-fusion"
    job = JOB if flags else JOB.replace("--sequence-parallel", "")  # those layers do not support it
    page = trains(tmp_path, "--rank", "0", flags=flags or local, job=job)
    assert "(stage 0)" in page and "the estimate:" in page


GATHER = """
import torch
import torch.distributed as dist
from megatron_fp8.ranks import rank
from megatron_fp8.tools.rehearsal.full_rank import receive_zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

receive_zeros()
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
own = torch.rand(6) + 1
weights = torch.full((24,), torch.nan)
weights[6:12] = own
dist.all_gather_into_tensor(weights, weights[6:12])
assert torch.equal(weights[6:12], own), weights
received = torch.full((6,), torch.nan)
dist.reduce_scatter_tensor(received, torch.rand(24))
dist.irecv(received, 0)
dist.recv(tensor=received, src=0)
assert received.isfinite().all()
assert rank() == 0  # who searches GEMMs, and keeps what is found: there is no other process
"""


def test_a_gather_in_place_leaves_the_ranks_own_part(tmp_path):
    """It used to be zeroed with the rest before it was sent. Weights of zero with other remainders gave NaN at O2."""
    (tmp_path / "gather.py").write_text(GATHER)
    forked(1, [str(tmp_path / "gather.py")], tmp_path / "log", timeout=250)  # else RunFailed


@pytest.mark.slow  # of stages the last stays
def test_a_stage_that_reads_no_data_trains(tmp_path):
    """It used to wait for rank 0 to announce data, made no step, and passed."""
    job = JOB.replace("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4")
    assert "(stage 2)" in trains(tmp_path, "--rank", "8", flags="--fp8-level O2", job=job)


@pytest.mark.slow
def test_a_rank_of_context_parallelism(tmp_path):
    flags = "--fp8-level O3 --context-parallel-size 2 --attention-dropout 0 --micro-batch-size 4"
    page = trains(tmp_path, "--rank", "0", flags=flags)
    assert "O3: TP 2, PP 2 (stage 0), CP 2, DP 2; 3 steps of 3 micro-batches of 4" in page


@pytest.mark.slow
def test_a_plain_fake_process_group_trains_too(tmp_path):
    """Stock's own, which receives garbage: steps may be skipped, but no rank fails."""
    flags = " ".join(JOB.split()).partition("pretrain_gpt_fp8.py")[2]
    flags = flags.replace("--data-path /no/such/data", "--mock-data").replace("GPT2BPETokenizer", "NullTokenizer")
    flags = flags.replace("--train-iters 20", "--train-iters 2")
    flags = flags.replace("--save /no/such/folder --save-interval 10", "--fake-process-group --fp8-level O3")
    flags += " --log-interval 1 --num-workers 0"
    for rank in ("0", "8"):
        env = dict(os.environ, RANK=rank, LOCAL_RANK="0", WORLD_SIZE="16", MASTER_ADDR="127.0.0.1", MASTER_PORT="29499",
                   CUDA_DEVICE_MAX_CONNECTIONS="1")  # fmt: skip
        command = [sys.executable, "pretrain_gpt_fp8.py", *flags.split()]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr
        assert len(iterations(run.stdout)) == 2


@pytest.mark.slow
def test_a_rank_that_the_job_does_not_have_and_one_without_full(tmp_path):
    with pytest.raises(RunFailed) as failure:
        rehearse(tmp_path / "log", "--rank", "16")
    assert failure.value.code == 2
    assert "--rank 16: the job has ranks 0 to 15; give one of them\n" in (tmp_path / "log").read_text()


def test_transformer_engines_attention_is_refused_or_reported():
    """A context-parallel rank used to run without it, at O0 and with --fp8-attention te, and nothing said so."""
    args = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=1)
    args.micro_batch_size = args.context_parallel_size = 1
    with pytest.raises(UserError, match=r"^rehearse --full: --context-parallel-size 2: a rank with Transformer"):
        full.rehearse(Launch([], [], 2), Job([], context=2, args=args), 2, Namespace(rank=0), {})
    job = Job([], args=args, level="O3", unseen=("--fp8-attention te",))
    lines = full._page(job, 1, 0, 0, 1, Ran([], 0, 9.0, 60, [], {}))
    assert "- --fp8-attention te: left out, because it needs Transformer Engine's attention." in list(islice(lines, 4))


def test_measured_and_estimated_stand_side_by_side(monkeypatch):
    """With the figures that a rank's last line has on a GPU."""
    from megatron_fp8.tools.perf import job_flags

    words = [*" ".join(JOB.split()).partition("pretrain_gpt_fp8.py")[2].split(), "--fp8-level", "O3"]
    args = job_flags.parse(words).args
    args.virtual_pipeline_model_parallel_size = None
    job = Job([], args=args, cells={"grad_accum": "bf16"}, level="O3")
    found = json.loads('{"held": 90e6, "peak": 91e6, "reserved": 200e6, "device": 900e6, "there": 150e9}')
    text = "\n".join(full._figures(job, 16, 1, 24, found))
    assert re.search(r"\| held \| 0\.09 \| 0\.09 \| [+-]\d\.\d% \|", text)
    assert "| in use on the GPU, of 150.0 | 0.90 | | |" in text
    job.flags = [("--attention-backend", ["unfused"])]  # the level has changed it in args
    assert "- No estimate: --attention-backend unfused: not modelled; remove it" in full._figures(job, 16, 1, 24, found)
