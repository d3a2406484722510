"""Sum micro-batches in a storage of few bits: error and bias against the exact sum.

    python benchmarks/grad_accumulation.py        CPU, one core; reads the gradients that grad_error.py records

K micro-batches g_k of 64 Ki elements are added one by one; the truth is their sum in float64. --fp8-grad-accum offers
the first three storages.

    fp32            total + g
    bf16            total + bf16(g), rounded to bf16
    fp8 stochastic  quantize_blocks(bf16(g)) of the first, to nearest; then ops.reference.add_blocks of bf16(g)
    fp8 nearest     quantize_blocks(total + g), to nearest each time
    fp8 one scale   E4M3 to nearest, one scale for the tensor: 448 / max|total + g|           the paper's

Relative error: ||x - truth|| / ||truth||. Bias: <x - truth, truth> / <truth, truth>, the part of the error along the
truth; -0.1 means that a tenth of the sum is missing. The stochastic storage runs with SEEDS seeds: mean error, mean
bias, and the standard error of that mean.

How the stochastic error adds up. The stored value lies on the grid of its ulp u. An increment g takes the sum S_k to a
fraction f = frac(|g| / u) between two grid points, and rounding there has mean 0 and variance f (1-f) u^2. Roundings
are independent, so their variances add:

    V_K = sum over elements of u_1^2 / 12 + sum for k = 2..K of f_k (1-f_k) u_k^2        (`predicted`)

(the first rounds to nearest). u = 2^(floor(log2|S|) - 3). If the place of |S| in its binade is log-uniform, the mean of
u^2 is S^2 (1 - 1/4) / (2 ln 2) / 64 and that of u is |S| / (16 ln 2). Increments of many ulps spread f evenly, so
f (1-f) = 1/6, and a rounding adds a fixed share c^2 of the running sum's square. Increments below an ulp have
f = |g| / u and add |g| u - g^2. So, relative to |S_K|^2,

    c^2 = 1 / (1024 ln 2)           c = 3.75 % (once, to nearest: c / sqrt(2) = 2.65 %)
    independent micro-batches       |S_k|^2 ~ k:   c^2 ((K+1)/2 - 1/(2K)), grows for ever
    identical ones, |S_k| = k g     to K = 16 (g still about an ulp):   c^2 ((K+1)(2K+1)/(6K) - 1/(2K^2))
                                    after:   every k adds (k / (16 ln 2) - 1) g^2; tends to 1 / (32 ln 2): 21.2 %

To nearest, each rounding has half the variance, but errors are not independent: an increment below half an ulp is lost
each time, and the sum stalls.

Kinds: as in grad_error.py, and "identical", the same normal vector each time. `noise_ratio` is the error divided by the
sampling noise that the sum has anyway, sqrt(K times the variance between micro-batches).
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from grad_error import (
    ELEMENTS,
    ROOT,
    SIGNAL,
    gaussian,
    pyplot,
    recorded_gradients,
    save_figure,
    stamp,
    student,
    write_csv,
)

from megatron_fp8.numerics import E4M3, BlockScaled, ScaledTensor, compute_scale
from megatron_fp8.numerics.blocks import PackedBlocks
from megatron_fp8.numerics.noise import noise_seed
from megatron_fp8.ops import reference

COUNTS = [2**k for k in range(9)]  # micro-batches
SEEDS = 8
ROUNDING_VARIANCE = 1 / (1024 * math.log(2))  # c^2


# ---- storages: (stored, or None before the first; gradient (n,) float32; noise seed) -> stored


def add_fp32(total: torch.Tensor | None, gradient: torch.Tensor, seed: tuple[int, int]) -> torch.Tensor:
    return gradient if total is None else total + gradient


def add_bf16(total: torch.Tensor | None, gradient: torch.Tensor, seed: tuple[int, int]) -> torch.Tensor:
    return gradient.bfloat16() if total is None else total + gradient.bfloat16()


def add_stochastic(total: PackedBlocks | None, gradient: torch.Tensor, seed: tuple[int, int]) -> PackedBlocks:
    if total is None:
        return reference.quantize_blocks(gradient.bfloat16(), out=PackedBlocks.empty(1, gradient.numel(), "cpu"))
    reference.add_blocks(gradient.bfloat16(), total, seed)
    return total


def add_nearest(total: BlockScaled | None, gradient: torch.Tensor, seed: tuple[int, int]) -> BlockScaled:
    return reference.quantize_blocks(gradient if total is None else total.dequantize() + gradient)


def add_one_scale(total: ScaledTensor | None, gradient: torch.Tensor, seed: tuple[int, int]) -> ScaledTensor:
    exact = gradient if total is None else total.dequantize() + gradient
    scale = compute_scale(reference.amax(exact), E4M3)
    return ScaledTensor(reference.quantize(exact, E4M3, scale), scale.reciprocal())


STORAGES: dict[str, Callable] = {
    "fp32": add_fp32,
    "bf16": add_bf16,
    "fp8 stochastic": add_stochastic,
    "fp8 nearest": add_nearest,
    "fp8 one scale": add_one_scale,
}


# ---- the study


def run(add: Callable, gradients: torch.Tensor, counts: list[int], seed: int = 0) -> dict[int, torch.Tensor]:
    """{count: the stored sum (n,) float32 of the first `count` of gradients (K, n)}."""
    total, sums = None, {}
    for k, gradient in enumerate(gradients[: counts[-1]], 1):
        total = add(total, gradient, noise_seed(seed, k))
        if k in counts:
            sums[k] = total.float() if isinstance(total, torch.Tensor) else total.dequantize()
    return sums


def predicted(gradients: torch.Tensor, sums: torch.Tensor) -> list[float]:
    """The stochastic storage's relative error after 1, 2, ... of gradients (K, n). sums: their exact sums."""
    variance, errors = 0.0, []
    for gradient, total in zip(gradients, sums, strict=True):
        ulp = torch.ldexp((total != 0).double(), total.frexp().exponent - 4)  # frexp's mantissa is in [1/2, 1)
        fraction = (gradient.abs() / ulp).nan_to_num(0, 0).frac()
        shares = fraction * (1 - fraction) if errors else 1 / 12
        variance += (ulp.square() * shares).sum().item()
        errors.append(math.sqrt(variance) / total.norm().item())
    return errors


