"""Compare ways to multiply all experts of a mixture at once, in FP8; one Hopper GPU, or a CPU for the checks alone.

    python benchmarks/grouped_gemm.py --build LIBRARY.so          compile the kernels of benchmarks/grouped/; needs nvcc
    python benchmarks/grouped_gemm.py --library LIBRARY.so --csv grouped.csv
    python benchmarks/grouped_gemm.py --rows 512 --counts skewed  fewer rows an expert, of unequal number
    TRITON_INTERPRET=1 python benchmarks/grouped_gemm.py --check  Triton's kernels at toy size, without a GPU

The three GEMMs of both linears of a gated expert, of Qwen3-30B-A3B (128 experts, hidden 2048, ffn 768) and like
DeepSeek-V2-Lite (64, 2048, 1408). Rows of all experts lie in one matrix, each expert's padded with zeros to a multiple
of 128. The tables that say where each begins are made on the device from the counts.

    tables        benchmarks/grouped/grouped.cuh: our dense kernels, whose tiles know their expert
    ptr-array     benchmarks/grouped/ptr_array.cuh: CUTLASS' own grouped kernels
    triton        benchmarks/grouped/by_triton.py: persistent blocks
    loop          one GEMM an expert: cuBLASLt by our binding, as --fp8-experts does today
    loop torch    the same by torch._scaled_mm
    torch FP8     torch._scaled_grouped_mm: a scale a row, E4M3 alone
    torch BF16    torch._grouped_mm

TFLOP/s count the experts' own rows, not the padding. Each system runs alone twice, in turns (gemm/timing.py). First
each result is compared with a product in FP32 expert by expert; before, it is filled with NaN. "bits" says whether it
equals the loop of our dense CUTLASS kernels, if `megatron-fp8 build` has built them. `counts`: random (weights from
0.5 to 1.5), equal, skewed (4 : 1 between the most and the least), empty (every fourth expert has no row), one.
"""

import argparse
import csv
import ctypes
import functools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from stamp import commit

from megatron_fp8 import gemm
from megatron_fp8.gemm import cutlass_build, plans, timing
from megatron_fp8.gemm.cutlass import CUTLASS
from megatron_fp8.numerics import E4M3, E5M2
from megatron_fp8.numerics.scaled import ScaledTensor

SOURCES = Path(__file__).parent / "grouped"
MODELS = {"Qwen3-30B-A3B": (128, 2048, 768), "DeepSeek-V2-Lite": (64, 2048, 1408)}  # experts, hidden, ffn
COUNTS = ("random", "equal", "skewed", "empty", "one")
TILE = 128
FP32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ("tables", "ptr-array", "triton", "loop", "loop torch", "torch FP8", "torch BF16")
WRONG, FAILED = 1, 3  # exit codes of --check
WITHIN = {BF16: 4e-3, FP32: 1e-3}  # the largest relative error of a right result

TYPES = {0: E4M3.dtype, 1: E5M2.dtype, 2: BF16, 3: FP32}  # the codes of csrc/abi.h

# ---- Groups and operands --------------------------------------------------------------------------------------------


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


