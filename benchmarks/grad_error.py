"""The error of a gradient reduced in FP8: this library's block mode and the paper's shared scale.

    python benchmarks/grad_error.py        CPU, one core; the first call trains a small GPT to record gradients

R ranks hold gradients g_i of 64 Ki elements; the truth is their mean in float64.

    block       each g_i quantised once to BlockScaled, one FP32 sum           ops.quantize_blocks, ops.sum_blocks
    two-level   block within nodes of 8, the node's sum quantised again, block across nodes
    shared      one scale s = 448 / max|g_i| over all ranks; payload_i = E4M3(mu * s * g_i); an FP8 ring that
                rounds and saturates at each hop (ops.reference.ring_sum); mean = payload_sum / (R * mu * s)
      post      mu = 1                      the sum overflows
      pre       mu = 1/R                    small elements underflow
      auto      mu found by the paper's rule

FP8-LM's rule for mu (arXiv 2310.18313) starts at 1/sqrt(R). It halves mu after a step in which more than 1e-5 of the
summed payload is at +-448, and multiplies it by 2^(1/1000) after any other. So mu never settles: it grows from mu*/2 to
mu*, the largest mu whose share is 1e-5, within 1,000 steps, and falls back. This program does not run those steps. It
takes the share as a function of mu, over all draws of the data together, and finds mu* by bisection of log2(mu) to 1/8,
from the rule's start. That is the rule for a tensor so large that its share equals its expectation; in one of 64 Ki
elements a single saturated element is already 1.5e-5. "auto" is measured in the middle of the growth, mu*/sqrt(2), and
at its two ends.

Kinds of gradients. On each rank it is signal + noise, with the noise independent between ranks and elements:

    gaussian    signal 0, standard normal noise
    signal      a common standard normal signal of 0.1 times the noise's norm
    student     signal 0, noise from Student's t with 3 degrees of freedom
    recorded    weight gradients of single micro-batches of a GPT that this library trains (`record`)

Measures: relative error ||x - truth|| / ||truth||; the same in dB (SNR); underflow, the share of the truth's non-zero
elements that come out as zero; overflow, the share of the summed payload at +-448 (for block, which has no FP8 sum, the
share that is not finite). Each is the mean over DRAWS draws and, for recorded, over all tensors.
"""

import argparse
import csv
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from stamp import ROOT, commit

from megatron_fp8.numerics import E4M3, compute_scale
from megatron_fp8.ops import reference

RANKS = [2**k for k in range(1, 11)]
ELEMENTS, DRAWS, NODE = 1 << 16, 2, 8
SIGNAL = 0.1  # norm of the common signal over the norm of one rank's noise
SATURATED = 1e-5  # the share that makes the rule halve mu
LARGEST_BLOCK_ERROR = 0.03
RECORDS = ROOT / "runs/grad_records"
RECORDED_STEPS = (5, 60)
RECORDED_LINEARS = ("1.linear_qkv", "1.linear_fc2", "3.linear_qkv", "3.linear_fc2")  # layer and name
MODES = ("block", "two-level", "post", "pre", "auto", "auto, lowest mu", "auto, highest mu")
MEASURES = ("relative_error", "snr_db", "underflow", "overflow")

Draw = Callable[[int, int], torch.Tensor]  # (ranks, number of the draw) -> gradients (ranks, n) float32


# ---- gradients


def gaussian(ranks: int, draw: int, n: int = ELEMENTS, signal: float = 0.0) -> torch.Tensor:
    """(ranks, n): standard normal noise a rank, plus `signal` times one standard normal vector for all."""
    generator = torch.Generator().manual_seed(1_000_003 * ranks + draw)
    noise = torch.randn(ranks, n, generator=generator)
    return noise.add_(torch.randn(n, generator=generator), alpha=signal) if signal else noise


def student(ranks: int, draw: int, n: int = ELEMENTS) -> torch.Tensor:
    """(ranks, n): Student's t with 3 degrees of freedom, z / sqrt((z1^2 + z2^2 + z3^2) / 3) of normal z."""
    generator = torch.Generator().manual_seed(1_000_003 * ranks + draw)
    squares = torch.randn(ranks, n, generator=generator).square_()
    squares += 2 * torch.empty(ranks, n).exponential_(generator=generator)  # distributed as z2^2 + z3^2
    return torch.randn(ranks, n, generator=generator).div_(squares.div_(3).sqrt_())


