"""Compare ways to multiply all experts of a mixture at once, in FP8; one Hopper GPU.

    python benchmarks/grouped_gemm.py --build LIBRARY.so                      compile the CUTLASS ways; needs nvcc
    python benchmarks/grouped_gemm.py --library LIBRARY.so --csv grouped.csv  a minute
    python benchmarks/grouped_gemm.py --only triton loop --rows 512 --counts skewed

The three GEMMs of both linears of a gated expert, like those of DeepSeek-V2-Lite (64 experts, hidden 2048, ffn 1408)
and of Qwen3-30B-A3B (128, 2048, 768). Rows of all experts lie in one matrix, each expert's padded with zeros to a
multiple of 128 (ops/groups.py). The ways:

    tables        our dense CUTLASS kernels, whose tiles know their expert (gemm/csrc/grouped.cuh)
    ptr-array     CUTLASS' own grouped kernels (grouped/ptr_array.cuh)
    triton        gemm/grouped_triton.py
    loop          a GEMM an expert by cuBLASLt; on four streams; these recorded in a CUDA graph, without the host's time
    torch FP8     torch._scaled_grouped_mm: a scale a row, E4M3 alone
    torch BF16    torch._grouped_mm

Each kernel is a process of its own: one that dies or hangs becomes a row that says so. They all start at once, and
first check themselves at small sizes and five kinds of counts, with tiles enough that a block takes several. Then they
run one after the other, each in single runs and under load (gemm/timing.py), and check their results again. A result is
filled with NaN before. TFLOP/s count the experts' own rows, not the padding. Rows are written as they come.

`counts`: random (weights from 0.5 to 1.5), equal, skewed (4 : 1 between the most and the least), empty (every fourth
expert has no row), one (has all).
"""

import argparse
import collections
import contextlib
import csv
import ctypes
import functools
import json
import math
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from stamp import commit

from megatron_fp8 import gemm
from megatron_fp8.gemm import cutlass_build, grouped_triton, timing
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor
from megatron_fp8.ops.groups import TILE, groups_of

SOURCES = Path(__file__).parent / "grouped"
PRODUCT = ("e4m3_grouped", "e5m2_grouped")  # files of gemm/csrc that the library has too
MODELS = {"DeepSeek-V2-Lite": (64, 2048, 1408), "Qwen3-30B-A3B": (128, 2048, 768)}  # experts, hidden, ffn
COUNTS = ("random", "equal", "skewed", "empty", "one")
KINDS = ("forward", "dgrad", "wgrad", "wgrad FP32")
FP32, BF16 = torch.float32, torch.bfloat16
DEVICE = "cuda"
FAMILIES = ("tables", "ptr-array", "triton", "loop", "torch")
WITHIN = {BF16: 4e-3, FP32: 1e-3}  # the largest relative error of a right result
LOAD_MS = 100.0
READY_S, ANSWER_S = 75, 30  # how long a process may take to check itself, and for one request

TYPES = {0: E4M3.dtype, 1: E5M2.dtype, 2: BF16, 3: FP32}  # the codes of csrc/abi.h
SHAPES = {
    "triton 256": grouped_triton.Shape(256, 8, 4, split=True),
    "triton 256 flat": grouped_triton.Shape(256, 8, 4, flatten=True, split=True),
    "triton 256 3 stages": grouped_triton.Shape(256, 8, 3, split=True),
    "triton 128": grouped_triton.Shape(128, 8, 4),
}

type Call = Callable[[], object]


class Unfit(Exception):
    """This way has no such GEMM; the text says why."""


# ---- Operands --------------------------------------------------------------------------------------------------------


