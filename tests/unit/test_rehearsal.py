"""A rehearsal's flags: for every kind of job they pass Megatron's validation, with the job's own layout."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import plants
import pytest
from commands import error_of
from lab_runs import gone, wait_for
from launch import ROOT, forked
from megatron_runs import script_path

from megatron_fp8.flags.command import Launch, flags_of, job_of, take_apart
from megatron_fp8.flags.usage import one_line_usage_errors
from megatron_fp8.tools.rehearsal import full, main, one_rank, page, room, shrink
from megatron_fp8.tools.rehearsal import job as examined
from megatron_fp8.tools.rehearsal.job import examine

SCRIPT = "pretrain_gpt_fp8.py"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        (f"torchrun --nproc-per-node 8 --nnodes=16 {SCRIPT} --bf16", 128),
        (f"torchrun --nproc_per_node=8 {SCRIPT} --bf16", 8),
        (f"python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 -m megatron_fp8 {SCRIPT} --bf16", 8),
        (f"FOO=1 srun -N16 --ntasks-per-node 8 --kill-on-bad-exit=1 python -u {SCRIPT} --bf16", 128),
        (f"srun -n 128 python {SCRIPT} --bf16", 128),
        (f"srun -N 4 --ntasks-per-node=8 --gpus-per-node=1 python {SCRIPT} --bf16", 32),
        (f"srun -N 4 --gpus-per-node=h100:8 --ntasks-per-node 4 python {SCRIPT} --bf16", 16),
        (f"srun -N 4 --gpus-per-node=h100:8 python {SCRIPT} --bf16", 32),
        (f"srun --nodes 4 torchrun --nnodes 4 --nproc-per-node 8 {SCRIPT} --bf16", 32),
        (f"python {SCRIPT} --bf16", 1),
        (f"torchrun --nproc-per-node gpu {SCRIPT} --bf16", None),
        (f"torchrun --nnodes --nproc-per-node 8 {SCRIPT} --bf16", None),
        (f"torchrun --nnodes 0 --nproc-per-node 8 {SCRIPT} --bf16", None),
        (f"torchrun --nnodes 4 --nproc-per-node {'8' * 5000} {SCRIPT} --bf16", None),  # more digits than int() reads
        (f"srun -n ² python {SCRIPT} --bf16", None),
    ],
)
def test_a_launcher_says_how_many(command, gpus):
    found = take_apart(command.split())
    assert (found.gpus, found.flags, found.script[-1]) == (gpus, [("--bf16", [])], SCRIPT)
    assert found.script[:-1] == (["-m", "megatron_fp8"] if "-m megatron_fp8" in command else [])


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("DATA=/x NAME=a=b srun -N 2 torchrun --nnodes 2 --nproc-per-node 8", {"DATA": "/x", "NAME": "a=b"}),
        ("env CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("torchrun --nproc-per-node=8", {}),
    ],
)
def test_variables_in_front_are_the_jobs(front, expected):
    words = f"{front} {SCRIPT} --bf16".split()
    assert take_apart(words).variables == job_of(words).variables == expected


# Flags that name files and are kept: files that are read, flags of other scripts, and flags that only say how.
READ_OR_OF_ANOTHER = """--args-file --block-data-path --disable-flight-recorder-dump-on-timeout
--disable-flight-recorder-extra-dump-on-exec --disable-mamba-mem-eff-path --embedding-path --evidence-data-path
--heterogeneous-layers-config-path --logits-load-dir --moe-routing-trace-dump-weights
--no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec --rl-profile-dir
--te-precision-config-file --titles-data-path""".split()


def test_listed_flags_exist_in_megatrons_parser(parser):
    """Every listed flag exists, flags with two names are listed under both, and no kept flag writes to a file."""
    groups = shrink._SIZES, shrink.LENGTH, shrink.FOLDERS, shrink.DATA, shrink.LEFT_OUT
    listed = {name for group in groups for name in group}
    names: dict[str, set[str]] = {}
    for action in parser._actions:
        names.setdefault(action.dest, set()).update(action.option_strings)
    assert not listed - set().union(*names.values())
    for options in names.values():
        positive = {option for option in options if not option.startswith(("--no-", "--disable-"))}
        assert not listed & options or positive <= listed, options
    files = {option for options in names.values() for option in options
             if {"dir", "path", "file", "filename", "folder", "dump"} & set(option.strip("-").split("-"))}  # fmt: skip
    assert sorted(files - listed) == sorted(READ_OR_OF_ANOTHER)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--gpus 4", "--gpus 4: the command starts 8 processes; remove --gpus, or change the command"),
        *((f"{flag} 0", f"{flag} 0: use 1 or more") for flag in ("--gpus", "--ranks", "--timeout")),
        ("--folder README.md", "--folder README.md: File exists; use another"),
    ],
)
def test_a_mistake_in_a_rehearsals_own_flags_is_one_line(flags, line):
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    one_line_usage_errors(parser)
    words = [*flags.split(), "--", *f"torchrun --nproc-per-node 8 {SCRIPT} --bf16".split()]
    assert error_of(lambda: main.run(parser.parse_args(words))) == line


# A rank that writes files for ever, and so does its child, like a process of Megatron's that saves.
SAVES = """
import os, sys
os.fork()
os.write(1, f"{os.getpid()}\\n".encode())
number = 0
while True:
    number += 1
    open(f"{os.path.dirname(os.environ['MEGATRON_FP8_METRICS'])}/{os.getpid()}-{number % 1000}", "w").close()
