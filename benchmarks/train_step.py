"""Whole training steps, side by side in one run: stock BF16, Transformer Engine FP8, our levels.

    python benchmarks/train_step.py --systems bf16 te-delayed O1 --csv benchmarks/results/train_step.csv
    python benchmarks/train_step.py --shape tiny --systems bf16-local O1          # any machine, checks the script

Every system trains the same slice of a GPT by the same command, pretrain_gpt_fp8.py with Megatron's flags and
mock (random) data, in a process of its own, one after the other.  A step's time is the median over the
steps after the warm-up, as Megatron prints it.  `--te-path DIR` is put on PYTHONPATH for the systems that need
Transformer Engine and kept off for those that do not.  The table and the CSV carry the GPU, versions and commit.
"""

import argparse
import csv
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from stamp import commit

ROOT = Path(__file__).resolve().parent.parent
COMMON = """--seq-length 2048 --max-position-embeddings 2048 --tokenizer-type NullTokenizer --vocab-size 50303
--make-vocab-size-divisible-by 128 --mock-data --bf16 --use-distributed-optimizer --disable-bias-linear
--no-bias-gelu-fusion --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --cross-entropy-loss-fusion --log-interval 1 --log-throughput
--eval-iters 0 --eval-interval 100000 --split 1,0,0 --num-workers 1 --no-create-attention-mask-in-dataloader
--init-method-std 0.02 --distributed-timeout-minutes 3"""
SHAPES = {
    "7b": "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 4",
    "175b": "--num-layers 4 --hidden-size 12288 --num-attention-heads 96 --micro-batch-size 2",
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --seq-length 64",
}
TE_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
LOCAL = "--transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion"
SYSTEMS = {  # name: (needs Transformer Engine, flags)
    "bf16": (True, ""),
    "te-delayed": (True, TE_FP8 + " --fp8-recipe delayed"),
    "te-tensorwise": (True, TE_FP8 + " --fp8-recipe tensorwise"),
    "bf16-local": (False, LOCAL + " --no-gradient-accumulation-fusion"),
    "O1": (False, "--fp8-level O1"),
    "O2": (False, "--fp8-level O2"),
    "O3": (False, "--fp8-level O3"),
    "O1-tensorwise": (False, "--fp8-level O1 --fp8-recipe tensorwise"),
    "O1-transpose-cache": (False, "--fp8-level O1 --keep-fp8-transpose-cache"),
    "O1-grads-fp32": (False, "--fp8-level O1 --fp8-grad-accum fp32"),
    "O1-grads-bf16": (False, "--fp8-level O1 --fp8-grad-accum bf16"),
    "O1-grads-fp8": (False, "--fp8-level O1 --fp8-grad-accum fp8"),
    "O1-shared": (False, "--fp8-level O1 --fp8-grad-reduce shared"),
    "O1-bf16-gemm": (False, "--fp8-level O1 --fp8-gemm bf16"),
}


def run(system: str, args) -> dict:
    """Train `args.iterations` steps; returns the figures of the run, or raises with the end of its log."""
    needs_te, flags = SYSTEMS[system]
    env = dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1", PROFILE_STEP=str(args.iterations - 1))
    if needs_te and args.te_path:
        env["PYTHONPATH"] = f"{args.te_path}:{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.nproc}", str(ROOT / "benchmarks/profile_gpt.py"), *COMMON.split()]
    command += [*SHAPES[args.shape].split(), f"--global-batch-size={args.gbs}", *flags.split(), *args.extra]
    command += [f"--train-iters={args.iterations}"]
    began = time.time()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
    log = done.stdout + done.stderr
    if args.logs:
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        (Path(args.logs) / f"{system}.log").write_text(log)
    steps = re.findall(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)", log)
    if done.returncode or not steps:
        raise RuntimeError(f"{system} failed:\n" + log[-3000:])
    ms = [float(t) for i, t in steps if args.warmup < int(i) < args.iterations - 1]  # the last is profiled
    tflops = [float(t) for t in re.findall(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)", log)]
    loss = re.findall(r"lm loss: ([\d.E+-]+)", log)
    memory = re.findall(r"allocated: ([\d.]+) \| max allocated: ([\d.]+)", log)
    profile = re.search(r"PROFILE (\{.*\})", log)
    return {
        "system": system,
        "ms": statistics.median(ms),
        "ms_min": min(ms),
        "ms_max": max(ms),
        "tflops": statistics.median(tflops[args.warmup : -2]) if tflops else 0.0,
        "gb": float(memory[-1][0]) / 1e3 if memory else 0.0,
        "gb_peak": float(memory[-1][1]) / 1e3 if memory else 0.0,
        "loss": float(loss[-1]) if loss else float("nan"),
        "profile": json.loads(profile[1]) if profile else {},
        "seconds": time.time() - began,
    }


def stamp() -> dict:
    """What the figures were measured on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    date = datetime.date.today().isoformat()
    return {"gpu": gpu, "torch": torch.__version__, "commit": commit(), "date": date}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["bf16", "te-delayed", "O1", "O2", "O3"])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--gbs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one system")
    parser.add_argument("--te-path", default="", help="folder with Transformer Engine")
    parser.add_argument("--csv", help="append the figures to this file")
    parser.add_argument("--logs", help="keep each run's log in this folder")
    args, args.extra = parser.parse_known_args()

    rows = []
    for system in args.systems:
        try:
            row = run(system, args)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{system}: {error}", flush=True)
            continue
        rows.append(row)
        p = row["profile"]
        print(
            f"{system:20} {row['ms']:8.1f} ms ({row['ms_min']:.1f}-{row['ms_max']:.1f}) {row['tflops']:7.1f} TFLOP/s "
            f"{row['gb']:6.1f} GB, peak {row['gb_peak']:6.1f}  loss {row['loss']:.4f}  ({row['seconds']:.0f} s)",
            flush=True,
        )
        if p:
            print(f"    busy {p['busy']} of {p['span']} ms; host waits {p['waits']}; {p['ms']}", flush=True)
            print(f"    collectives {p['collectives']}", flush=True)
    if args.csv and rows:
        path = Path(args.csv)
        path.parent.mkdir(parents=True, exist_ok=True)
        flat = [
            {**stamp(), "shape": args.shape, "nproc": args.nproc, "gbs": args.gbs}
            | {k: round(v, 3) if isinstance(v, float) else v for k, v in r.items() if k != "profile"}
            | {f"profile_{k}": json.dumps(r["profile"].get(k)) for k in ("busy", "span", "waits", "ms", "collectives")}
            for r in rows
        ]
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(flat[0]))
            if new:
                writer.writeheader()
            writer.writerows(flat)


if __name__ == "__main__":
    main()
