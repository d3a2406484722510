"""GPU time of a step by kind of kernel: systems side by side, and the floor of each kind.

    python benchmarks/kernels.py --te-path DIR --systems te-delayed O3 --shape 7b --csv benchmarks/results/kernels.csv
    python benchmarks/kernels.py --read --logs DIR --systems te-delayed O3 --shape 7b   # reads earlier runs; no GPU

Runs train_step.py's systems, with all its options, and prints one table of their profiled steps (kinds.py defines the
kinds). `--read` takes the logs that an earlier call of either script left in --logs.  "-" marks a kind that a system
does not have.

The floor is arithmetic: the shape's FLOPs at the best rate measured on an H200 for such GEMMs, and its bytes at 4.0
TB/s, which is 95 % of a device copy's rate (docs/performance.md).

  FP8 GEMM   2 T W L FLOPs forward at 1,492 TFLOP/s (best of cuBLASLt's fast accumulation, docs/performance.md),
             twice that backward at 1,354 (best with full accumulation, the same)
  BF16 GEMM  6 T h V at 834 (the LM head's weight gradient in GPT-125M, profiled; in GPT-7B 743: power)
  attention  7 T s A L, causal, at the BF16 rate, which no attention reaches: cuDNN 440 forward, 390 backward

  and bytes; each pass reads its inputs once and writes the inputs of the next:
  cast       2 an element of every FP8 linear's input and output gradient (row and transposed copy, written by the
             kernel that has the values), 2 more to read attention's output, 2 a weight and step (transposed copy)
  norm       2 a norm forward (a read; the writes are the cast's), 8 backward (dy, x and the residual's gradient in,
             dx out); the last norm, whose output is read in BF16, 4 and 6
  activation 2 U forward; 2 F + 2 U backward; its outputs are the cast's
  rotary     4 an element of q and k forward, if there is a rotary embedding; 2 of q, k, v backward (gathered)
  loss       6 an element of the logits (read twice, written once)
  optimizer  13 a weight of the linears (O3), 30 of embedding and head (FP32 master and moments)
  the others nothing: epilogues of GEMMs add gradients and residuals

T tokens a step and GPU (parallelism is assumed to divide all work evenly), L layers, h width, A = heads times their
width, K = query groups times that, F feed-forward width, U = F, or 2 F with SwiGLU, V padded vocabulary, s sequence,
W = h (A + 2 K) + A h + h U + F h.  A system of another precision has other kinds: compare its sum, not each line.
"""

import argparse
import re
import sys
from pathlib import Path

from kinds import (
    ACTIVATION,
    ATTENTION,
    BACKWARD,
    BF16,
    CAST,
    FORWARD,
    GEMMS,
    LOSS,
    NORM,
    OPTIMIZER,
    ORDER,
    PASSES,
    ROTARY,
)
from profile_gpt import SYNCHRONISES
from train_step import SYSTEMS, append, arguments, check_columns, measure, model_flags, read, stamp

FP8_FORWARD, FP8_BACKWARD, BF16_RATE, BANDWIDTH = 1492e9, 1354e9, 834e9, 4.0e9  # a millisecond
COLUMNS = "gpu torch commit date shape nproc gbs system te mbs step_ms kind ms floor_ms".split()


def dimensions(flags: list[str]) -> argparse.Namespace:
    """The dimensions for the floors, from Megatron's flags; if a flag is repeated, the last counts."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "global-batch-size", "vocab-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--num-query-groups", type=int)
    parser.add_argument("--kv-channels", type=int)
    parser.add_argument("--ffn-hidden-size", type=int)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    d = parser.parse_known_args(flags)[0]
    d.kv_channels = d.kv_channels or d.hidden_size // d.num_attention_heads
    d.num_query_groups = d.num_query_groups or d.num_attention_heads
    stock_ffn = int(4 * d.hidden_size * 2 / 3 / 64) * 64 if d.swiglu else 4 * d.hidden_size  # Megatron's rule
    d.ffn_hidden_size = d.ffn_hidden_size or stock_ffn
    multiple = d.make_vocab_size_divisible_by
    d.vocab_size = -(-(d.vocab_size + 1) // multiple) * multiple  # the tokenizer adds one token, its end mark
    return d


def floors(d: argparse.Namespace, nproc: int) -> dict[str, float]:
    """The least milliseconds of each kind on each of nproc GPUs, by the module's docstring; none for experts."""
    if d.num_experts:
        return {}
    layers, h, s, vocabulary = d.num_layers, d.hidden_size, d.seq_length, d.vocab_size
    a, k = d.num_attention_heads * d.kv_channels, d.num_query_groups * d.kv_channels
    f, u = d.ffn_hidden_size, d.ffn_hidden_size * (2 if d.swiglu else 1)
    tokens = d.global_batch_size * s / nproc
    weights = (h * (a + 2 * k) + a * h + h * u + f * h) * layers
    tables = vocabulary * h * (2 if d.untie_embeddings_and_output_weights else 1)
    rope = d.position_embedding_type == "rope"
    cast = (h + a + h + f) + (a + 2 * k + h + u + h)
    moved = {
        CAST: tokens * layers * 2 * (cast + a) + 2 * weights / nproc,
        NORM: tokens * h * (layers * 2 * (2 + 8) + 4 + 6),
        ACTIVATION: tokens * layers * (2 * u + 2 * f + 2 * u),
        ROTARY: tokens * layers * (4 * (a + k) * rope + 2 * (a + 2 * k)),
        LOSS: tokens * 6 * vocabulary,
        OPTIMIZER: (13 * weights + 30 * tables) / nproc,
    }
    return {
        FORWARD: 2 * tokens * weights / FP8_FORWARD,
        BACKWARD: 4 * tokens * weights / FP8_BACKWARD,
        BF16: 6 * tokens * h * vocabulary / BF16_RATE,
        ATTENTION: 7 * tokens * s * a * layers / BF16_RATE,
    } | {kind: n / BANDWIDTH for kind, n in moved.items()}