"""
INTERRUPTED = """
import argparse, os, sys, tempfile
from pathlib import Path
from megatron_fp8.tools.rehearsal import main

def start(words):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print(folder, flush=True)
        main._start("train", words, 1, Path(folder), 600, os.environ)

main.take_apart = start
parser = argparse.ArgumentParser()
main.add_arguments(parser)
main.run(parser.parse_args(["train.py"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_rehearsal_leaves_no_processes_and_no_folder(number, tmp_path):
    """They used to stay for good. After a SIGKILL the folder must stay."""
    (tmp_path / "train.py").write_text(SAVES)
    command = [sys.executable, "-c", INTERRUPTED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as rehearsal:
        log = tmp_path / rehearsal.stdout.readline().strip() / "train.log"
        wait_for(lambda: log.is_file() and log.read_text().count("\n") == 2)
        processes = [int(line) for line in log.read_text().split()]
        rehearsal.send_signal(number)
        rehearsal.wait(60)
    for process in processes:
        wait_for(lambda process=process: gone(process), 10)
    assert log.parent.exists() == (number == signal.SIGKILL)


def test_flags_keep_their_values():
    found = take_apart(f"{SCRIPT} --recompute-modules mlp core_attn --lr=1e-3 --min-lr -1 --data-path 1 a".split())
    assert found.flags == [
        ("--recompute-modules", ["mlp", "core_attn"]),
        ("--lr", ["1e-3"]),
        ("--min-lr", ["-1"]),
        ("--data-path", ["1", "a"]),
    ]


@pytest.mark.parametrize(
    ("command", "line"),
    [("torchrun --nproc-per-node 8", "names no script"), ("torchrun nowhere/train.py --bf16", "no such script here")],
)
def test_a_command_without_a_script_is_one_line(command, line):
    with pytest.raises(ValueError, match=line):
        take_apart(command.split())


COMMON = "--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --lr 1e-4 --train-samples 1000000"
GPT = f"{COMMON} --seq-length 2048 --max-position-embeddings 4096 --position-embedding-type rope --disable-bias-linear"
JOBS = {  # name: (GPUs, flags)
    "175b": (
        128,
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --tensor-model-parallel-size 8 "
        "--sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 512 "
        "--use-distributed-optimizer --overlap-grad-reduce --untie-embeddings-and-output-weights "
        "--lr-warmup-samples 1000 --fp8-level O3 --load /nowhere --tensorboard-dir /logs "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 7",
    ),
    "interleaved": (
        64,
        "--num-layers 48 --hidden-size 6144 --num-attention-heads 48 --group-query-attention --num-query-groups 8 "
        "--swiglu --ffn-hidden-size 16384 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 3 --micro-batch-size 2 --fp8-level O2 "
        "--step-batch-size-schedule 0:32,200M:256 --lr-decay-style WSD --lr-wsd-decay-samples 10 "
        "--eval-global-batch-size 32",
    ),
    "uneven": (
        16,
        "--num-layers 30 --hidden-size 4096 --num-attention-heads 32 --pipeline-model-parallel-size 4 "
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 8 --micro-batch-size 2 "
        "--global-batch-size 64 --fp8-level O1",
    ),
    "accounted": (
        16,
        "--num-layers 30 --hidden-size 4096 --num-attention-heads 32 --pipeline-model-parallel-size 4 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --micro-batch-size 2 "
        "--global-batch-size 64 --fp8-level O1",
    ),
    "by a layout": (
        16,
        "--num-layers 6 --hidden-size 4096 --num-attention-heads 32 --pipeline-model-parallel-size 4 "
        "--pipeline-model-parallel-layout E|ttt|ttt|L --fp8-attention torch "
        "--micro-batch-size 2 --global-batch-size 64 --fp8-level O1",
    ),
    "context": (
        32,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2 --use-distributed-optimizer --context-parallel-size 2 --fp8-attention te --cp-comm-type p2p",
    ),
    "context of our own": (
        32,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2 --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 4 --attention-dropout 0",
    ),
    "of experts": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2 --num-experts 4 --disable-bias-linear --swiglu --moe-latent-size 64",
    ),
    "Llama's data elsewhere": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2 --data-path /data/x --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/t",
    ),
    "its size given": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2 --data-path /data/x --tokenizer-type NullTokenizer --vocab-size 128256",
    ),
    "evaluates never": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O2",
    ),
    "175b on too few": (
        8,
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --tensor-model-parallel-size 8 --swiglu "
        "--micro-batch-size 1 --global-batch-size 8 --fp8-level O1 --save /checkpoints --save-interval 100",
    ),
    "few query groups": (
        16,
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 2 "
        "--tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 4 --global-batch-size 64 --fp8-level O3 "
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2",
    ),
    "experts": (
        64,
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --num-experts 64 --expert-model-parallel-size 8 "
        "--moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 "
        "--moe-layer-freq ([0]+[1]*23) --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 512 "
        "--fp8-level O1 --moe-router-load-balancing-type aux_loss",
    ),
    "named layers": (
        8,
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1 --global-batch-size 64 "
        "--fp8-level O3 --fp8-bf16-layers decoder.layers.31.*,*.linear_fc1",
    ),
    "defaults": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 64 "
        "--swiglu --fp8-level O3 --window-size 1023,0",
    ),
    "an FP8 head": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 64 "
        "--fp8-level O3 --fp8-lm-head --make-vocab-size-divisible-by 1 --vocab-size 50272 "
        "--tensor-model-parallel-size 2",
    ),
    "7 in a batch": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 1 --global-batch-size 7 "
        "--fp8-level O3",
    ),
    "saves never": (
        8,
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 "
        "--fp8-level O1 --save /checkpoints",
    ),
    "no such number": (8, "--num-layers many --fp8-level O1"),
    "no such level": (8, "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --fp8-level O7"),
    "data elsewhere": (
        8,
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 64 "
        "--fp8-level O3 --data-path /data/pile_text_document --tokenizer-type GPT2BPETokenizer "
        "--vocab-file /data/vocab.json --merge-file /data/merges.txt",
    ),
}


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory) -> dict[str, dict]:
    """{name of a job: the output of tests/scripts/shrunk_jobs.py for it}."""
    lines = []
    for name, (gpus, flags) in JOBS.items():
        common = GPT
        if "--data-path" in flags:
            common = GPT.replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 50303", "")
        common = common if name == "evaluates never" else f"{common} --eval-interval 1000"
        lines.append(json.dumps({"gpus": gpus, "flags": [*common.split(), *flags.split()]}))
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs").write_text("\n".join(lines))
    command = [str(ROOT / "tests/scripts/shrunk_jobs.py"), str(folder / "jobs")]
    printed = forked(1, command, folder / "log", timeout=600, env={"PYTHONPATH": script_path()})
    found = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(found) == len(JOBS), printed[-25:]
    return dict(zip(JOBS, found, strict=True))


