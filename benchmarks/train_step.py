"""Whole training steps, side by side in one run: stock BF16, Transformer Engine FP8, our levels.

    python benchmarks/train_step.py --te-path DIR --systems bf16 te-delayed O1 --csv benchmarks/results/train_step.csv
    python benchmarks/train_step.py --te-path DIR --shape 7b-whole --nproc 2 --gbs 32 --mbs O3=8 te-delayed=4
    python benchmarks/train_step.py --shape tiny --systems bf16-local O1          # any machine, checks the script

Every system trains the same slice of a GPT by the same command, pretrain_gpt_fp8.py with Megatron's flags and mock
(random) data, in its own process, one after the other.  A step's time is the median over the log's lines after the
warm-up; each line is Megatron's mean of five steps.  `--te-path DIR` is put on PYTHONPATH for the systems that need
Transformer Engine. The other systems find none, even if it is installed.

The table and the CSV have the GPU, versions and commit, and whether Transformer Engine is repaired. megatron-core
0.19.2 misses TE's QKV split because of a stale import, which profile_gpt.py repairs in its own process (`prepare_te`).
"unrepaired" is what a user of these versions gets.  Every run checks that it has the state that it is named after.
"""

import argparse
import csv
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from stamp import commit, cpu

# isort: split
from launch import RunFailed, torchrun

from megatron_fp8.processes import last_words

EVERY = 5  # steps between two lines of the log; each line makes the host wait for the GPU, so no run logs every step
COMMON = f"""--seq-length 2048 --max-position-embeddings 2048 --tokenizer-type NullTokenizer --vocab-size 50303
--make-vocab-size-divisible-by 128 --mock-data --bf16 --use-distributed-optimizer --disable-bias-linear
--no-bias-gelu-fusion --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --cross-entropy-loss-fusion --log-interval {EVERY} --log-throughput
--eval-iters 0 --eval-interval 100000 --split 1,0,0 --num-workers 1 --no-create-attention-mask-in-dataloader
--init-method-std 0.02 --distributed-timeout-minutes 3"""
LLAMA_LAYER = "--swiglu --normalization RMSNorm --position-embedding-type rope"
ROUTED = """--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
--moe-router-dtype fp32 --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096"""
WIDTH_4096 = "--hidden-size 4096 --num-attention-heads 32"
LLAMA_8B_LAYER = (
    f"{WIDTH_4096} {LLAMA_LAYER} --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 "
    "--untie-embeddings-and-output-weights"
)


QWEN3_LAYER = f"""--hidden-size 2048 --num-attention-heads 32 --kv-channels 128 {LLAMA_LAYER} --group-query-attention
--num-query-groups 4 --qk-layernorm --rotary-base 1000000 --ffn-hidden-size 6144 --vocab-size 151935 --num-experts 128
--moe-router-topk 8 --moe-ffn-hidden-size 768 {ROUTED}"""
DEEPSEEK_LAYER = f"""--hidden-size 2048 --num-attention-heads 16 {LLAMA_LAYER} --multi-latent-attention
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
--rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707 --ffn-hidden-size 10944 --vocab-size 102399
--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
--moe-router-pre-softmax {ROUTED}"""


class Shape(NamedTuple):
    gbs: int  # the default, for any number of GPUs
    mbs: int
    flags: str
    profiled: bool = True  # whether the last step but one is: of a million ATen calls that takes minutes


