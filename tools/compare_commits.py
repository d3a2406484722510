"""Tests that two versions of the repository train the same, bit for bit.

    python tools/compare_commits.py BEFORE [AFTER] [-k PART] [--jobs N]

BEFORE and AFTER are commits, or folders, whose working tree is used; AFTER defaults to this working tree.  Each is
copied to a temporary folder and trains the same tiny GPT on the CPU with its own pretrain_gpt_fp8.py, in ranks that
its own megatron_fp8 forks.  In every case these must be equal:

    steps       Megatron's log line of every step, without its time
    ours        our lines in the log, in any order: exact losses and norms, statistics, spikes
    saved       every tensor of the checkpoint: key, dtype, shape and bytes; every object in it: its pickle's content in
                any order, because arguments are saved in the order of the flags
    files       the other files of the run: probes

In the cases "resumed" both versions load BEFORE's checkpoint: old checkpoints must load and continue the same.

It does not test kernels and NCCL on GPUs, speed and memory, long runs, large jobs, or flags that no case has.  It takes
five minutes on two busy cores.  Exit code 1 if anything differs or a run fails.
"""

import argparse
import io
import json
import os
import pickletools
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from megatron_runs import TINY_GPT  # noqa: E402

TIMEOUT = 300  # seconds for a run
ALWAYS = "--train-iters 6 --lr-decay-iters 40 --ckpt-format torch_dist --save ckpt --save-interval 1000"
RESUMED = "--train-iters 9 --override-opt_param-scheduler --exit-on-missing-checkpoint"
EXACT = "--fp8-log-exact"  # the plain levels do not have it, so that they run without an observer
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SPIKES = "--fp8-spike-window 16 --fp8-spike-sigma 0.5 --fp8-log-interval 1 --train-iters 24"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PLAIN = "--fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--attention-backend auto"
)


class Case(NamedTuple):
    """A run. resumes: the case whose checkpoint, saved by BEFORE, it loads."""

    name: str
    ranks: int
    flags: str
    resumes: str = ""


CASES = [
    Case("O0", 1, ""),
    Case("O1", 1, "--fp8-level O1"),
    Case("O2", 1, "--fp8-level O2"),
    Case("O3", 1, "--fp8-level O3"),
    Case("O0 dp2 sharded", 2, SHARDED),
    Case("O3 dp2 sharded", 2, f"--fp8-level O3 {SHARDED} {EXACT}"),
    Case("O2 dp2", 2, f"--fp8-level O2 {EXACT}"),
    Case("O1 dp2 greedy", 2, f"--fp8-level O1 --fp8-partition greedy --use-distributed-optimizer {EXACT}"),
    Case("O3 tp2 sequence", 2, f"--fp8-level O3 {SP} {EXACT}"),
    Case("O3 tp2 bf16 gather", 2, f"--fp8-level O3 {SP} --fp8-tp-gather bf16 {EXACT}"),
    Case("O1 tp2", 2, f"--fp8-level O1 {TP} {EXACT}"),
    Case("O3 tp2 dp2", 4, f"--fp8-level O3 {SP} {SHARDED} {EXACT}"),
    Case("O3 pp2 tied", 2, f"--fp8-level O3 {PP} {EXACT}"),
    Case("O2 pp2 virtual", 2, f"--fp8-level O2 {PP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 {EXACT}"),
    Case("O2 bf16 accum", 1, f"--fp8-level O2 --fp8-grad-accum bf16 --micro-batch-size 1 {EXACT}"),
    Case("O1 shared", 2, f"--fp8-level O1 --fp8-grad-reduce shared {EXACT}"),
    Case("O1 plain", 2, f"--fp8-level O1 {PLAIN} {EXACT}"),
    Case("O1 tensorwise", 1, f"--fp8-level O1 --fp8-recipe tensorwise {EXACT}"),
    Case("O1 E8M3", 1, f"--fp8-level O1 --fp8-emulate E8M3 {EXACT}"),
    Case("E4M3 emulated tp2", 2, f"--fp8-emulate E4M3 --fp8-emulate-lm-head {TP} {EXACT}"),
    Case("O1 ends in bf16", 1, f"--fp8-level O1 --first-last-layers-bf16 --num-layers 4 {EXACT}"),
    Case("O3 recomputed", 1, f"--fp8-level O3 {FULL_RECOMPUTE} {EXACT}"),
    Case("O3 biases", 1, f"--fp8-level O3 --normalization LayerNorm --add-qkv-bias --keep-fp8-transpose-cache {EXACT}"),
    Case("O2 latent", 1, f"--fp8-level O2 {LATENT} {EXACT}"),
    Case("O1 no fp8 wgrad", 1, f"--fp8-level O1 --no-fp8-wgrad {EXACT}"),
    Case("O2 statistics", 2, f"--fp8-level O2 --fp8-log-interval 2 --fp8-log-grad-snr {EXACT}"),
    Case("O3 probe", 1, f"--fp8-level O3 --fp8-probe-step 2,4 --fp8-probe-dir files {EXACT}"),
    Case("O2 moves, sharpness", 1, f"--fp8-level O2 --fp8-log-update-norm --fp8-sharpness-interval 2 {EXACT}"),
    Case("O1 skips spikes", 1, f"--fp8-level O1 --fp8-on-spike skip {SPIKES} {EXACT}"),
    Case("O3 spikes in bf16", 1, f"--fp8-level O3 --fp8-on-spike bf16-fallback {SPIKES} {EXACT}"),
    Case("O3 compact", 2, f"--fp8-level O3 --fp8-ckpt-compact {SHARDED} {EXACT}"),
    Case("O0 resumed", 1, RESUMED, "O0"),
    Case("O1 resumed", 1, f"--fp8-level O1 {RESUMED}", "O1"),
    Case("O2 resumed", 1, f"--fp8-level O2 {RESUMED}", "O2"),
    Case("O3 resumed", 1, f"--fp8-level O3 {RESUMED}", "O3"),
    Case("O3 dp2 resumed", 2, f"--fp8-level O3 {SHARDED} {RESUMED} {EXACT}", "O3 dp2 sharded"),
    Case("O3 dp2 as O1 tp2", 2, f"--fp8-level O1 {TP} {RESUMED} {EXACT}", "O3 dp2 sharded"),
    Case("O3 compact resumed", 2, f"--fp8-level O3 --fp8-ckpt-compact {SHARDED} {RESUMED} {EXACT}", "O3 compact"),
]
PARTS = ("steps", "ours", "saved", "files")
Found = dict[str, dict[str, Any]]  # {one of PARTS: {key: text, bytes or tensor}}