CANNOT = ("of experts", "evaluates never", "7 in a batch", "saves never", "no such level", "no such number")
SHRUNK = ("hidden_size", "num_layers", "num_query_groups", "num_attention_heads", "global_batch_size")


@pytest.mark.parametrize("name", [name for name in JOBS if name not in CANNOT])
def test_a_rehearsal_is_a_job_of_the_same_layout(shrunk, name):
    found = shrunk[name]
    assert "error" not in found and not found["rehearsal_error"], found
    for what, (before, after) in found["kept"].items():
        assert before == after or what in SHRUNK, what
    hidden, small = found["kept"]["hidden_size"]
    assert small < hidden / 4
    assert found["cells"][0] == found["cells"][1]
    assert found["ranks"] <= 64


def test_what_is_shrunk(shrunk):
    paper = shrunk["175b"]
    assert paper["ranks"] == 64 and paper["changes"]["data parallelism"] == [4, 2]
    assert paper["changes"]["--num-layers"] == [96, 8] and paper["changes"]["--num-attention-heads"] == [96, 8]
    assert paper["changes"]["micro-batches a step"] == [128, 5]
    assert paper["left_out"] == ["--load", "--tensorboard-dir"]
    assert paper["cells"][1]["grad_accum"] == "bf16"  # from 128 micro-batches
    assert shrunk["interleaved"]["changes"]["--num-layers"] == [48, 16]
    assert shrunk["interleaved"]["changes"]["--num-query-groups"] == [8, 4]
    assert shrunk["interleaved"]["changes"]["micro-batches a step"] == [32, 8]  # at the end of its schedule
    assert shrunk["uneven"]["changes"]["--num-layers"] == [30, 1 + 2 + 2 + 2]
    assert shrunk["uneven"]["changes"]["--decoder-first-pipeline-num-layers"] == [6, 1]
    for name in ("by a layout", "experts", "named layers"):
        assert "--num-layers" not in shrunk[name]["changes"]
    assert shrunk["experts"]["data"] == 8