def independent_error(count: int) -> float:
    """The closed form for independent micro-batches."""
    return math.sqrt(ROUNDING_VARIANCE * ((count + 1) / 2 - 1 / (2 * count)))


def identical_error(count: int) -> float:
    """The closed form for identical micro-batches."""
    coarse = ROUNDING_VARIANCE * (sum(k * k for k in range(1, min(count, 16) + 1)) - 0.5)
    fine = sum(k / (16 * math.log(2)) - 1 for k in range(17, count + 1))
    return math.sqrt(coarse + fine) / count


CLOSED_FORMS = {"gaussian": independent_error, "student": independent_error, "identical": identical_error}


def study(gradients: torch.Tensor, counts: list[int] = COUNTS, seeds: int = SEEDS) -> list[dict]:
    """A row for each storage and count: error, bias and its standard error, predicted error, noise ratio."""
    gradients = gradients[: counts[-1]]
    sums = gradients.cumsum(0, dtype=torch.float64)
    prediction = predicted(gradients, sums)
    sampling = gradients.var(0).sum().sqrt().item()  # the sampling noise of one micro-batch
    rows = []
    for storage, add in STORAGES.items():
        stochastic = add is add_stochastic
        runs = [run(add, gradients, counts, seed) for seed in range(seeds if stochastic else 1)]
        for count in counts:
            truth = sums[count - 1]
            errors = torch.stack([found[count].double() - truth for found in runs])
            bias = errors @ truth / truth.square().sum()
            error = errors.norm(dim=1).mean().item()
            rows.append(
                {
                    "storage": storage,
                    "micro_batches": count,
                    "relative_error": error / truth.norm().item(),
                    "predicted": prediction[count - 1] if stochastic else "",
                    "bias": bias.mean().item(),
                    "bias_standard_error": bias.std().item() / seeds**0.5 if stochastic else "",
                    "noise_ratio": error / (sampling * count**0.5) if sampling else "",
                }
            )
    return rows