SHAPES = {
    "7b": Shape(16, 4, f"--num-layers 8 {WIDTH_4096}"),
    "llama": Shape(8, 2, f"--num-layers 8 {LLAMA_8B_LAYER} --seq-length 4096 --max-position-embeddings 4096"),
    "llama-32k": Shape(4, 1, f"--num-layers 4 {LLAMA_8B_LAYER} --seq-length 32768 --max-position-embeddings 32768"),
    "1b": Shape(  # Llama 3.2's
        16,
        4,
        f"--num-layers 16 --hidden-size 2048 --num-attention-heads 32 {LLAMA_LAYER} --ffn-hidden-size 8192 "
        "--group-query-attention --num-query-groups 8 --vocab-size 128255 --seq-length 4096 "
        "--max-position-embeddings 4096",
    ),
    "125m": Shape(
        64,
        32,
        f"--num-layers 12 --hidden-size 768 --num-attention-heads 12 {LLAMA_LAYER} "
        "--seq-length 1024 --max-position-embeddings 1024",
    ),
    "llama3-8b": Shape(  # whole, at its own sequence length
        8,
        1,
        f"--num-layers 32 {LLAMA_8B_LAYER} --vocab-size 128255 --rotary-base 500000 --norm-epsilon 1e-5 "
        "--seq-length 8192 --max-position-embeddings 8192",
    ),
    "7b-whole": Shape(16, 4, f"--num-layers 32 {WIDTH_4096}"),
    "13b-whole": Shape(4, 2, "--num-layers 40 --hidden-size 5120 --num-attention-heads 40"),
    "175b": Shape(16, 2, "--num-layers 4 --hidden-size 12288 --num-attention-heads 96"),
    "175b-tp8": Shape(  # with TP 2, a rank has what a rank of GPT-175B has with TP 8: micro-batch 1, bound by the host
        8,
        1,
        "--num-layers 8 --hidden-size 12288 --num-attention-heads 24 --kv-channels 128 --ffn-hidden-size 12288 "
        "--vocab-size 12799",
    ),
    "qwen3-moe": Shape(4, 2, f"--num-layers 4 {QWEN3_LAYER}"),  # four layers of Qwen3-30B-A3B
    "deepseek-moe": Shape(4, 2, f"--num-layers 4 {DEEPSEEK_LAYER}"),  # like DeepSeek-V2-Lite's, each with experts
    # Whole, as in configs/model: for two H200s with --expert-model-parallel-size 2, and for one; gradients in FP8.
    "qwen3-30b-a3b": Shape(8, 1, f"--num-layers 48 {QWEN3_LAYER} --norm-epsilon 1e-6", profiled=False),
    "deepseek-v2-lite": Shape(
        8,
        1,
        f"--num-layers 27 --moe-layer-freq [0]+[1]*26 {DEEPSEEK_LAYER} --rope-type yarn --norm-epsilon 1e-6",
        profiled=False,
    ),
    "tiny": Shape(16, 2, "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"),
}


class System(NamedTuple):
    te: str  # Transformer Engine: repaired, unrepaired, none
    flags: str
    variable: str = ""  # of the environment: "NAME=VALUE" (profile_gpt.py)