WIDE = {
    "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16, "context_parallel_size": 1,
    "data_parallel_size": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_layout": None,
}  # fmt: skip
REPLICA = "one replica of the layout has 128 ranks"


@pytest.mark.parametrize(
    ("stages", "asked", "free", "said", "remedy"),
    [
        (16, None, room.Room(8e9), f"rehearse: {REPLICA}: 128 processes, some 19 GB of memory, and 8 GB are free here",
         "--pipeline-model-parallel-size 4"),
        (16, None, room.Room(1e12, 4096), f"rehearse: {REPLICA}: 128 processes, some 19 GB of memory, and 4096 more "
         "threads may start here", "--pipeline-model-parallel-size 4"),
        (16, 64, room.Room(1e12), f"--ranks 64: {REPLICA}", "--pipeline-model-parallel-size 8"),
        (2, None, room.Room(1e9), "rehearse: one replica of the layout has 16 ranks: 16 processes, some 2 GB of "
         "memory, and 1 GB are free here", "fewer pipeline stages, or a smaller --tensor-model-parallel-size,"),
        (16, None, room.Room(1e12), None, ""),
        (16, 128, room.Room(8e9), None, ""),
    ],
)  # fmt: skip
def test_too_many_ranks_for_this_machine_are_refused_before_they_start(stages, asked, free, said, remedy):
    job = argparse.Namespace(**WIDE | {"pipeline_model_parallel_size": stages})
    if said is None:
        assert shrink._data_parallel(job, 8 * stages, asked, free, 32) == 1
        return
    line = error_of(shrink._data_parallel, job, 8 * stages, asked, free, 32)
    starts = f"--ranks {8 * stages} starts it" + ("" if asked else " all the same")
    assert line == f"{said}; give the command {remedy} here, or take a larger machine; {starts}"


@pytest.mark.parametrize(
    ("own", "memory", "threads"),
    [("0::/slurm/job_7/step_0\n", 3000 + 500, 4096 - 96), ("9:pids:/\n4:memory:/box\n0::/\n", 2500 + 1, 100 - 5)],
)
def test_a_containers_and_a_jobs_limits_leave_less_than_the_machine(own, memory, threads, tmp_path, monkeypatch):
    """Of both versions of Linux's groups, from the process's own folder up to the root. Files' cache is given back."""
    files = {
        "slurm/job_7/memory.max": "9000", "slurm/job_7/memory.current": "6000",
        "slurm/job_7/memory.stat": "anon 1\ninactive_file 500\n",
        "slurm/memory.max": "max", "slurm/memory.current": "8000", "slurm/pids.max": "4096", "slurm/pids.current": "96",
        "memory/box/memory.limit_in_bytes": "5000", "memory/box/memory.usage_in_bytes": "2500",
        "memory/box/memory.stat": "inactive_file 7\ntotal_inactive_file 1\n",
        "memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "9",
        "memory/memory.stat": "", "pids/pids.max": "100", "pids/pids.current": "5", "own": own,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(room, "_MOUNT", tmp_path)
    monkeypatch.setattr(room, "_OWN", tmp_path / "own")
    assert room.here() == room.Room(memory, threads)
    (tmp_path / "own").unlink()
    free = room.here()
    assert free.threads is None and free.memory > 1e8 and free.ranks == int(free.memory / room.RANK_BYTES)


def test_what_would_fail_at_full_size(shrunk):
    (said,) = shrunk["175b on too few"]["warnings"]
    assert re.match(r"A rank holds [3-9]\d\d GB before the first activation; an H100 has 80 GB", said)
    (said,) = shrunk["175b"]["warnings"]
    assert said.startswith("--save: not given")


def test_whole_states_are_counted_if_each_rank_keeps_them(parser):
    """7B on 8 ranks at O1: 113 GB, and 44 with the distributed optimizer."""
    model = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 2 --global-batch-size 64 "
        "--eval-interval 1000 --fp8-level O1"
    )
    start = page.read("train", 0, 1.0, [], [])
    for flag, gb in (("", "113"), ("--use-distributed-optimizer", "")):
        job = examine(take_apart(f"{SCRIPT} {GPT} {model} {flag}".split()), 8)
        found = page.warnings(job, SimpleNamespace(data_parallel=1, ranks=1), page.Outcome(start, start))
        said = [line for line in found if "before the first activation" in line]
        assert said == [f"A rank holds {gb} GB before the first activation; an H100 has 80 GB, an H200 141."] * bool(gb)
        assert ("DP 8, with whole states |" in "\n".join(page._full_size(job))) == bool(gb)