def kinds(recorded: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, str, torch.Tensor]]:
    """(kind, tensor, gradients (K, n)) for everything that is studied."""
    count = COUNTS[-1]
    yield "gaussian", "", gaussian(count, 0)
    yield "signal", "", gaussian(count, 0, signal=SIGNAL)
    yield "identical", "", gaussian(1, 0).expand(count, ELEMENTS)
    yield "student", "", student(count, 0)
    for name, micro_batches in recorded:
        yield "recorded", name, micro_batches[:count]


def by_storage(rows: list[dict], kind: str, measure: str) -> dict[str, dict[int, float]]:
    """{storage: {micro-batches: measure}}, averaged over the tensors of the kind."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["kind"] == kind and row[measure] != "":
            found.setdefault(row["storage"], {}).setdefault(row["micro_batches"], []).append(row[measure])
    return {s: {k: sum(v) / len(v) for k, v in counts.items()} for s, counts in found.items()}


def print_table(rows: list[dict]) -> None:
    """Print Markdown: each kind's errors, noise ratios and biases, and predictions for stochastic storage."""
    columns = "error: bf16 | stochastic | predicted | closed form | nearest | one scale | noise ratio: stochastic"
    columns += " | bias: bf16 | stochastic | nearest | one scale"
    for kind in dict.fromkeys(row["kind"] for row in rows):
        error, bias, noise = (by_storage(rows, kind, m) for m in ("relative_error", "bias", "noise_ratio"))
        prediction = by_storage(rows, kind, "predicted")["fp8 stochastic"]
        print(f"\n{kind}\n| micro-batches | {columns} |")
        print("|---" * 12 + "|")
        for count in error["fp32"]:
            spread = [r["bias_standard_error"] for r in rows if r["kind"] == kind and r["micro_batches"] == count]
            spread = [x for x in spread if x != ""]
            cells = [f"{error['bf16'][count]:.2%}", f"{error['fp8 stochastic'][count]:.1%}", f"{prediction[count]:.1%}"]
            cells += [f"{CLOSED_FORMS[kind](count):.1%}" if kind in CLOSED_FORMS else "-"]
            cells += [f"{error[s][count]:.1%}" for s in ("fp8 nearest", "fp8 one scale")]
            cells += [f"{noise['fp8 stochastic'][count]:.2f}" if noise else "-"]
            cells += [f"{bias['bf16'][count]:+.2%}"]
            cells += [f"{bias['fp8 stochastic'][count]:+.2%} ± {math.hypot(*spread) / len(spread):.2%}"]
            cells += [f"{bias[s][count]:+.1%}" for s in ("fp8 nearest", "fp8 one scale")]
            print("|", " | ".join([str(count), *cells]), "|")
    largest = max(row["relative_error"] for row in rows if row["storage"] == "fp32")
    print(f"\nfp32, the largest error of all: {largest:.1e}")


def plot(rows: list[dict], path: Path) -> None:
    """A row of panels for each kind: error, and bias."""
    plt = pyplot()
    names = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = plt.subplots(
        len(names), 2, figsize=(8, 2.3 * len(names)), sharex=True, squeeze=False, layout="constrained"
    )
    for (left, right), kind in zip(axes, names, strict=True):
        for panel, measure in ((left, "relative_error"), (right, "bias")):
            for storage, points in by_storage(rows, kind, measure).items():
                panel.plot(*zip(*points.items(), strict=True), label=storage, linewidth=1)
            panel.set_xscale("log", base=2)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.set_title(f"{kind}: {measure.replace('_', ' ')}", fontsize=9)
        expected = by_storage(rows, kind, "predicted")["fp8 stochastic"]
        left.plot(*zip(*expected.items(), strict=True), "k:", label="stochastic, predicted", linewidth=1)
        left.set_yscale("log")
        left.set_ylim(bottom=5e-4)  # fp32's errors are below
        left.minorticks_off()
    for panel in axes[-1]:
        panel.set_xlabel("micro-batches")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save_figure(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks/results/grad_accumulation.csv")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/grad_accumulation.svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = stamp()
    rows = []
    for kind, tensor, gradients in kinds(recorded_gradients(COUNTS[-1])):
        rows += [{"kind": kind, "tensor": tensor} | row | where for row in study(gradients)]
        print(f"{kind} {tensor}: done", flush=True)
    print_table(rows)
    write_csv(args.csv, rows)
    plot(rows, args.figure)


if __name__ == "__main__":
    main()