def resample(micro_batches: torch.Tensor, ranks: int, draw: int) -> torch.Tensor:
    """`ranks` different micro-batches of (m, n), in random order."""
    generator = torch.Generator().manual_seed(draw)
    return micro_batches[torch.randperm(len(micro_batches), generator=generator)[:ranks]]


def kinds(recorded: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, str, Draw]]:
    """(kind, tensor, draw) for everything that is studied."""
    yield "gaussian", "", gaussian
    yield "signal", "", lambda ranks, draw: gaussian(ranks, draw, signal=SIGNAL)
    yield "student", "", student
    for name, micro_batches in recorded:
        yield "recorded", name, lambda ranks, draw, m=micro_batches: resample(m, ranks, draw)


def recorded_gradients(micro_batches: int) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, (m, n) float32) of the recorded tensors, m at least `micro_batches`; trains first if there are too few."""
    wanted = RECORDS / f"step{RECORDED_STEPS[-1]}.pt"
    if not wanted.exists() or len(next(iter(torch.load(wanted, mmap=True).values()))) < micro_batches:
        _train_and_record(micro_batches)
    for step in RECORDED_STEPS:
        for linear, gradients in torch.load(RECORDS / f"step{step}.pt", mmap=True).items():
            yield f"step {step}, layer {linear}", gradients.clone()


def _train_and_record(micro_batches: int) -> None:
    """Train the demo's GPT at O1, one process: 2 sequences of 128 bytes a micro-batch, 8 micro-batches a step."""
    import demo
    from launch import torchrun

    os.chdir(ROOT)
    if not Path(f"{demo.OUTPUT}/data/stdlib_train.idx").exists():
        demo.prepare_data.prepare([], f"{demo.OUTPUT}/data/stdlib", demo.prepare_data.Bytes())
    last = RECORDED_STEPS[-1]
    flags = "--fp8-level O1 --fp8-recipe tensorwise --fp8-grad-accum fp32 --micro-batch-size 2 --eval-iters 0"
    # The check may not run outside of a step.
    flags += f" --exit-interval {last} --no-check-for-nan-in-loss-and-grad"
    flags = " ".join((demo.MODEL, demo.TRAINING, demo.STOCK_ONLY, demo.DATA, flags))
    print(f"recording {micro_batches} micro-batches at steps {RECORDED_STEPS} (minutes)", flush=True)
    environment = {"RECORD_MICRO_BATCHES": str(micro_batches), "CUDA_VISIBLE_DEVICES": ""}
    torchrun(1, [__file__, *flags.split()], RECORDS / "log", timeout=1800, env=environment)


def record(micro_batches: int) -> None:
    """Inside the training process: train, and write RECORDS/step*.pt, {linear: (micro_batches, n) float32}.

    Before the update of a step in RECORDED_STEPS, `micro_batches` more run forward and backward at the same weights.
    The first n elements of each gradient are kept instead of accumulated. The step then clears stock's accumulated
    gradients and continues; the only lasting effect is that data was used up. Megatron divides each loss by the number
    of micro-batches. That is a power of two here, so with just-in-time (tensorwise) scales it changes exponents only.
    """
    from megatron_fp8.plugin import install

    install()
    import runpy

    from megatron.training import training

    from megatron_fp8.engine.owned_weight import OwnedWeight

    stock_step, take = training.train_step, OwnedWeight.take_gradient
    kept: dict[str, list[torch.Tensor]] = {}
    done = 0

    def keep(weight, product):
        name = f"{weight.layer_number}.{weight.path.rpartition('.')[2]}"
        if name in RECORDED_LINEARS:
            kept.setdefault(name, []).append(product.compute(dtype=torch.float32).view(-1)[:ELEMENTS].clone())

    def train_step(forward_step, data, model, optimizer, scheduler, config, forward_backward, *rest, **options):
        nonlocal done
        done += 1
        if done in RECORDED_STEPS:
            OwnedWeight.take_gradient = keep
            forward_backward(
                forward_step_func=forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=micro_batches,
                seq_length=128,
                micro_batch_size=2,
                decoder_seq_length=None,
                forward_only=False,
            )
            OwnedWeight.take_gradient = take
            torch.save({name: torch.stack(kept.pop(name)) for name in RECORDED_LINEARS}, RECORDS / f"step{done}.pt")
        return stock_step(forward_step, data, model, optimizer, scheduler, config, forward_backward, *rest, **options)

    training.train_step = train_step
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")


