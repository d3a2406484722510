"""Start Megatron runs from tests: `run_megatron(2, TINY_GPT + ["--fp8-level", "O1"]).losses`."""

import functools
import importlib.util
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from launch import ROOT, Step, forked, parse_step, parse_validation, torchrun, warm_server

from megatron_fp8 import processes

# Where Megatron keeps the order of its generated samples, once for all runs of this process: it costs each rank 0.2 s.
_order = tempfile.TemporaryDirectory(prefix="samples")
KEPT_ORDER = f"--data-cache-path {_order.name}"
# A GPT of 115,008 parameters on generated data: one to three seconds a run on two cores.
TINY_GPT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64 "
    "--max-position-embeddings 64 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 "
    "--split 1,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    # what stock Megatron must be told where neither Transformer Engine nor apex is installed
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    f"--no-persist-layer-norm --no-rope-fusion --attention-backend unfused {KEPT_ORDER}"
).split()
# Without the worker Megatron switches --async-save off; its other strategy needs a package.
ASYNCHRONOUS = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
# The first steps of that run, where more would show nothing new: its loss falls by 0.35, of ten steps' 0.54.
SIX_STEPS = "--train-iters 6 --lr-decay-iters 10".split()

# Begins a forked script that imports this package anew, as a cold process does: the one of the warm process is undone.
ANEW = """
import sys
from megatron_fp8 import cpu
from megatron_fp8.tools.rehearsal import ranks
ranks.hooked.put_back(); cpu.uninstall()
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_fp8"]: del sys.modules[name]
del cpu, ranks
"""


def script_path() -> str:
    """PYTHONPATH for a script of tests/scripts: beside what there is, this checkout and its tools."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))


def start_forked(monkeypatch) -> None:
    """Have the lab start its runs as `run_megatron` does: in a cold one each rank imports for five seconds."""
    forked_run = (sys.executable, str(ROOT / "tests/scripts/forked_run.py"), door(), "{processes}")
    monkeypatch.setattr(processes, "LAUNCHER", forked_run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@functools.cache
def door() -> str:
    """A name, of Linux' own and no file's, under which other processes ask this one's warm process for runs."""
    name = secrets.token_hex(16)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen()
    one_at_a_time = threading.Lock()  # the first request starts the warm process

    def hand_over(connection: socket.socket) -> None:
        with connection:  # an error closes it and the descriptors, so that nobody waits
            while True:
                text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
                if not text:
                    return
                try:
                    with one_at_a_time:
                        socket.send_fds(warm_server(False), [text], descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)

    def let_in() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=hand_over, args=(connection,), daemon=True).start()

    threading.Thread(target=let_in, daemon=True).start()
    return name


@functools.cache
def through(name: str) -> socket.socket:
    """The door of another process, which takes what its warm server takes."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{name}")
    return connection


@dataclass(frozen=True)
class Run:
    """What a finished run printed."""

    lines: list[str]
    steps: list[Step]
    validation_losses: list[float]

    @property
    def losses(self) -> list[float]:
        """Of every step that was logged; to ask where none was is an error: nothing is equal to nothing."""
        assert self.steps, "\n".join(self.lines[-25:])
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        """As `losses`."""
        assert self.steps, "\n".join(self.lines[-25:])
        return [step.grad_norm for step in self.steps]


_finished: dict[tuple, Run] = {}  # runs that several tests look at are made once


def run_megatron(
    nproc: int,
    flags: list[str],
    *,
    script: list[str] | str = "pretrain_gpt_fp8.py",
    timeout: float = 600,
    gpu: bool = False,
    cold: bool = False,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Train in `nproc` processes and return what was logged; once for the same command and variables, if it touches no
    checkpoint, writes no scores and no variable names a folder.

    Args:
        flags: Megatron's and ours; a flag given twice takes its last value.
        script: the script, or ["-m", "megatron_fp8", script].
        timeout: seconds until every process of the run is killed.
        gpu: let the run see the GPUs.
        cold: start every rank by itself, under torchrun, as a user does; else they are forked from a warm process. A
            run on GPUs is cold too if Transformer Engine is installed, which starts the driver as it is imported.

    Raises launch.RunFailed, with the end of the log in it, for a run that fails or takes too long.
    """
    command = (nproc, *flags, str(script), gpu, cold, *sorted((env or {}).items()))
    if command in _finished:
        return _finished[command]
    test = os.environ.get("PYTEST_CURRENT_TEST", "run").split(" ")[0]
    log = ROOT / "runs/tests" / (re.sub(r"[^\w.-]+", "_", test) + ".log")
    cold = cold or bool(gpu and importlib.util.find_spec("transformer_engine"))
    start = torchrun if cold else functools.partial(forked, gpus=gpu)
    lines = start(
        nproc,
        [*([script] if isinstance(script, str) else script), *flags],
        log,
        timeout=timeout,
        env={**({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}), **(env or {})},
    )
    steps = [step for step in map(parse_step, lines) if step]
    validation_losses = [loss for loss in map(parse_validation, lines) if loss is not None]
    run = Run(lines, steps, validation_losses)
    writes = any(os.sep in value for name, value in (env or {}).items() if name != "PYTHONPATH")  # into a folder
    if not writes and not {"--save", "--load", "--pretrained-checkpoint", "--dpo-score-reference"} & set(flags):
        _finished[command] = run
    return run