GRAPH = "--cuda-graph-impl full_iteration --te-rng-tracker --no-check-for-nan-in-loss-and-grad"
TE_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
TE_EXPERTS = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
PADDED = "--moe-router-padding-for-quantization"  # to a multiple of what an FP8 GEMM takes, by the router
OWN_EXPERTS = "--fp8-experts --moe-grouped-gemm"
LOCAL = "--transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion"
SYSTEMS = {
    "bf16": System("unrepaired", ""),  # stock, as installed
    "bf16-repaired": System("repaired", ""),
    "te-delayed": System("repaired", TE_FP8 + " --fp8-recipe delayed"),
    "te-delayed-graph": System(
        "repaired", TE_FP8 + " --fp8-recipe delayed --cuda-graph-impl transformer_engine --te-rng-tracker"
    ),
    "te-delayed-whole-graph": System("repaired", f"{TE_FP8} --fp8-recipe delayed {GRAPH}"),
    "te-delayed-overlap": System("repaired", TE_FP8 + " --fp8-recipe delayed --tp-comm-overlap"),
    "te-delayed-all-gather": System("repaired", TE_FP8 + " --fp8-recipe delayed --cp-comm-type all_gather"),
    "te-delayed-a2a": System("repaired", TE_FP8 + " --fp8-recipe delayed --cp-comm-type a2a"),
    "te-delayed-unrepaired": System("unrepaired", TE_FP8 + " --fp8-recipe delayed"),
    "te-tensorwise": System("repaired", TE_FP8 + " --fp8-recipe tensorwise"),
    # Of shapes with experts: each FP8 recipe of TE with all that TE has for experts.
    "bf16-experts": System("repaired", TE_EXPERTS),
    "te-delayed-experts": System("repaired", f"{TE_FP8} --fp8-recipe delayed {TE_EXPERTS}"),
    "te-delayed-experts-padded": System("repaired", f"{TE_FP8} --fp8-recipe delayed {TE_EXPERTS} {PADDED}"),
    "te-delayed-experts-graph": System(  # what stock can record of a layer whose experts' rows are counted by the host
        "repaired",
        f"{TE_FP8} --fp8-recipe delayed {TE_EXPERTS} --cuda-graph-impl transformer_engine --te-rng-tracker "
        "--cuda-graph-modules attn moe_router moe_preprocess",
    ),
    "te-tensorwise-experts": System("repaired", f"{TE_FP8} --fp8-recipe tensorwise {TE_EXPERTS}"),
    "te-tensorwise-experts-padded": System("repaired", f"{TE_FP8} --fp8-recipe tensorwise {TE_EXPERTS} {PADDED}"),
    "te-blockwise-experts": System("repaired", f"--fp8-format e4m3 --fp8-recipe blockwise {TE_EXPERTS} {PADDED}"),
    "bf16-local": System("none", LOCAL + " --no-gradient-accumulation-fusion"),
    "O1": System("none", "--fp8-level O1"),
    "O2": System("none", "--fp8-level O2"),
    "O3": System("none", "--fp8-level O3"),
    "O1-graph": System("none", f"--fp8-level O1 {GRAPH}"),
    "O2-graph": System("none", f"--fp8-level O2 {GRAPH}"),
    "O3-graph": System("none", f"--fp8-level O3 {GRAPH}"),
    "O3-experts": System("none", "--fp8-level O3 --fp8-experts"),
    "O3-experts-grouped": System("none", f"--fp8-level O3 {OWN_EXPERTS}"),
    "O3-experts-graph": System("none", f"--fp8-level O3 {OWN_EXPERTS} {GRAPH}"),
    "O3-experts-dispatch-forward": System("none", f"--fp8-level O3 {OWN_EXPERTS} --fp8-dispatch forward"),
    "O3-experts-dispatch": System("none", f"--fp8-level O3 {OWN_EXPERTS} --fp8-dispatch both"),
    "O3-tp-fp8": System("none", "--fp8-level O3 --fp8-tp-reduce-scatter fp8"),
    "O3-tp-fp8-backward": System("none", "--fp8-level O3 --fp8-tp-reduce-scatter backward"),
    "O3-with-te": System("repaired", "--fp8-level O3"),  # stock's parts use TE's fused rotary embedding and optimizer
    "O3-te-attention": System("repaired", "--fp8-level O3 --fp8-attention te"),
    "O3-fetched-keys": System("none", "--fp8-level O3", "FETCH_KEYS=1"),  # with context parallelism
    "O3-fp8-head": System("none", "--fp8-level O3 --fp8-lm-head"),
    "O3-fp8-activations": System("none", "--fp8-level O3 --fp8-activations"),
    "O3-long": System("none", "--fp8-level O3 --fp8-activations --fp8-loss-chunks 16"),
    "O1-tensorwise": System("none", "--fp8-level O1 --fp8-recipe tensorwise"),
    "O1-transpose-cache": System("none", "--fp8-level O1 --keep-fp8-transpose-cache"),
    "O1-grads-fp32": System("none", "--fp8-level O1 --fp8-grad-accum fp32"),
    "O1-grads-bf16": System("none", "--fp8-level O1 --fp8-grad-accum bf16"),
    "O1-grads-fp8": System("none", "--fp8-level O1 --fp8-grad-accum fp8"),
    "O1-shared": System("none", "--fp8-level O1 --fp8-grad-reduce shared"),
    "O1-bf16-gemm": System("none", "--fp8-level O1 --fp8-gemm bf16"),
}
PROFILED = ("busy", "span", "kernels", "aten_calls", "host_ms", "waits", "ms", "collectives")
RUN = ("system", "te", "mbs", "ms", "ms_min", "ms_max", "tflops", "gb", "gb_peak", "loss", "seconds")
COLUMNS = ["gpu", "torch", "commit", "date", "shape", "nproc", "gbs", *RUN, *(f"profile_{k}" for k in PROFILED)]


def model_flags(args) -> list[str]:
    """Megatron's flags that every system shares; if a flag is repeated, the last counts."""
    return [*COMMON.split(), *SHAPES[args.shape].flags.split(), f"--global-batch-size={args.gbs}", *args.extra]