def tables(counts: torch.Tensor, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, expert) of grouped.cuh, on the counts' device; tiles: at least as many as there can be."""
    ends = ((counts + (TILE - 1)) // TILE).cumsum(0)
    first = torch.cat([ends.new_zeros(1), ends]).int()
    expert = torch.searchsorted(ends, torch.arange(tiles, device=counts.device), right=True)
    return first, expert.clamp(max=counts.numel() - 1).int()


class Groups:
    """Experts' rows in one matrix. rows: of the matrix, a bound that needs only the sum of the counts."""

    def __init__(self, counts: torch.Tensor, device: str):
        self.host, self.experts, self.total = counts.tolist(), counts.numel(), int(counts.sum())
        self.rows = (self.total + (TILE - 1) * self.experts) // TILE * TILE
        self.counts = counts.to(device)
        self.first, self.expert = tables(self.counts, self.rows // TILE)
        starts = [0]
        for count in self.host:
            starts.append(starts[-1] + -(-count // TILE) * TILE)
        self.starts, self.end = starts[:-1], starts[-1]
        self.ends = torch.tensor(starts[1:], dtype=torch.int32, device=device)
        own = torch.zeros(self.rows, dtype=torch.bool, device=device)
        for start, count in zip(self.starts, self.host, strict=True):
            own[start : start + count] = True
        self.own = own.unsqueeze(1)

    def parts(self, multiple: int = 16):
        """(expert, its slice of rows, padded to the multiple) of each with rows."""
        for e, (start, count) in enumerate(zip(self.starts, self.host, strict=True)):
            if count:
                yield e, slice(start, start + -(-count // multiple) * multiple)


def fp8(values: torch.Tensor, fmt) -> torch.Tensor:
    return values.mul_(fmt.max / 6).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def transposed(payload: torch.Tensor) -> torch.Tensor:
    return payload.view(torch.uint8).mT.contiguous().view(payload.dtype)


class Case:
    """One grouped GEMM: its operands, its result, and every system's call.

    a, b: Rows: (R, K), (E, N, K); Sum: (M, R), (N, R). d: Rows: (R, N); Sum: (E, M, N).
    """

    def __init__(self, name: str, groups: Groups, a, b, d: torch.Tensor, fast: bool):
        self.name, self.groups, self.a, self.b, self.d, self.fast = name, groups, a, b, d, fast
        self.sums = d.dim() == 3
        self.scale_a = 0.01 + torch.rand(groups.experts, device=d.device)
        self.scale_b = 0.01 + torch.rand(groups.experts, device=d.device)
        wide, deep = (a.shape[0], b.shape[0]) if self.sums else (b.shape[1], b.shape[2])
        self.flops = 2 * groups.total * wide * deep

    def each(self):
        """(a_e (m, k), b_e (n, k), d_e (m, n), scale_a, scale_b) of each expert with rows."""
        for e, part in self.groups.parts():
            a, b = (self.a[:, part], self.b[:, part]) if self.sums else (self.a[part], self.b[e])
            yield a, b, self.d[e] if self.sums else self.d[part], self.scale_a[e], self.scale_b[e]

    def fault(self, call: Callable[[], object]) -> tuple[float, str]:
        """(relative error, what is wrong with the result, or ""). The result is filled with NaN before."""
        self.d.fill_(math.nan)
        call()
        errors = []
        for a, b, d, scale_a, scale_b in self.each():
            exact = (a.float() @ b.float().t()) * (scale_a * scale_b)
            errors.append((d.float() - exact).norm() / exact.norm())
        worst = float(torch.stack(errors).max())  # NaN if there is one
        wrong = "" if worst < WITHIN[self.d.dtype] else f"error {worst:.1e}"
        groups = self.groups
        if self.sums:
            empty = [e for e, count in enumerate(groups.host) if not count]
            if empty and not bool((self.d[empty] == 0).all()):
                wrong += " empty experts' gradients are not zero"
        else:
            if not bool(self.d[groups.end :].isnan().all()):
                wrong += " rows beyond the last tile are written"
        return worst, wrong

    # ---- Systems ----

    def calls(self, library: "Library | None", families: list[str]) -> dict[str, Callable[[], object]]:
        """{system: call} of some families; says which have no call for this GEMM."""
        makers: dict[str, Callable[[], dict]] = {"triton": self.by_triton}
        if library is not None:
            makers |= {name: functools.partial(library.calls, self, name) for name in ("tables", "ptr-array")}
        for name, make in ("loop", self.loop), ("loop torch", self.loop_torch):
            makers[name] = lambda name=name, make=make: {name: make()}
        for name, make in ("torch FP8", self.torch_fp8), ("torch BF16", self.torch_bf16):
            makers[name] = lambda name=name, make=make: {name: make()}
        found: dict[str, Callable[[], object]] = {}
        for name, make in makers.items():
            if name in families:
                try:
                    found |= make()
                except (RuntimeError, ValueError, AttributeError, TypeError) as reason:
                    print(f"    {self.name}: no {name}: {str(reason).splitlines()[0][:150]}", flush=True)
        return found

    def by_triton(self) -> dict[str, Callable[[], object]]:
        from grouped import by_triton

        g, found = self.groups, {}
        shapes = [((128, 256), 0, 8, 3), ((128, 128), 0, 8, 4), ((128, 128), 0, 4, 4)] if self.fast else []
        if not self.fast:
            shapes = [((128, 128), 128, 8, 4), ((128, 256), 0, 8, 3)]
        sms = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 3
        for tile, promote, warps, stages in shapes:
            if self.d.dtype is FP32 and tile == (128, 256):
                continue
            how = {"tile": tile, "promote": promote, "sms": sms, "warps": warps, "stages": stages}
            scales = self.scale_a, self.scale_b
            if self.sums:
                call = by_triton.sums(self.a, self.b, self.d, *scales, g.first, **how)
            else:
                call = by_triton.rows(self.a, self.b, self.d, *scales, g.first, g.expert, **how)
            how_summed = f"promoted/{promote}" if promote else "fast"
            found[f"triton {tile[0]}x{tile[1]} {warps}w {how_summed}"] = call
        return found

    def _apart(self) -> list[tuple]:
        """`each`, with operands of their own memory, as the loop has them."""
        return [(a.contiguous(), b.contiguous(), d, sa.clone(), sb.clone()) for a, b, d, sa, sb in self.each()]

    def _empty_too(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, and zeros for experts without a row, which the loop gives 16 rows of zeros."""
        empty = [self.d[e] for e, count in enumerate(self.groups.host) if self.sums and not count]
        return lambda: (call(), [d.zero_() for d in empty])

    def loop(self) -> Callable[[], object]:
        each = [
            (ScaledTensor(a, sa), ScaledTensor(b, sb), gemm.Epilogue(into=d)) for a, b, d, sa, sb in self._apart()
        ]
        return self._all_written(lambda: [gemm.gemm(a, b, into, fast_accum=self.fast) for a, b, into in each])

    def loop_torch(self) -> Callable[[], object]:
        each, how = self._apart(), {"use_fast_accum": self.fast, "out_dtype": self.d.dtype}
        return self._all_written(
            lambda: [torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb, out=d, **how) for a, b, d, sa, sb in each]
        )

    def _all_written(self, call: Callable[[], object]) -> Callable[[], object]:
        """The loop pads to 16 rows only: what it leaves is zeroed once, outside the time."""
        call = self._empty_too(call)
        g = self.groups

        def run() -> None:
            if self.checked and not self.sums:
                self.d[: g.end][~g.own[: g.end, 0]] = 0
            call()

        return run

    def dense(self) -> Callable[[], object]:
        """The loop by our dense CUTLASS kernels, of the promotion of `tables`."""
        stream, launches = plans._stream(0), []
        for a, b, d, sa, sb in self._apart():
            problem = plans.problem_of(a, b, d, plans.ALIGNMENT, self.fast, None, False)
            plan = CUTLASS.candidates(problem, 0, plans.pointers_of(sa, sb), 1)[0]
            launches.append((plan, (a, b), (a.data_ptr(), b.data_ptr(), d.data_ptr(), d.data_ptr(), stream)))
        return self._all_written(lambda: [plan.run(*at) for plan, _, at in launches])

    def torch_fp8(self) -> Callable[[], object]:
        g, a, b = self.groups, self.a, self.b
        if E5M2.dtype in (a.dtype, b.dtype):
            raise ValueError("it takes E4M3 alone")
        scale_a = self.scale_a[g.expert.long()].repeat_interleave(TILE)
        scale_b = self.scale_b.unsqueeze(1).expand(-1, b.shape[1]).contiguous()
        how = {"offs": g.ends, "out_dtype": BF16, "use_fast_accum": self.fast}
        return self._copied(lambda: torch._scaled_grouped_mm(a, b.mT, scale_a, scale_b, **how))

    def torch_bf16(self) -> Callable[[], object]:
        a, b, g = self.a.to(BF16), self.b.to(BF16), self.groups
        if self.d.dtype is FP32:
            raise ValueError("it returns BF16")
        if self.sums:
            a, b = a.mT.contiguous().mT, b.mT.contiguous()  # dy^T and x as autograd has them
            call = lambda: torch._grouped_mm(a, b, offs=g.ends, out_dtype=BF16)  # noqa: E731
        else:
            call = lambda: torch._grouped_mm(a, b.mT, offs=g.ends, out_dtype=BF16)  # noqa: E731
        return self._copied(call, self.scale_a * self.scale_b)

    def _copied(self, call: Callable[[], torch.Tensor], scale: torch.Tensor | None = None) -> Callable[[], object]:
        """A call that returns its result: in the check it is copied to `d`, in the time not."""
        g = self.groups

        def run() -> None:
            y = call()
            if bool(self.checked):
                if scale is not None:
                    each = scale[:, None] if self.sums else scale[g.expert.long()].repeat_interleave(TILE)
                    y = y.float() * each.unsqueeze(-1)
                self.d.copy_(y) if self.sums else self.d[: g.end].copy_(y[: g.end])

        return run

    checked = True  # while results are checked


# ---- The library ----------------------------------------------------------------------------------------------------


class Args(ctypes.Structure):
    """mfp8_grouped of grouped/grouped_abi.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "a b scale_a scale_b d first expert counts workspace stream".split()),
        ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in "m n k experts step_a step_b accumulate device".split()),
    ]


class Library:
    """The kernels of benchmarks/grouped/, compiled by `build`."""

    def __init__(self, path: str, skip: str):
        self._loaded = loaded = ctypes.CDLL(str(Path(path).resolve()))
        loaded.mfp8_grouped_gemm.argtypes = [ctypes.c_int, ctypes.POINTER(Args)]
        loaded.mfp8_grouped_error.restype = ctypes.c_char_p
        self._workspace = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        self.kernels = []
        for index in range(loaded.mfp8_grouped_kernels()):
            info, sums, ptr = cutlass_build.Info(), ctypes.c_int(), ctypes.c_int()
            loaded.mfp8_grouped_describe(index, ctypes.byref(info), ctypes.byref(sums), ctypes.byref(ptr))
            how = f"promoted/{info.promote}" if info.promote else "fast"
            shape = f"{info.tile_m}x{info.tile_n} {info.cluster_m}x{info.cluster_n}{' pingpong' * info.pingpong}"
            name = f"{'ptr-array' if ptr.value else 'tables'} {shape} {how}"
            types = tuple(TYPES[code] for code in (info.a, info.b, info.d))
            if not skip or skip not in name:
                self.kernels.append((index, name, types, bool(sums.value)))

    def calls(self, case: Case, family: str) -> dict[str, Callable[[], object]]:
        types = case.a.dtype, case.b.dtype, case.d.dtype
        fitting = [k for k in self.kernels if k[1].startswith(family) and k[2] == types and k[3] == case.sums]
        return {name: self._call(index, name, case) for index, name, _, _ in fitting}

    def _call(self, index: int, name: str, case: Case) -> Callable[[], object]:
        g, (m, k) = case.groups, case.a.shape
        n = case.b.shape[0] if case.sums else case.b.shape[1]
        stream = torch.cuda.current_stream().cuda_stream
        named = {"a": case.a, "b": case.b, "d": case.d, "scale_a": case.scale_a, "scale_b": case.scale_b}
        named |= {"first": g.first, "expert": g.expert, "counts": g.counts, "workspace": self._workspace}
        at = {name: tensor.data_ptr() for name, tensor in named.items()}
        args = Args(**at, stream=stream, workspace_bytes=self._workspace.numel(), m=m, n=n, k=k, experts=g.experts)
        args.step_a = args.step_b = 1
        by, launch = ctypes.byref(args), self._loaded.mfp8_grouped_gemm

        def call(kept=named) -> None:
            if status := launch(index, by):
                raise RuntimeError(f"{name}: status {status}, {self._loaded.mfp8_grouped_error().decode()}")

        return call


def build(to: str) -> None:
    """Compile benchmarks/grouped/*.cu into one library."""
    nvcc, version = cutlass_build._nvcc()
    include, cutlass = cutlass_build._headers()
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source in sorted(SOURCES.glob("*.cu")):
            objects.append(f"{scratch}/{source.stem}.o")
            folders = [f"-I{folder}" for folder in (SOURCES, cutlass_build.SOURCES, include)]
            print(f"compiling {source.name}", flush=True)
            command = [nvcc, *cutlass_build.FLAGS, *folders, "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, check=True)
        subprocess.run([nvcc, *cutlass_build.LINK, *objects, "-o", to], check=True)
    print(f"built {to}: nvcc {version}, CUTLASS {cutlass}")


# ---- Measurement ----------------------------------------------------------------------------------------------------


def cases(groups: Groups, hidden: int, ffn: int, device: str, kinds: list[str]):
    """The Cases of an expert's two linears, fc1 (2 ffn, hidden) and fc2 (hidden, ffn), one after the other."""
    for linear, (out, width) in {"fc1": (2 * ffn, hidden), "fc2": (hidden, ffn)}.items():
        x = fp8(torch.randn(groups.rows, width, device=device) * groups.own, E4M3)
        dy = fp8(torch.randn(groups.rows, out, device=device) * groups.own, E5M2)
        w = fp8(torch.randn(groups.experts, out, width, device=device), E4M3)
        if "forward" in kinds:
            y = torch.empty(groups.rows, out, dtype=BF16, device=device)
            yield Case(f"{linear} forward", groups, x, w, y, True)
            del y
        if "dgrad" in kinds:
            dx = torch.empty(groups.rows, width, dtype=BF16, device=device)
            yield Case(f"{linear} dgrad", groups, dy, transposed(w), dx, False)
            del dx
        x_t, dy_t = transposed(x), transposed(dy)
        del x, dy, w
        for kind, dtype in ("wgrad", BF16), ("wgrad FP32", FP32):
            if kind in kinds:
                dw = torch.empty(groups.experts, out, width, dtype=dtype, device=device)
                yield Case(f"{linear} {kind}", groups, dy_t, x_t, dw, False)
                del dw


def checked(case: Case, calls: dict[str, Callable[[], object]], dense: bool) -> dict[str, tuple[float, str, str]]:
    """{system: (error, what is wrong, whether its bits are the dense kernels')}; prints what is wrong."""
    results, bits = {}, None
    Case.checked = True
    if dense:
        case.d.fill_(math.nan)
        case.dense()()
        bits = case.d.clone()
    for name, call in calls.items():
        try:
            error, wrong = case.fault(call)
        except RuntimeError as reason:
            error, wrong = math.nan, str(reason).splitlines()[0][:150]
        same = ""
        if bits is not None and name.startswith("tables") and not wrong:
            same = "equal" if torch.equal(bits.nan_to_num(7), case.d.nan_to_num(7)) else "differ"
        results[name] = error, wrong, same
        if wrong:
            print(f"    WRONG {case.name}: {name}: {wrong}", flush=True)
    Case.checked = False
    return results


def measure(rows: list[dict], model, kind: str, groups: Groups, sizes, library, kinds, families, dense: bool, keep):
    """Add rows to the table, and print and `keep` them as they come."""
    for case in cases(groups, *sizes, "cuda", kinds):
        calls = case.calls(library, families)
        errors = checked(case, calls, dense)
        calls = {name: call for name, call in calls.items() if not math.isnan(errors[name][0])}
        bursts = timing.in_turns(calls, 4)
        ms = timing.under_load(calls, bursts)
        for name in calls:
            error, wrong, bits = errors[name]
            row: dict = {"model": model, "counts": kind, "experts": groups.experts, "rows": groups.total}
            row |= {"gemm": case.name, "system": name, "ms": round(ms[name], 4)}
            row |= {"TFLOP/s": round(case.flops / ms[name] / 1e9, 1)}
            row |= {"burst TFLOP/s": round(case.flops / bursts[name] / 1e9, 1), "error": f"{error:.2e}"}
            rows.append(row | {"wrong": wrong, "bits": bits})
            rates = f"{row['TFLOP/s']:8} {row['burst TFLOP/s']:8}"
            print(f"  {case.name:16} {name:40} {rates}  {row['error']} {bits} {wrong}", flush=True)
        keep()
        del case, calls
        torch.cuda.empty_cache()


def short_table(rows: list[dict]) -> None:
    """The best of each system by GEMM."""
    for model, counts in dict.fromkeys((row["model"], row["counts"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["counts"]) == (model, counts)]
        gemms = list(dict.fromkeys(row["gemm"] for row in mine))
        print(f"\n{model}, {mine[0]['experts']} experts, {mine[0]['rows']} rows, {counts}; TFLOP/s under load")
        print(f"{'':12}" + "".join(f"{name:>16}" for name in gemms))
        families: dict[str, dict[str, float]] = {}
        for row in mine:
            name = row["system"]
            family = name if name.startswith(("loop", "torch")) else name.split()[0]
            best = families.setdefault(family, {})
            best[row["gemm"]] = max(best.get(row["gemm"], 0), row["TFLOP/s"])
        for family, best in families.items():
            print(f"{family:12}" + "".join(f"{best[name]:16.0f}" if name in best else f"{'':16}" for name in gemms))


def check_all(device: str, library, families: list[str], dense: bool) -> tuple[int, int]:
    """Check systems at small sizes and all kinds of counts: the numbers of wrong results, and of failed calls."""
    wrong = failed = 0
    small = (6, 150, (256, 128)) if device == "cuda" else (3, 20, (256, 128))
    # The last has more tiles than a GPU has multiprocessors, so that a block takes several.
    for kind, (experts, rows, sizes) in [*((kind, small) for kind in COUNTS), ("random", (24, 700, (1024, 768)))]:
        if device != "cuda" and experts > small[0]:
            continue
        groups = Groups(counts_of(kind, experts, rows, 7), device)
        for case in cases(groups, *sizes, device, ["forward", "dgrad", "wgrad", "wgrad FP32"]):
            results = checked(case, case.calls(library, families), dense)
            wrong += sum(bool(text) for _, text, _ in results.values())
            failed += sum(math.isnan(error) and text[:5] != "error" for error, text, _ in results.values())
            said = ", ".join(f"{name} {bits}".rstrip() for name, (_, text, bits) in results.items() if not text)
            print(f"  {kind:8} {experts:3} {case.name:16} right: {said}", flush=True)
    return wrong, failed


def apart(args: argparse.Namespace) -> list[dict]:
    """The rows of each family, measured in a process of its own: a fault of one would end all others."""
    rows: list[dict] = []
    for family in args.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.csv"
            command = [sys.executable, *sys.argv, "--only", family, "--here", "--csv", str(path)]
            try:
                subprocess.run(command, timeout=args.limit)
            except subprocess.TimeoutExpired:
                print(f"{family}: it did not end", flush=True)
            if path.exists():
                for row in csv.DictReader(path.read_text().splitlines()):
                    rows.append(row | {"TFLOP/s": float(row["TFLOP/s"])})
    return rows


def save(path: str | None, rows: list[dict]) -> None:
    if path and rows:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *(key for key in where() if key not in rows[0])])
            writer.writeheader()
            writer.writerows(where() | row for row in rows)


def where() -> dict:
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", metavar="LIBRARY", help="compile the library, and stop")
    parser.add_argument("--library", help="the compiled kernels; without it only the rest is measured")
    parser.add_argument("--check", action="store_true", help="check results at small sizes, and stop")
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="these systems")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    for name in ("experts", "hidden", "ffn"):
        parser.add_argument(f"--{name}", type=int, help="instead of the models'")
    parser.add_argument("--rows", type=int, nargs="+", default=[1536], help="mean rows an expert")
    parser.add_argument("--counts", nargs="+", default=["random"], choices=COUNTS)
    parser.add_argument("--kinds", nargs="+", default=["forward", "dgrad", "wgrad", "wgrad FP32"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", help="write the rows to this file")
    parser.add_argument("--skip", default="", help="kernels whose names contain this")
    parser.add_argument("--here", action="store_true", help="in one process")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each system's process")
    args = parser.parse_args()
    if args.build:
        return build(args.build)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    library = Library(args.library, args.skip) if args.library else None
    dense = False
    if device == "cuda":
        try:
            CUTLASS.prepare(build=False)
            dense = True
        except cutlass_build.Unavailable as reason:
            print(f"without our dense kernels: {reason}")
    print(", ".join(f"{key} {value}" for key, value in where().items()))
    if args.check or device == "cpu":
        families = args.only if device == "cuda" else ["triton"]
        wrong, failed = check_all(device, library, families, dense)
        print(f"{wrong} wrong results at small sizes, {failed} failed calls")
        sys.exit(FAILED if failed else WRONG if wrong else 0)
    if not args.here:
        rows = apart(args)
        if rows:
            short_table(rows)
            save(args.csv, rows)
        return
    wrong, failed = check_all(device, library, args.only, dense)
    print(f"{wrong} wrong results at small sizes, {failed} failed calls", flush=True)
    if failed:
        sys.exit(FAILED)
    rows: list[dict] = []
    for model in args.models:
        experts, hidden, ffn = (
            getattr(args, name) or size
            for name, size in zip(("experts", "hidden", "ffn"), MODELS[model], strict=True)
        )
        for mean in args.rows:
            for kind in args.counts:
                groups = Groups(counts_of(kind, experts, mean, args.seed), device)
                print(f"{model}: {experts} experts, {mean} rows each on average, {kind}", flush=True)
                what = model, f"{kind} {mean}", groups, (hidden, ffn), library, args.kinds, args.only, dense
                measure(rows, *what, lambda: save(args.csv, rows))
                made = [timing.in_turns({"tables": lambda g=groups: tables(g.counts, g.rows // TILE)}, 4)["tables"]]
                print(f"  the tables take {statistics.median(made) * 1000:.0f} us", flush=True)
    if len(args.only) > 1:
        short_table(rows)


if __name__ == "__main__":
    main()