def counts_of(kind: str, experts: int, rows: int, seed: int) -> torch.Tensor:
    """Rows of each expert, int32; `experts * rows` in all."""
    noise, total = torch.Generator().manual_seed(seed), experts * rows
    weights = torch.ones(experts)
    if kind == "random":
        weights = 0.5 + torch.rand(experts, generator=noise)
    elif kind == "skewed":
        weights = torch.linspace(1, 4, experts)[torch.randperm(experts, generator=noise)]
    elif kind == "empty":
        weights = (0.5 + torch.rand(experts, generator=noise)) * (torch.arange(experts) % 4 > 0)
    elif kind == "one":
        weights = (torch.arange(experts) == experts // 2).float()
    counts = (weights / weights.sum() * total).int()
    counts[int(weights.argmax())] += total - int(counts.sum())
    return counts


def fp8(values: torch.Tensor, fmt) -> torch.Tensor:
    return values.mul_(fmt.max / 6).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def transposed(payload: torch.Tensor) -> torch.Tensor:
    return payload.view(torch.uint8).mT.contiguous().view(payload.dtype)


class Case:
    """One grouped GEMM: its operands and its result.

    a, b: Rows: (R', K), (E, N, K); Sum: (M, R'), (N, R'). d: Rows: (R', N); Sum: (E, M, N).
    """

    def __init__(self, linear: str, kind: str, counts: torch.Tensor, hidden: int, ffn: int):
        """linear: fc1 (2 ffn, hidden) or fc2 (hidden, ffn)."""
        self.name, self.kind, self.fast, self.sums = f"{linear} {kind}", kind, kind == "forward", "wgrad" in kind
        self.groups = g = groups_of(counts, int(counts.sum()), torch.device(DEVICE))
        self.experts, self.end = counts.numel(), int(g.first[-1]) * TILE
        out, width = (2 * ffn, hidden) if linear == "fc1" else (hidden, ffn)
        self.flops = 2 * int(counts.sum()) * out * width
        own = (g.source >= 0).unsqueeze(1)

        def rows(columns: int, fmt) -> torch.Tensor:
            return fp8(torch.randn(g.rows, columns, device=DEVICE) * own, fmt)

        if self.sums:
            self.a, self.b = transposed(rows(out, E5M2)), transposed(rows(width, E4M3))
            dtype, shape = FP32 if "FP32" in kind else BF16, (self.experts, out, width)
        else:
            self.a = rows(width, E4M3) if self.fast else rows(out, E5M2)
            w = fp8(torch.randn(self.experts, out, width, device=DEVICE), E4M3)
            self.b = w if self.fast else transposed(w)
            dtype, shape = BF16, (g.rows, self.b.shape[1])
        self.d = torch.empty(shape, dtype=dtype, device=DEVICE)
        self.scale_a, self.scale_b = (0.01 + torch.rand(self.experts, device=DEVICE) for _ in range(2))

    def each(self, multiple: int = 1) -> Iterator[tuple]:
        """(a_e (m, k), b_e (n, k), d_e (m, n), scale_a, scale_b) of each expert with rows, padded to the multiple."""
        for e, part in enumerate(self.groups.parts):
            if part.start < part.stop:
                part = slice(part.start, part.start + -(-(part.stop - part.start) // multiple) * multiple)
                a, b = (self.a[:, part], self.b[:, part]) if self.sums else (self.a[part], self.b[e])
                yield a, b, self.d[e] if self.sums else self.d[part], self.scale_a[e], self.scale_b[e]

    def fault(self, call: Callable[[], torch.Tensor | None]) -> tuple[float, str]:
        """(relative error, what is wrong with the result, or "")."""
        self.d.fill_(math.nan)
        made = call()
        if made is not None:
            self.d.copy_(made)
        errors = []
        for a, b, d, scale_a, scale_b in self.each():
            exact = (a.float() @ b.float().t()) * (scale_a * scale_b)
            errors.append((d.float() - exact).norm() / exact.norm())
        worst = float(torch.stack(errors).max())  # NaN if there is one
        wrong = "" if worst < WITHIN[self.d.dtype] else f"error {worst:.1e}"
        empty = [e for e, part in enumerate(self.groups.parts) if part.start == part.stop]
        if self.sums and empty and not bool((self.d[empty] == 0).all()):
            wrong += " empty experts' gradients are not zero"
        if not self.sums and made is None and not bool(self.d[self.end :].isnan().all()):
            wrong += " rows beyond the last tile are written"
        return worst, wrong


# ---- The ways --------------------------------------------------------------------------------------------------------


def by_triton(case: Case, name: str) -> Call:
    promote = 0 if case.fast else 128
    if case.d.dtype is FP32 and SHAPES[name].columns * SHAPES[name].stages > 3 * 256:
        raise Unfit("a tile of the result would not fit")
    product = grouped_triton.sums if case.sums else grouped_triton.rows
    operands = case.a, case.b, case.d, case.scale_a, case.scale_b, case.groups
    return lambda: product(*operands, promote=promote, shape=SHAPES[name])


def by_loop(case: Case, name: str) -> Call:
    each = []
    for a, b, d, scale_a, scale_b in case.each(multiple=16):
        # cuBLASLt wants rows that are contiguous, and scales at multiples of 16 bytes.
        scales = (torch.stack([scale, scale, scale, scale])[0] for scale in (scale_a, scale_b))
        a, b = (ScaledTensor(x.contiguous(), scale) for x, scale in zip((a, b), scales, strict=True))
        each.append((a, b, gemm.Epilogue(into=d)))
    empty = [case.d[e] for e, part in enumerate(case.groups.parts) if case.sums and part.start == part.stop]

    def run(mine: list) -> None:
        for a, b, into in mine:
            gemm.gemm(a, b, into, fast_accum=case.fast)

    def plain() -> None:
        run(each)
        for place in empty:
            place.zero_()

    if "streams" not in name:
        return plain
    streams = [torch.cuda.Stream() for _ in range(4)]

    def spread() -> None:
        here = torch.cuda.current_stream()
        for i, stream in enumerate(streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                run(each[i :: len(streams)])
        for place in empty:
            place.zero_()
        for stream in streams:
            here.wait_stream(stream)

    if "graph" not in name:
        return spread
    spread()  # makes the plans
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spread()
    return graph.replay


def by_torch(case: Case, name: str) -> Callable[[], torch.Tensor]:
    """A call that returns its result. In BF16 the scales are in an operand, so the result is the same."""
    g, a, b = case.groups, case.a, case.b
    offsets = g.first[1:] * TILE
    rows = g.expert.long().repeat_interleave(TILE)
    if case.d.dtype is FP32:
        raise Unfit("it returns BF16")
    if name == "torch FP8":
        if E5M2.dtype in (a.dtype, b.dtype):
            raise Unfit("it takes E4M3 alone")
        scales = case.scale_a[rows], case.scale_b.unsqueeze(1).expand(-1, b.shape[1]).contiguous()
        how = {"offs": offsets, "out_dtype": BF16, "use_fast_accum": True}
        return lambda: torch._scaled_grouped_mm(a, b.mT, *scales, **how)
    scale = (case.scale_a * case.scale_b)[rows]
    if case.sums:
        a = (a.float() * scale).to(BF16).mT.contiguous().mT  # dy^T and x as autograd has them
        b = b.to(BF16).mT.contiguous()
        return lambda: torch._grouped_mm(a, b, offs=offsets, out_dtype=BF16)
    a, b = (a.float() * scale.unsqueeze(1)).to(BF16), b.to(BF16)
    return lambda: torch._grouped_mm(a, b.mT, offs=offsets, out_dtype=BF16)


class Library:
    """The kernels that `build` compiles. names: of each its index, types of a, b and d, and whether it sums."""

    def __init__(self, path: str):
        self._loaded = loaded = ctypes.CDLL(str(Path(path).resolve()))
        loaded.mfp8_grouped_gemm.argtypes = [ctypes.c_int, ctypes.POINTER(cutlass_build.GroupedArgs)]
        loaded.mfp8_grouped_error.restype = ctypes.c_char_p
        info, sums, ptr = cutlass_build.Info(), ctypes.c_int32(), ctypes.c_int32()
        self.names: dict[str, tuple] = {}
        while not loaded.mfp8_grouped_describe(len(self.names), *map(ctypes.byref, (info, sums, ptr))):
            how = f"promoted/{info.promote}" if info.promote else "fast"
            shape = f"{info.tile_m}x{info.tile_n} {info.cluster_m}x{info.cluster_n}{' pingpong' * info.pingpong}"
            types = tuple(TYPES[code] for code in (info.a, info.b, info.d))
            kind = ("wgrad FP32" if types[2] is FP32 else "wgrad") if sums.value else ""
            kind = kind or ("forward" if types[0] is E4M3.dtype else "dgrad")
            name = f"{'ptr-array' if ptr.value else 'tables'} {kind} {shape} {how}"
            self.names[name] = len(self.names), types, bool(sums.value)

    def __call__(self, case: Case, name: str) -> Call:
        index, types, sums = self.names[name]
        if (case.a.dtype, case.b.dtype, case.d.dtype, case.sums) != (*types, sums):
            raise Unfit("another kind")
        n = case.b.shape[0] if sums else case.b.shape[1]
        named = {"a": case.a, "b": case.b, "d": case.d, "scale_a": case.scale_a, "scale_b": case.scale_b}
        named |= {"first": case.groups.first, "expert": case.groups.expert}
        at = {name: tensor.data_ptr() for name, tensor in named.items()}
        args = cutlass_build.GroupedArgs(
            **at, stream=torch.cuda.current_stream().cuda_stream, step_b=0 if sums else case.b.stride(0),
            step_d=case.d.stride(0) if sums else 0, m=case.a.shape[0], n=n, k=case.a.shape[1], experts=case.experts,
        )  # fmt: skip
        by, launch = ctypes.byref(args), self._loaded.mfp8_grouped_gemm

        def call(kept=named) -> None:
            if status := launch(index, by):
                raise RuntimeError(f"status {status}, {self._loaded.mfp8_grouped_error().decode()}")

        return call


def ways(library: str | None) -> dict[str, Callable[[Case, str], Call]]:
    """{name: what makes its call for a Case}."""
    found: dict[str, Callable[[Case, str], Call]] = {}
    if library:
        compiled = Library(library)
        found |= dict.fromkeys(compiled.names, compiled)
    found |= dict.fromkeys(SHAPES, by_triton)
    found |= dict.fromkeys(("loop", "loop 4 streams", "loop 4 streams graph"), by_loop)
    return found | dict.fromkeys(("torch FP8", "torch BF16"), by_torch)


def build(to: str) -> None:
    """Compile benchmarks/grouped/*.cu and the product's grouped kernels into one library."""
    nvcc, version = cutlass_build._nvcc()
    include, cutlass = cutlass_build._headers()
    sources = [*sorted(SOURCES.glob("*.cu")), *(cutlass_build.SOURCES / f"{name}.cu" for name in PRODUCT)]
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source in sources:
            objects.append(f"{scratch}/{source.stem}.o")
            print(f"compiling {source.name}", flush=True)
            folders = [f"-I{folder}" for folder in (cutlass_build.SOURCES, include)]
            subprocess.run([nvcc, *cutlass_build.FLAGS, *folders, "-c", str(source), "-o", objects[-1]], check=True)
        subprocess.run([nvcc, *cutlass_build.LINK, *objects, "-o", to], check=True)
    print(f"built {to}: nvcc {version}, CUTLASS {cutlass}")


# ---- One way, in its process -----------------------------------------------------------------------------------------


def cases(args: argparse.Namespace, make: Callable[[Case], Call], counts: torch.Tensor, hidden: int, ffn: int):
    """(a Case, its call) of each GEMM that the way has."""
    for linear in ("fc1", "fc2"):
        for kind in args.kinds:
            case = Case(linear, kind, counts, hidden, ffn)
            with contextlib.suppress(Unfit):
                yield case, make(case)


def check(args: argparse.Namespace, make: Callable[[Case], Call]) -> str:
    """What is wrong at small sizes, or "". The last has more tiles than a GPU has multiprocessors."""
    wrong = []
    for kind, (experts, rows, *sizes) in [*((kind, (6, 150, 256, 128)) for kind in COUNTS), ("random", SEVERAL)]:
        for case, call in cases(args, make, counts_of(kind, experts, rows, 7), *sizes):
            print(f"at {kind} {case.name}", flush=True)
            if text := case.fault(call)[1]:
                wrong.append(f"{kind} {case.name} {text.strip()}")
    return f"{len(wrong)} wrong at small sizes: {wrong[0]}" if wrong else ""


SEVERAL = (24, 700, 1024, 768)


def measured(args: argparse.Namespace, name: str, make: Callable[[Case], Call], asked: dict) -> Iterator[dict]:
    """The way's rows for one request."""
    sizes, counts = asked["sizes"], counts_of(asked["counts"], asked["sizes"][0], asked["rows"], args.seed)
    for case, call in cases(args, make, counts, *sizes[1:]):
        print(f"at {case.name}", flush=True)
        error, wrong = case.fault(call)
        burst = timing.in_turns({name: call}, 4)
        ms = timing.under_load({name: call}, burst)[name]
        row = {"gemm": case.name, "ms": round(ms, 4), "TFLOP/s": round(case.flops / ms / 1e9, 1)}
        row |= {"burst TFLOP/s": round(case.flops / burst[name] / 1e9, 1), "error": f"{error:.2e}"}
        yield row | {"outcome": wrong.strip() or "right"}
        del case, call
        torch.cuda.empty_cache()


def serve(args: argparse.Namespace) -> None:
    """One way: says when it has checked itself, and answers requests; a line of JSON each."""
    say = functools.partial(print, flush=True)
    make = functools.partial(ways(args.library)[args.way], name=args.way)
    timing.LOAD_MS = LOAD_MS
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(args.seed)
    say(json.dumps({"ready": check(args, make)}))
    for line in sys.stdin:
        for row in measured(args, args.way, make, json.loads(line)):
            say(json.dumps(row))
        say(json.dumps({"done": True}))


# ---- All of them -----------------------------------------------------------------------------------------------------


class Process:
    """A way's process. state: "" while it lives and gives right results at small sizes; else what happened."""

    def __init__(self, name: str, arguments: list[str]):
        self.name, self.state, self.began = name, "", time.monotonic()
        self._said: collections.deque[str] = collections.deque(maxlen=50)
        self._at = ""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._process = subprocess.Popen([sys.executable, *arguments, "--way", name], **pipes)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answers(self, until: float) -> Iterator[dict]:
        """What it says before it is done. If it ends or is late, `state` tells."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                self.state = f"did not end {self._at}"
                self._process.kill()
                return
            if line is None:
                errors = [text.strip() for text in self._said if "error" in text.lower()]
                self.state = f"died ({self._process.wait()}) {self._at}: {(errors or ['no error'])[-1][:160]}"
                return
            if not line.startswith("{"):
                self._said.append(line)
                self._at = line.strip() if line.startswith("at ") else self._at
                continue
            answer = json.loads(line)
            if answer.get("done"):
                return
            yield answer
            if "ready" in answer:
                return

    def ask(self, request: dict) -> Iterator[dict]:
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            self.state = "died before"
            return
        yield from self.answers(time.monotonic() + ANSWER_S)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()


def compare(args: argparse.Namespace, write: Callable[[dict], None]) -> None:
    """Start all ways, and have them measure one after the other."""
    began = time.monotonic()
    names = [name for name in ways(args.library) if name.split()[0] in args.only]
    names = [name for name in names if name.startswith(("triton", "loop", "torch")) or _kind(name) in args.kinds]
    processes = [Process(name, sys.argv) for name in names]
    try:
        for process in processes:
            for answer in process.answers(began + READY_S):
                if answer["ready"]:
                    write({"way": process.name, "outcome": answer["ready"]})
            if process.state:
                write({"way": process.name, "outcome": f"while it checked itself it {process.state}"})
        print(f"checked after {time.monotonic() - began:.0f} s", flush=True)
        for model in args.models:
            sizes = [getattr(args, key) or size for key, size in zip(SIZES, MODELS[model], strict=True)]
            for rows in args.rows:
                for counts in args.counts:
                    what = {"model": model, "experts": sizes[0], "rows": rows, "counts": counts}
                    for process in (process for process in processes if not process.state):
                        if time.monotonic() - began > args.limit:
                            print(f"stopped after {args.limit:.0f} s", flush=True)
                            return
                        for row in process.ask({"sizes": sizes, "rows": rows, "counts": counts}):
                            write(what | {"way": process.name} | row)
                        if process.state:
                            write(what | {"way": process.name, "outcome": process.state})
    finally:
        for process in processes:
            process.end()
        print(f"ended after {time.monotonic() - began:.0f} s", flush=True)


SIZES = ("experts", "hidden", "ffn")
COLUMNS = ("model", "experts", "rows", "counts", "gemm", "way", "ms", "TFLOP/s", "burst TFLOP/s", "error", "outcome")


def _kind(name: str) -> str:
    return next(kind for kind in reversed(KINDS) if f" {kind} " in name)


def short_table(rows: list[dict]) -> None:
    """TFLOP/s under load of each way and GEMM; names without the kind, which is the column's."""
    for what in dict.fromkeys((row["model"], row["rows"], row["counts"]) for row in rows if row.get("ms")):
        mine = [row for row in rows if row.get("ms") and (row["model"], row["rows"], row["counts"]) == what]
        gemms = list(dict.fromkeys(row["gemm"] for row in mine))
        print(f"\n{what[0]}, {mine[0]['experts']} experts of {what[1]} rows ({what[2]}); TFLOP/s under load")
        print(f"{'':36}" + "".join(f"{name.replace('forward', 'fwd'):>11}" for name in gemms))
        found: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for row in mine:
            name = row["way"] if "x" not in row["way"] else row["way"].replace(f" {_kind(row['way'])}", "")
            found[name][row["gemm"]] = f"{row['TFLOP/s']:.0f}" + "!" * (row["outcome"] != "right")
        for name, rates in found.items():
            print(f"{name:36}" + "".join(f"{rates.get(gemm, ''):>11}" for gemm in gemms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", metavar="LIBRARY", help="compile the library, and stop")
    parser.add_argument("--library", help="the compiled kernels; without it only the rest is measured")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="these ways")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="instead of the models'")
    parser.add_argument("--rows", type=int, nargs="+", default=[1536], help="mean rows an expert")
    parser.add_argument("--counts", nargs="+", default=["random"], choices=COUNTS)
    parser.add_argument("--kinds", nargs="+", default=KINDS[:3], choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--limit", type=float, default=140, help="seconds, after which nothing more is begun")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        return build(args.build)
    if args.way:
        return serve(args)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    rows: list[dict] = []
    with contextlib.ExitStack() as stack:
        writer = None
        if args.csv:
            file = stack.enter_context(open(args.csv, "w", newline="", buffering=1))
            writer = csv.DictWriter(file, [*COLUMNS, *where])
            writer.writeheader()

        def write(row: dict) -> None:
            rows.append(row)
            if writer is not None:
                writer.writerow(row | where)
            if row["outcome"] != "right":
                print(f"{row['way']}: {row.get('gemm', '')} {row['outcome']}", flush=True)

        compare(args, write)
    short_table(rows)


if __name__ == "__main__":
    main()