def test_what_is_not_counted_at_full_size_is_named(shrunk):
    for name, what in (
        ("uneven", "uneven stages"), ("few query groups", "--first-last-layers-bf16"),
        ("named layers", "--fp8-bf16-layers decoder.layers.31.*,*.linear_fc1"),
    ):  # fmt: skip
        assert f"Not computed: `megatron-fp8 memory` does not count {what}." in shrunk[name]["page"]
        assert not any("GB before the first activation" in line for line in shrunk[name]["warnings"])
    assert "experts: exp_avg" in shrunk["experts"]["page"] and "Not computed" not in shrunk["experts"]["page"]


def test_a_job_that_cannot_start_says_why(shrunk):
    assert "--global-batch-size 7" in shrunk["7 in a batch"]["error"] and "\n" not in shrunk["7 in a batch"]["error"]
    assert "--save-interval" in shrunk["saves never"]["error"]
    assert shrunk["no such level"]["error"].startswith("--fp8-level O7: ")
    assert "--num-layers many: use a whole number" in shrunk["no such number"]["error"]


def test_what_cannot_be_known_here_is_said(shrunk):
    assert "install Transformer Engine" in shrunk["of experts"]["error"]
    assert shrunk["evaluates never"]["error"].startswith("--eval-interval: missing")
    context = shrunk["context"]
    assert [line.partition(":")[0] for line in context["warnings"][:3]] == [
        "--context-parallel-size 2", "--fp8-attention te", "--cp-comm-type p2p"]  # fmt: skip
    assert "DP 16" in context["page"] and "CP 2" in context["page"] and "TP 1, PP 1, CP 2, DP 16 " in context["page"]
    own = shrunk["context of our own"]
    assert not any("--context-parallel-size" in line for line in own["warnings"])
    assert "DP 4" in own["page"] and "CP 4" in own["page"] and "TP 2, PP 1, CP 4, DP 4 " in own["page"]
    assert own["changes"]["--seq-length"][1] % (4 * 16) == 0
    assert "Counted with a vocabulary of 50257 tokens" in shrunk["Llama's data elsewhere"]["page"]
    assert shrunk["an FP8 head"]["changes"]["--vocab-size"] == [50272, 256]
    for name in ("its size given", "data elsewhere"):
        assert "Counted with" not in shrunk[name]["page"]
    assert shrunk["its size given"]["changes"]["--vocab-size"] == [128256, 255]


def test_torchs_attention_is_rehearsed(shrunk):
    assert not any("--fp8-attention" in line for line in shrunk["by a layout"]["warnings"])


def test_sizes_in_a_checkpoint_are_not_known(tmp_path):
    with pytest.raises(ValueError, match=r"^--use-checkpoint-args: the sizes are in a checkpoint; give them as flags"):
        examine(take_apart(f"{SCRIPT} --use-checkpoint-args --load {tmp_path}".split()), 8)


