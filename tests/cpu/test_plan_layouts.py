"""Layouts from `megatron-fp8 plan` pass Megatron's own validation, with the sizes that the plan counted."""

import subprocess
import sys

import pytest
from launch import ROOT

FLAGS = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 50304 --bf16
--micro-batch-size 1 --global-batch-size 512 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--sequence-parallel --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --mock-data --lr 1e-4
--train-iters 10 --eval-interval 100 --fp8-level O3"""
SCRIPT = f'''
from megatron_fp8.tools.rehearsal import ranks
ranks.warm_up({str(ROOT)!r})  # which a GPU must not outlive: hence a process of its own
from megatron_fp8.tools.perf import hardware, job_flags, plan
from megatron_fp8.flags.command import take_apart
from megatron_fp8.tools.rehearsal.job import examine

words = {FLAGS.split()!r}
flags = job_flags.parse(words)
found = [c for c in plan.search(flags, 128, "O3", hardware.load("h100-80gb-sxm"), None) if c.best]
found.sort(key=lambda c: -c.best.tokens_a_second)
kinds = {{(w.virtual > 1, w.pipeline > 1, w.recompute): w for w in (c.best.workload for c in found[::-1])}}
for w in kinds.values():
    more = ["--tensor-model-parallel-size", w.tensor, "--pipeline-model-parallel-size", w.pipeline,
            "--micro-batch-size", w.micro_batch]
    if w.virtual > 1:
        more += ["--num-virtual-stages-per-pipeline-rank", w.virtual]
    if w.recompute != "none":
        more += ["--recompute-granularity", w.recompute]
    if w.recompute == "full":
        more += ["--recompute-method", "uniform", "--recompute-num-layers", 1]
    words_of = ["torchrun", "--nnodes", "16", "--nproc-per-node", "8", "pretrain_gpt_fp8.py", *words, *map(str, more)]
    job = examine(take_apart(words_of), 128)
    assert not job.error, (w, job.error)
    a = job.args
    assert a.data_parallel_size == w.data and (a.virtual_pipeline_model_parallel_size or 1) == w.virtual
    print("ok", w.tensor, w.pipeline, w.virtual, w.recompute)
'''


@pytest.mark.slow
def test_megatron_takes_what_a_plan_proposes():
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok ") >= 3