def environment(te: str, te_path: str) -> dict[str, str]:
    """Variables of a run that finds Transformer Engine in the state `te`, in the folder te_path."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TE": te}
    if te != "none" and te_path:
        env["PYTHONPATH"] = f"{te_path}:{os.environ.get('PYTHONPATH', '')}"
    return env


def command(system: str, args) -> tuple[list[str], dict[str, str]]:
    """(Script and flags of a system's run, what its environment has besides this process'). args.env: more of it."""
    te, flags, variable = SYSTEMS[system]
    words = ["benchmarks/profile_gpt.py", *model_flags(args), f"--micro-batch-size={args.mbs[system]}"]
    words += [*flags.split(), f"--train-iters={args.iterations}"]
    profiled = args.iterations - 1 if SHAPES[args.shape].profiled else 0
    env = {**environment(te, args.te_path), "PROFILE_STEP": str(profiled), **getattr(args, "env", {})}
    if variable:
        name, env[name] = variable.split("=")
    return words, env


def run(system: str, args) -> dict:
    """Train `args.iterations` steps. Returns the figures of the run; raises RunFailed with the end of its log."""
    words, env = command(system, args)
    began = time.time()
    lines = logged_run(system, words, env, args)
    figures = read("\n".join(lines), args.warmup)
    if not figures:
        raise RunFailed("no line of the log has a time\n" + last_words(lines), 1)
    same = {"system": system, "te": SYSTEMS[system].te, "mbs": args.mbs[system]}
    return {**same, **figures, "seconds": time.time() - began}


def logged_run(system: str, words: list[str], env: Mapping[str, str], args) -> list[str]:
    """What the system's command printed. All of it stands in the folder `args.logs` too, also if the time was up."""
    with tempfile.TemporaryDirectory() as unkept:
        log = Path(args.logs or unkept).absolute() / f"{system}.log"
        return torchrun(args.nproc, words, log, timeout=args.timeout, env=env)


def read(log: str, warmup: int) -> dict:
    """The figures of a run's log, each of whose lines is the mean of the steps since the line before; empty if there is
    none."""
    line = r"iteration +(\d+)/ +(\d+) .*?elapsed time per iteration \(ms\): ([\d.]+)(?:.*?\(TFLOP/s/GPU\): ([\d.]+))?"
    lines = [(int(i), int(n), float(t), float(tflops or 0)) for i, n, t, tflops in re.findall(line, log)]
    # Megatron logs the first step too, but starts no new mean there. The last step but one is profiled.
    begins = [0, 0, *(i for i, *_ in lines[1:])]
    kept = [figures for begin, (i, n, *figures) in zip(begins, lines, strict=False) if warmup <= begin and i < n - 1]
    if not kept:
        return {}
    ms, tflops = zip(*kept, strict=True)
    loss = re.findall(r"lm loss: ([\d.E+-]+)", log)
    memory = re.findall(r"allocated: ([\d.]+) \| max allocated: ([\d.]+)", log)
    profile = re.search(r"PROFILE (\{.*\})", log)
    return {
        "ms": statistics.median(ms),
        "ms_min": min(ms),
        "ms_max": max(ms),
        "tflops": statistics.median(tflops),
        "gb": float(memory[-1][0]) / 1e3 if memory else 0.0,
        "gb_peak": float(memory[-1][1]) / 1e3 if memory else 0.0,
        "loss": float(loss[-1]) if loss else float("nan"),
        "profile": json.loads(profile[1]) if profile else {},
    }