def test_a_bug_of_ours_in_a_jobs_flags_shows_its_traceback(parser, monkeypatch, capfd):
    from megatron_fp8 import parsed_runs

    launch = take_apart(f"{SCRIPT} {GPT} {JOBS['175b'][1]}".split())
    for planted, said in (
        (plants.bug(parsed_runs, ValueError), "ValueError: not enough values to unpack (expected 2, got 1)"),
        (plants.bug(parsed_runs, AssertionError), "AssertionError:"),
        (plants.MISTAKE, "--flag 3: is wrong; use 4"),
    ):
        monkeypatch.setattr(parsed_runs, "check_faults", planted)
        assert examine(launch, 128).error == said
        assert ("Traceback" in capfd.readouterr().err) == (planted is not plants.MISTAKE)


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt, BrokenPipeError])
def test_the_examining_process_is_silent_about_a_ctrl_c(monkeypatch, capfd, interrupted):
    """A Ctrl-C at the terminal reaches all processes, or only the waiting one, which then no longer reads."""
    monkeypatch.setattr(examined, "_examine", plants.function(__file__, f"raise {interrupted.__name__}"))
    with pytest.raises(RuntimeError, match="could not be examined"):
        examined._in_a_fork(take_apart([SCRIPT]), [], 8, False)
    assert capfd.readouterr().err == ""


def test_a_jobs_folder_and_flags_of_another_script(parser, tmp_path):
    """The folder is not made, and a run may hold it. Unknown flags are refused if no other script can mean them."""
    command = f"{SCRIPT} {GPT} {JOBS['175b'][1]} --save {tmp_path}/new --save-interval 5 --eval-interval 1000"
    assert examine(take_apart(command.split()), 128).error == "" and not list(tmp_path.iterdir())
    launch = take_apart(f"{command} --num-layer 3".split())
    assert "--num-layer 3, did you mean --num-layers?" in examine(launch, 128).error
    assert examine(replace(launch, script=["other.py"]), 128).error == ""


@pytest.mark.parametrize("gpus, flag", [(8, "--fp8-levle O3"), (3, "--tensor-model-parallel-size 2")])
def test_a_mistake_in_the_command_is_a_page_and_one_line(parser, monkeypatch, capsys, gpus, flag):
    """Exit code 2, as docs/rehearse.md says; 1 is for a failure on the way."""
    monkeypatch.setattr(main.ranks, "warm_up", lambda folder: None)
    own = argparse.ArgumentParser()
    main.add_arguments(own)
    own.set_defaults(format="markdown")
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --eval-interval 1000"
    command = f"torchrun --nproc-per-node {gpus} {SCRIPT} {GPT} {model} --fp8-level O3 {flag}"
    line = error_of(main.run, own.parse_args(["--", *command.split()]))
    page = capsys.readouterr().out
    assert "# Rehearsal: FAILED" in page and line in page, page
    assert ("--fp8-levle" if gpus == 8 else "world size (3) is not divisible") in line


def test_a_blend_in_one_word_is_no_data_that_is_elsewhere(parser):
    launch = take_apart(f"{SCRIPT} {GPT} {JOBS['175b'][1]} --eval-interval 1000".split())
    flags = [(flag, values) for flag, values in launch.flags if flag != "--mock-data"]
    job = examine(replace(launch, flags=[*flags, ("--data-path", ["0.3 /data/a 0.7 /data/b"])]), 128)
    assert job.error.startswith("--data-path '0.3 /data/a 0.7 /data/b': a blend in one word") and not job.missing


def test_errors_of_the_models_configuration_are_found(parser):
    """Megatron makes the configuration after validating its flags."""
    for flags, line in (
        ("--recompute-granularity full", 'recompute_method must be "block" or "uniform"'),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
    ):
        model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 24"
        command = f"{SCRIPT} {GPT} {model} --eval-interval 1000 --fp8-level O3 {flags}"
        error = examine(take_apart(command.split()), 8).error
        assert line in error and bool(error) == bool(line), error


VIRTUAL = "--num-layers-per-virtual-pipeline-stage 3"
SCHEDULE = "--step-batch-size-schedule"