# ---- reductions: gradients (R, n) float32 -> the sum or mean (n,) float32, and its overflow rate


def block_sum(gradients: torch.Tensor) -> torch.Tensor:
    """The sum of the gradients that the ranks send as BlockScaled."""
    blocks = reference.quantize_blocks(gradients.reshape(-1))
    payload, exponents = (part.view(len(gradients), -1) for part in (blocks.payload, blocks.exponents))
    return reference.sum_blocks(payload, exponents, torch.empty_like(gradients[0]))


def two_level_sum(gradients: torch.Tensor) -> torch.Tensor:
    """block_sum within nodes of 8 ranks, then block_sum of the nodes' sums."""
    return block_sum(torch.stack([block_sum(node) for node in gradients.split(NODE)]))


def shared_mean(gradients: torch.Tensor, scale: torch.Tensor, mu: float) -> tuple[torch.Tensor, float]:
    """The paper's mean of the gradients, and the share of its payload at +-448."""
    payload = reference.ring_sum(reference.quantize(gradients, E4M3, mu * scale)).float()
    overflow = (payload.abs() == E4M3.max).float().mean().item()
    return payload / (len(gradients) * mu * scale), overflow


def highest_mu(draws: list[torch.Tensor], scales: list[torch.Tensor]) -> float:
    """mu*, above which the rule halves mu (see the top of the file), to 1/8 of a binade."""

    def share(k: float) -> float:
        pairs = zip(draws, scales, strict=True)
        return sum(shared_mean(g, scale, 2.0**k)[1] for g, scale in pairs) / len(draws)

    low = high = -torch.tensor(float(len(draws[0]))).log2().item() / 2
    while share(high) <= SATURATED:
        low, high = high, high + 1
    while low == high or share(low) > SATURATED:
        low, high = low - 1, low
    while high - low > 1 / 8:
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) > SATURATED else (middle, high)
    return 2.0**low


# ---- the study


def measure(mean: torch.Tensor, truth: torch.Tensor, overflow: float) -> dict[str, float]:
    error = ((mean.double() - truth).norm() / truth.norm()).item()
    lost = ((mean == 0) & (truth != 0)).sum() / (truth != 0).sum()
    return {"relative_error": error, "underflow": lost.item(), "overflow": overflow}


def study(draw: Draw, ranks: int, draws: int = DRAWS) -> dict[str, dict[str, float]]:
    """{mode: {measure: mean over the draws}}, with the shared modes' mu; two-level if there are two nodes or more."""
    data = [draw(ranks, i) for i in range(draws)]
    scales = [compute_scale(reference.amax(gradients), E4M3) for gradients in data]
    top = highest_mu(data, scales)
    shared = {"post": 1.0, "pre": 1 / ranks, "auto": top / 2**0.5, "auto, lowest mu": top / 2, "auto, highest mu": top}
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for gradients, scale in zip(data, scales, strict=True):
        truth = gradients.sum(0, dtype=torch.float64) / ranks
        sums = {"block": block_sum} | ({"two-level": two_level_sum} if ranks > NODE else {})
        for mode, reduce in sums.items():
            mean = reduce(gradients) / ranks
            results[mode].append(measure(mean, truth, 1 - mean.isfinite().float().mean().item()))
        for mode, mu in shared.items():
            mean, overflow = shared_mean(gradients, scale, mu)
            results[mode].append(measure(mean, truth, overflow))
    return {mode: average(found) | {"mu": shared.get(mode, "")} for mode, found in results.items() if found}


def average(results: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure, and the SNR of the mean error."""
    mean = {m: sum(r[m] for r in results) / len(results) for m in ("relative_error", "underflow", "overflow")}
    return mean | {"snr_db": -20 * torch.tensor(mean["relative_error"]).log10().item()}


def stamp() -> dict[str, str]:
    """Versions and commit that made the figures."""
    core = importlib.metadata.version("megatron-core")
    return {"commit": commit(), "torch": torch.__version__, "megatron-core": core}


def write_csv(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def save_figure(figure, path: Path) -> None:
    """Save as SVG, small and reproducible for the same data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "megatron_fp8", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    )
    import matplotlib.pyplot as plt

    return plt