def stamp() -> dict:
    """The GPU, or the CPU if there is none, versions and commit of a measurement."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu()
    date = datetime.date.today().isoformat()
    return {"gpu": gpu, "torch": torch.__version__, "commit": commit(), "date": date}


def least_iterations(warmup: int) -> int:
    """The steps of the shortest run that has a figure: one line of the log after the warm-up, and the profiled step."""
    return -(-warmup // EVERY) * EVERY + EVERY + 2


def arguments(description: str, systems: list[str], add=lambda parser: None, argv=None) -> argparse.Namespace:
    """Parse the command line, or argv. `args.mbs` has every system's micro-batch, `args.extra` flags for Megatron."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=systems)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--gbs", type=int, help="global batch (default: the shape's)")
    parser.add_argument("--mbs", nargs="+", default=[], metavar="SYSTEM=N", help="micro-batch, if not the shape's")
    parser.add_argument("--iterations", type=int, default=22)
    parser.add_argument("--warmup", type=int, default=EVERY)
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one system")
    parser.add_argument("--te-path", default="", help="folder with Transformer Engine")
    parser.add_argument("--csv", help="append the figures to this file")
    parser.add_argument("--logs", help="keep each run's log in this folder")
    add(parser)
    args, args.extra = parser.parse_known_args(argv)
    if (least := least_iterations(args.warmup)) > args.iterations:
        parser.error(f"--iterations {args.iterations}: with --warmup {args.warmup} {least} are the least")
    said = "said by --mbs SYSTEM=N and --gbs N here"
    for flag, why in {
        "--micro-batch-size": said, "--global-batch-size": said, "--log-interval": f"{EVERY} here, for every system"
    }.items():  # fmt: skip
        if any(word.split("=")[0] == flag for word in args.extra):
            parser.error(f"{flag}: {why}")
    shape = SHAPES[args.shape]
    args.gbs = args.gbs or shape.gbs
    chosen, args.mbs = args.mbs, dict.fromkeys(args.systems, shape.mbs)
    for choice in chosen:
        system, _, n = choice.partition("=")
        if system not in args.mbs or not n.isdecimal():
            parser.error(f"--mbs {choice}: SYSTEM=N is meant, and a system of --systems")
        args.mbs[system] = int(n)
    return args


def flat(row: Mapping) -> dict:
    """A run's columns of the CSV."""
    profile = {f"profile_{name}": json.dumps(row["profile"].get(name)) for name in PROFILED}
    return {name: row[name] for name in RUN} | profile


def check_columns(path: str | None, columns: list[str]) -> None:
    """Exit if rows of these columns cannot be appended to the file. Call it before measuring."""
    if path and Path(path).exists():
        with Path(path).open(newline="") as file:
            if next(csv.reader(file), columns) != columns:
                sys.exit(f"--csv {path}: was written with other columns; name a new file")


def append(path: str, columns: list[str], rows: list[dict]) -> None:
    """Append rows to a CSV file, with a header if it is new."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        if not file.tell():
            writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def measure(args, keep: Callable[[dict], None] = lambda row: None) -> list[dict]:
    """Every system's figures, printed and given to `keep` as they come. A failed system is reported and left out."""
    rows = []
    for system in args.systems:
        try:
            row = run(system, args)
        except RunFailed as error:
            print(f"{system}: {error}", flush=True)
            continue
        rows.append(row)
        keep(row)
        p = row["profile"]
        te = f"TE {row['te']}" if row["te"] != "none" else "no TE"
        print(
            f"{system:22} {te:14} MBS {row['mbs']:2} {row['ms']:8.1f} ms ({row['ms_min']:.1f}-{row['ms_max']:.1f}) "
            f"{row['tflops']:7.1f} TFLOP/s {row['gb']:6.1f} GB, peak {row['gb_peak']:6.1f}  loss {row['loss']:.4f}  "
            f"({row['seconds']:.0f} s)",
            flush=True,
        )
        if p:
            counts = f"{p['kernels']} kernels, {p['aten_calls']} ATen calls, host {p['host_ms']} ms"
            print(f"    busy {p['busy']} of {p['span']} ms; {counts}; host waits {p['waits']}; {p['ms']}", flush=True)
            print(f"    collectives {p['collectives']}", flush=True)
    return rows


def main() -> None:
    args = arguments(__doc__.split("\n")[0], ["bf16", "te-delayed", "O1", "O2", "O3"])
    check_columns(args.csv, COLUMNS)
    same = {**stamp(), "shape": " ".join([args.shape, *args.extra]), "nproc": args.nproc, "gbs": args.gbs}

    def keep(row: dict) -> None:  # write at once, because the next system may never end
        if args.csv:
            append(args.csv, COLUMNS, [same | flat(row)])

    measure(args, keep)


if __name__ == "__main__":
    main()