def passes(flags: str):
    """Flags of a job that does not end later."""
    return pytest.param(flags, "", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        # A rehearsal has other numbers of layers, which divide.
        ("--num-virtual-stages-per-pipeline-rank 5", "rank 6 should be divisible by vp_size 5"),
        passes("--num-virtual-stages-per-pipeline-rank 3"),
        ("--global-batch-size 510 --eval-global-batch-size 512", "size 510: no multiple of 1 for each of 4"),
        passes("--global-batch-size 510 --eval-global-batch-size 512 --decrease-batch-size-if-needed"),
        (f"{SCHEDULE} 0:8,9K:18", f"{SCHEDULE} '0:8,9K:18': a batch of 18: no multiple of 1 for each of 4 data-"),
        (f"{SCHEDULE} 0:8,9:16", "schedule thresholds must be strictly increasing, got 0 before 0"),  # in tokens
        # Nine micro-batches: a rehearsal has eight.
        (f"{VIRTUAL} --global-batch-size 36", "size 36: 9 micro-batches, and virtual stages take them"),
        (f"{VIRTUAL} --global-batch-size 4", "--global-batch-size 4: 1 micro-batch, and virtual stages take them in"),
        passes(f"{VIRTUAL} --global-batch-size 32"),
        (f"{VIRTUAL} {SCHEDULE} 0:16,9K:20 --eval-iters 0", "a batch of 20: 5 micro-batches, and virtual stages"),
        (f"{VIRTUAL} {SCHEDULE} 0:16,9K:32", "--eval-global-batch-size 4: 1 micro-batch, and virtual stages take"),
        passes(f"{VIRTUAL} {SCHEDULE} 0:16,9K:32 --eval-iters 0"),
        (f"{VIRTUAL} --global-batch-size 40 --microbatch-group-size-per-virtual-pipeline-stage 8",
         "10 micro-batches, and virtual stages take them in groups of 8, the last of 4 or more; change it"),
        passes(f"{VIRTUAL} --global-batch-size 52 --microbatch-group-size-per-virtual-pipeline-stage 8"),
        ("--inprocess-restart", "--inprocess-restart is not supported here: run Megatron's own script"),
        passes("--nccl-communicator-config-path /nowhere"),  # on the job's machines
        # A rehearsal has two replicas at most.
        ("--use-distributed-optimizer --fp8-grad-reduce-hierarchy 3", "hierarchy 3: does not divide the data-"),
        passes("--use-distributed-optimizer --fp8-grad-reduce-hierarchy 2"),
    ],
)  # fmt: skip
def test_what_would_end_the_job_later_is_found(parser, flags, line):
    model = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --eval-interval 1000"
    batch = "" if "batch-size" in flags else "--global-batch-size 64"
    command = f"{SCRIPT} {GPT} {model} {batch} --pipeline-model-parallel-size 4 --fp8-level O3 {flags}"
    error = examine(take_apart(command.split()), 16).error
    assert line in error and bool(error) == bool(line), error


def small(flags: str, gpus: int) -> shrink.Rehearsal:
    """The rehearsal of a job of 24 layers, with these flags, on a large machine."""
    model = "--num-layers 24 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 64"
    command = f"{SCRIPT} {GPT} {model} --eval-interval 1000 --use-distributed-optimizer --fp8-level O3 {flags}"
    found = examine(take_apart(command.split()), gpus)
    assert found.error == ""
    return shrink.shrink(
        found.flags, found.args, most_ranks=None, free=room.Room(1e12), quick_ranks=64, mock_data=True,
        all_layers=False, storage="bf16",
    )  # fmt: skip


def test_two_levels_of_nodes_are_no_mistake_of_two_replicas(parser):
    """The reduction over two replicas would refuse four ranks in a node."""
    found = small("--fp8-grad-reduce-hierarchy 4", 16)
    assert found.left_out == ["--fp8-grad-reduce-hierarchy"] and found.data_parallel == 2
    assert "--fp8-grad-reduce-hierarchy" not in dict(found.flags)


@pytest.mark.parametrize("there", [True, False])
def test_a_job_that_saves_beside_training_does_so_here(parser, monkeypatch, there):
    """By Megatron's own strategy, without the package of the other."""
    monkeypatch.setattr(shrink, "installed", lambda module: there)
    given = dict(small("--async-save --use-persistent-ckpt-worker --save /there --save-interval 5", 2).flags)
    assert {"--async-save", "--use-persistent-ckpt-worker"} <= given.keys()
    assert given.get("--async-strategy") == (None if there else ["mcore"])


TE = "--fp8-attention te"