def by_mode(rows: list[dict], kind: str, ranks: int) -> dict[str, dict[str, float]]:
    """{mode: measures}, averaged over the tensors of the kind."""
    here = [row for row in rows if row["kind"] == kind and row["ranks"] == ranks]
    return {mode: average([r for r in here if r["mode"] == mode]) for mode in dict.fromkeys(r["mode"] for r in here)}


def print_table(rows: list[dict]) -> None:
    """Print Markdown: SNR of each mode, then underflow and overflow of the shared ones."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        print(
            f"\n{kind}\n| ranks | block error | SNR dB: block | two-level | post | pre | auto "
            "| underflow: block | post | pre | auto | overflow: post | pre | auto |"
        )
        print("|---" * 14 + "|")
        for ranks in dict.fromkeys(row["ranks"] for row in rows):
            found = by_mode(rows, kind, ranks)
            snr = [f"{found[m]['snr_db']:.1f}" if m in found else "-" for m in MODES[:5]]
            under = [f"{found[m]['underflow']:.2%}" for m in ("block", "post", "pre", "auto")]
            over = [f"{found[m]['overflow']:.1e}" for m in ("post", "pre", "auto")]
            print("|", " | ".join([str(ranks), f"{found['block']['relative_error']:.2%}", *snr, *under, *over]), "|")


def plot(rows: list[dict], path: Path) -> None:
    """A row of panels for each kind, a column for each measure; auto's band spans the mu that the rule runs through."""
    plt = pyplot()
    names = list(dict.fromkeys(row["kind"] for row in rows))
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    figure, axes = plt.subplots(
        len(names), 3, figsize=(10, 2.4 * len(names)), sharex=True, squeeze=False, layout="constrained"
    )
    columns = (("snr_db", "SNR, dB"), ("underflow", "underflow rate"), ("overflow", "overflow rate"))
    for line, kind in zip(axes, names, strict=True):
        found = [by_mode(rows, kind, r) for r in ranks]
        for panel, (name, label) in zip(line, columns, strict=True):
            for color, mode in enumerate(MODES[:5]):
                if name == "overflow" and mode in ("block", "two-level"):
                    continue  # no FP8 sum
                points = [(r, f[mode][name]) for r, f in zip(ranks, found, strict=True) if mode in f]
                style = {"color": f"C{color}", "linewidth": 1, "linestyle": "--" if mode == "pre" else "-"}
                panel.plot(*zip(*points, strict=True), label=mode, **style)
            ends = ([f[f"auto, {end} mu"][name] for f in found] for end in ("lowest", "highest"))
            panel.fill_between(ranks, *ends, color="C4", alpha=0.2, linewidth=0)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{kind}: {label}", fontsize=9)
            panel.grid(alpha=0.3)
            if name != "snr_db":
                panel.set_yscale("symlog", linthresh=1e-6)
            panel.minorticks_off()
    for panel in axes[-1]:
        panel.set_xlabel("ranks")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    save_figure(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks/results/grad_error.csv")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/figures/grad_error.svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = stamp()
    rows = []
    for kind, tensor, draw in kinds(recorded_gradients(RANKS[-1])):
        for ranks in RANKS:
            # Large sets of the same recorded micro-batches are nearly equal, so use only as many draws as are disjoint.
            draws = min(DRAWS, RANKS[-1] // ranks) if kind == "recorded" else DRAWS
            for mode, found in study(draw, ranks, draws).items():
                rows.append({"kind": kind, "tensor": tensor, "ranks": ranks, "mode": mode} | found | where)
        print(f"{kind} {tensor}: done", flush=True)
    print_table(rows)
    write_csv(args.csv, rows)
    plot(rows, args.figure)
    worst = max((row for row in rows if row["mode"] == "block"), key=lambda row: row["relative_error"])
    where = " ".join(str(worst[key]) for key in ("kind", "tensor", "ranks"))
    print(f"\nblock at its worst: {worst['relative_error']:.2%} ({where} ranks)")
    if not worst["relative_error"] <= LARGEST_BLOCK_ERROR:
        sys.exit(f"grad_error: block's relative error is above {LARGEST_BLOCK_ERROR:.0%}")


if __name__ == "__main__":
    if "RECORD_MICRO_BATCHES" in os.environ:
        record(int(os.environ["RECORD_MICRO_BATCHES"]))
    else:
        main()