def read_log(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """({step: Megatron's line without its times}, {one of our lines: how often}). Ranks print ours in any order."""
    found = re.findall(r"iteration +(\d+)/ +\d+ \|(.*?number of nan iterations: +\d+)", text)
    steps = {f"step {step}": re.sub(r" elapsed time per iteration \(ms\): [\d.]+ \|", "", line) for step, line in found}
    ours = [line.rstrip() for line in re.findall(r"\[fp8\] .*", text)]
    return steps, {line: f"{ours.count(line)} times" for line in ours}


class _AsStored(dcp.DefaultLoadPlanner):
    """Takes objects as the bytes that were stored: nothing is unpickled."""

    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """{key: tensor, or an object's content as text} of a torch_dist checkpoint that this program made."""
    reader = dcp.FileSystemReader(folder)
    state: dict[str, Any] = {}
    for key, stored in sorted(reader.read_metadata().state_dict_metadata.items()):
        is_object = isinstance(stored, BytesStorageMetadata)
        state[key] = io.BytesIO() if is_object else torch.zeros(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=reader, planner=_AsStored(), no_dist=True)
    return {key: value if isinstance(value, torch.Tensor) else held(value) for key, value in state.items()}


def held(stored: bytes) -> str:
    """The content of a pickle, or of torch's zip of a pickle and storages, in sorted order. Nothing is unpickled."""
    if not zipfile.is_zipfile(io.BytesIO(stored)):
        ops = ((op.name, repr(arg)) for op, arg, _ in pickletools.genops(stored))
        return "|".join(sorted(f"{name} {arg}" for name, arg in ops if "GET" not in name and "PUT" not in name))
    with zipfile.ZipFile(io.BytesIO(stored)) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    files.pop(".data/serialization_id", None)  # a hash of the pickle's bytes
    return "|".join(f"{name} {held(data) if name == 'data.pkl' else data.hex()}" for name, data in files.items())


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first difference, in words; "" if all is equal to the bit."""
    for key in [*before, *after]:
        if key not in before or key not in after:
            return f"{key}: only {'before' if key in before else 'after'}"
        one, other = before[key], after[key]
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            if one != other:
                return f"{key}: {_words(one, other)}"
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{key}: {one.dtype} {tuple(one.shape)} -> {other.dtype} {tuple(other.shape)}"
        elif count := int((_bytes(one) != _bytes(other)).sum()):
            return f"{key}: {count} of {one.nbytes} bytes differ"
    return ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _words(one: Any, other: Any) -> str:
    """The different fields of two texts, separated by |; of other values, their types or lengths."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return " -> ".join(f"{len(v)} bytes" if isinstance(v, bytes) else type(v).__name__ for v in (one, other))
    pairs = zip_longest(one.split("|"), other.split("|"), fillvalue="")
    return ", ".join(f"{a.strip()} -> {b.strip()}" for a, b in pairs if a != b)


def compare(name: str, before: Found, after: Found) -> tuple[str, bool]:
    """(a line of the table, whether all is equal and there was something to compare)."""
    found = {part: difference(before[part], after[part]) for part in PARTS}
    if not before["steps"] or not before["saved"]:
        found["steps"] = "nothing to compare"
    counts = " ".join(f"{len(before[part]):>5}{'!' if found[part] else ' '}" for part in PARTS)
    return f"{name:20} {counts} {'; '.join(filter(None, found.values())) or 'equal'}", not any(found.values())


class Version:
    """A copy of the repository, and a process of it that has imported all modules and forks runs."""

    SERVER = """
import importlib, importlib.util, json, sys, megatron_fp8
assert megatron_fp8.__file__.startswith(sys.argv[1]), megatron_fp8.__file__
moved = importlib.util.find_spec("megatron_fp8.tools") is not None  # the desk tools, from megatron_fp8 itself
ranks = importlib.import_module("megatron_fp8.tools.rehearsal.ranks" if moved else "megatron_fp8.rehearsal.ranks")
ranks.warm_up()
for line in sys.stdin:
    request = json.loads(line)
    with open(request.pop("log"), "wb") as log:
        print("ended", ranks.wait(ranks.launch(**request, output=log.fileno())), flush=True)
"""

    def __init__(self, name: str, folder: Path):
        self.name, self.tree, self.runs = name, folder / "tree", folder / "runs"
        self.tree.mkdir(parents=True)
        _copy(name, self.tree)
        own = {"PYTHONPATH": str(self.tree), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self.env = {**os.environ, **own, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        command = [sys.executable, "-c", self.SERVER, str(self.tree)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen(command, cwd=self.tree, env=self.env, **pipes)

    def train(self, case: Case, load: Path | None) -> Found:
        """Run a case.  Raises RuntimeError, with the end of the log, if it fails."""
        folder = self.runs / case.name  # flags have relative paths, because checkpoints contain the flags
        folder.mkdir(parents=True)
        flags = [*TINY_GPT, *ALWAYS.split(), *case.flags.split(), *(["--load", str(load)] if load else [])]
        if "tied" in case.name:
            flags.remove("--untie-embeddings-and-output-weights")
        log, command = folder / "log.txt", [str(self.tree / "pretrain_gpt_fp8.py"), *flags]
        request = {"count": case.ranks, "command": command, "timeout": TIMEOUT, "env": self.env, "cwd": str(folder)}
        self.server.stdin.write(json.dumps({**request, "log": str(log)}) + "\n")
        self.server.stdin.flush()
        ended = next((line for line in self.server.stdout if line.startswith("ended ")), "its server has ended")
        text = log.read_text(errors="replace") if log.exists() else ""
        if ended != "ended 0\n":
            raise RuntimeError(f"{self.name}: {ended}\n" + "\n".join(text.splitlines()[-25:]))
        (saved,) = (folder / "ckpt").glob("iter_*")
        files = {path.name: path.read_bytes() for path in sorted(folder.glob("files/*"))}
        return dict(zip(PARTS, (*read_log(text), read_checkpoint(saved), files), strict=True))


def _copy(name: str, to: Path) -> None:
    """Copy the files of a commit, or of a folder's working tree without those that git ignores."""
    if Path(name).is_dir():
        listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=name).split(b"\0")
        there = b"\0".join(path for path in listed if path and os.path.isfile(os.path.join(name.encode(), path)))
        packed = subprocess.check_output(["tar", "-c", "--null", "-T", "-"], cwd=name, input=there)
    else:
        packed = subprocess.check_output(["git", "archive", name], cwd=ROOT)
    subprocess.run(["tar", "-x"], cwd=to, input=packed, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default=str(ROOT))
    parser.add_argument("-k", default="", metavar="PART", help="only cases whose name contains PART")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="2: both versions run at the same time")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.k in case.name]
    cases = [case for case in CASES if case in chosen or case.name in [one.resumes for one in chosen]]
    unequal = [] if cases else [f"no case contains {args.k}"]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        versions = [Version(name, Path(scratch) / f"{i}") for i, name in enumerate((args.before, args.after))]
        print(f"{args.before} -> {args.after}\n{'case':20} steps  ours saved files", flush=True)
        for case in cases:
            load = versions[0].runs / case.resumes / "ckpt" if case.resumes else None
            runs = [pool.submit(version.train, case, load) for version in versions]
            wait(runs)  # a server makes one run at a time
            try:
                line, equal = compare(case.name, *(run.result() for run in runs))
            except RuntimeError as error:
                line, equal = f"{case.name:20} FAILED {error}", False
            print(line, flush=True)
            unequal += [] if equal else [case.name]
        for version in versions:
            version.server.communicate()  # the server ends when its input ends
    print(f"NOT EQUAL: {', '.join(unequal)}" if unequal else f"all equal: {len(cases)} cases")
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