@pytest.mark.parametrize(
    ("flags", "gpus", "line"),
    [
        ("--context-parallel-size 3 --no-fp8-wgrad --attention-dropout 0", 24, "seq-length should be a multiple of 2"),
        ("--context-parallel-size 2", 8, "--attention-dropout 0.1: use 0"),
        (f"--context-parallel-size 2 {TE}", 7, "world size (7) is not divisible by total_model_size"),
        (f"--context-parallel-size 3 {TE} --no-fp8-wgrad", 24, "seq-length should be a multiple of 2 * "),
        (f"--context-parallel-size 4 {TE} --seq-length 2056", 8, "--seq-length 2056 with --micro-batch-size 1: "),
        (f"--attention-backend local {TE}", 8, "--attention-backend local: "),
        (f"--context-parallel-size 2 {TE}", 8, ""),
        ("--context-parallel-size 2 --fp8-level O0", 8, ""),
        ("--log-max-attention-logit", 8, "--log-max-attention-logit: add --fp8-attention te"),
        (f"--log-max-attention-logit --reset-attention-mask {TE}", 8, ""),
        (f"--dataloader-inter-document-masking {TE}", 8, "--dataloader-inter-document-masking is not supported here"),
    ],
)
def test_attention_that_is_not_here_is_checked_as_the_job_would(parser, flags, gpus, line):
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 24"
    launch = take_apart(f"{SCRIPT} {GPT} {model} --eval-interval 1000 --fp8-level O3 {flags}".split())
    job = examine(launch, gpus)
    assert line in job.error and bool(job.error) == bool(line), job.error
    left = {flag for flag, _ in job.flags}
    assert line or not left & {"--context-parallel-size", "--fp8-attention", "--log-max-attention-logit"}


def test_gpus_of_one_replica():
    for flags, expected in (
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3", 6),
        ("--context-parallel-size 4 --expert-model-parallel-size 2", 4),
        ("--expert-model-parallel-size 8 --pipeline-model-parallel-size 2", 16),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1", 8),
        *((f"--tensor-model-parallel-size {size}", 1) for size in ("many", "²", "0", "9" * 5000)),
    ):
        assert examined.gpus_of(Launch([], list(flags_of(flags.split())), None), None) == expected


def test_missing_data_is_reported_and_replaced_by_mock_data(shrunk):
    assert shrunk["data elsewhere"]["missing"].startswith("--vocab-file /data/vocab.json: no such file")


def test_the_page_says_if_the_script_logs_no_step(monkeypatch):
    """It must not say that the second start differed, with no step above to show it."""
    monkeypatch.setattr(page, "_counted", lambda job: "nothing")
    start = page.read("train", 0, 1.0, [], [])
    job = SimpleNamespace(args=SimpleNamespace(data_parallel_size=1, save="there"), missing="", unseen=())
    found = list(page.warnings(job, SimpleNamespace(data_parallel=1), page.Outcome(start, start)))
    assert found[0] == "No step was logged here, so it is unknown whether the script trains."


def test_the_page_has_the_line_that_a_start_failed_with(monkeypatch):
    """--folder keeps the log beside the page, but users read the page."""
    monkeypatch.setattr(page, "_counted", lambda job: "nothing")
    start = page.read("train", 2, 1.0, ["a warning", "megatron_fp8: --flag 3: use 4", "[ranks] rank 0 failed"], [])
    job = SimpleNamespace(args=SimpleNamespace(data_parallel_size=1, save="there"), missing="", unseen=())
    found = list(page.warnings(job, SimpleNamespace(data_parallel=1), page.Outcome(start)))
    assert found[0].startswith("The start to train failed here, ") and found[0].endswith(": --flag 3: use 4")


def test_a_full_rank_writes_to_no_file_of_the_jobs(monkeypatch):
    given = {}
    monkeypatch.setattr(one_rank, "start", lambda command, environment, timeout: given.update(environment))
    launch = Launch([SCRIPT], [], 8, {"MEGATRON_FP8_REPORT": "report.json", "OURS": "1"})
    one_rank.run_rank(launch, [], 4, 8, {one_rank.METRICS: "metrics.jsonl", "RANK": "7"}, 60)
    assert given["OURS"] == "1" and (given["RANK"], given["WORLD_SIZE"]) == ("4", "8")
    assert not {"MEGATRON_FP8_REPORT", one_rank.METRICS} & set(given)


def test_a_full_rank_that_takes_too_long_says_so(monkeypatch):
    late = "import time; print('begun', flush=True); time.sleep(60)"
    ran = one_rank.start([sys.executable, "-c", late], {}, 1)
    assert ran.lines == ["begun"]
    monkeypatch.setattr(full, "_figures", lambda *given: iter(()))
    sizes = [f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "data")]
    sizes.append("micro_batch_size")
    job = SimpleNamespace(level="O3", unseen=(), args=SimpleNamespace(**dict.fromkeys(sizes, 1)))
    page = "\n".join(full._page(job, 1, 0, 0, 2, ran))
    assert "failed" in page and "- Exit code 124: it took longer than --timeout 1. The end of its log:" in page