def table(rows: list[dict], floor: dict[str, float]) -> str:
    """Markdown: a line for each kind, a column for each system (a row of train_step.measure), and the floor."""

    def line(name: str, cells: list, last: str = "") -> str:
        return f"| {name:25} | " + " | ".join(f"{cell!s:>16}" for cell in [*cells, last]) + " |"

    def milliseconds(name: str, kinds) -> str:
        found = [[r["profile"]["ms"][k] for k in kinds if k in r["profile"]["ms"]] for r in rows]
        least = sum(floor.get(k, 0.0) for k in kinds)
        return line(name, [f"{sum(ms):.1f}" if ms else "-" for ms in found], f"{least:.1f}" if floor else "-")

    def counts(name: str, key: str) -> str:
        return line(name, [r["profile"][key] for r in rows])

    title = [f"{r['system']} MBS {r['mbs']}" for r in rows]
    idle = [round(r["profile"]["span"] - r["profile"]["busy"], 1) for r in rows]
    waits = [sum(r["profile"]["waits"].get(call, 0) for call in SYNCHRONISES) for r in rows]
    return "\n".join(
        [
            line("ms a step", title, "floor"),
            "|---" * (len(rows) + 2) + "|",
            line("Transformer Engine", [r["te"] for r in rows]),
            *(milliseconds(kind, [kind]) for kind in ORDER),
            milliseconds("= GEMMs", GEMMS),
            milliseconds("= passes bound by memory", PASSES),
            milliseconds("= all", ORDER),
            counts("busy", "busy"),
            counts("span of the profiled step", "span"),
            line("idle (span - busy)", idle),
            line("step, not profiled", [f"{r['ms']:.1f}" for r in rows]),
            counts("kernels", "kernels"),
            counts("ATen calls", "aten_calls"),
            counts("host ms, profiled", "host_ms"),
            line("host waits for the GPU", waits),
        ]
    )


def earlier(args) -> list[dict]:
    """Rows like measure()'s, from the logs in args.logs."""
    rows = []
    for system in args.systems:
        log = (Path(args.logs) / f"{system}.log").read_text()
        figures = read(log, args.warmup)
        mbs = re.search(r"^ +micro_batch_size \.+ (\d+)", log, re.MULTILINE)[1]
        rows.append({"system": system, "te": SYSTEMS[system].te, "mbs": int(mbs), **figures})
    return rows


def main() -> None:
    def add(parser) -> None:
        parser.add_argument("--read", action="store_true", help="only read --logs of an earlier call")

    args = arguments(__doc__.split("\n")[0], ["te-delayed", "O3"], add)
    if args.read and not args.logs:
        sys.exit("--read: needs --logs DIR, where the runs' logs are")
    check_columns(args.csv, COLUMNS)
    rows = earlier(args) if args.read else measure(args)
    for row in rows:
        if not row.get("profile"):
            print(f"{row['system']}: no profile (it needs a GPU); left out of the table")
    rows = [row for row in rows if row.get("profile")]
    floor = floors(dimensions(model_flags(args)), args.nproc)
    print(f"\n{args.shape}, global batch {args.gbs}, {args.nproc} GPUs; " + ", ".join(map(str, stamp().values())))
    print(table(rows, floor))
    if args.csv and rows:
        same = {**stamp(), "shape": args.shape, "nproc": args.nproc, "gbs": args.gbs}
        flat = [
            same
            | {"system": r["system"], "te": r["te"], "mbs": r["mbs"], "step_ms": r["ms"]}
            | {"kind": kind, "ms": r["profile"]["ms"].get(kind, 0.0), "floor_ms": floor.get(kind, 0.0)}
            for r in rows
            for kind in ORDER
        ]
        append(args.csv, COLUMNS, flat)


if __name__ == "__main__":
    main()
