"""What a level gains at this model's shapes, on this GPU, in time and memory: two lines of the log before training.

    a micro-batch's linears, each cast on its own: 5.21 ms in FP8, 5.60 in BF16 (1.07 x); FP8 is no faster for
        768 x 768 (0.91 x)
    the linears' weights, gradients and states: 0.6 GB on this rank, stock's 1.53

A product of small matrices is bound by its memory traffic and its launch, and FP8 adds the casts: so FP8 is slower
there. Here casts are passes of their own; in training the kernels before and after a GEMM do most of them, and the rest
of a step takes its time in either type. So the ratio tells whether FP8 pays, not how much faster a step is.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import gemm, ops
from ..flags.numeric_checks import GEMM_MULTIPLE
from ..gemm import plans, timing
from ..numerics.scaled import ScaledTensor
from .owned_weight import OwnedWeight
from .weight_set import WeightSet

RUNS = 6
WEIGHT, STATE = 2, 12  # bytes a parameter of stock's: BF16; FP32 master and moments


class Gain(NamedTuple):
    """How long the three products of a linear with a weight (n, k) take, in ms, in BF16 and in FP8. linears: how many
    have that shape."""

    n: int
    k: int
    linears: int
    bf16: float
    fp8: float

    @property
    def speed(self) -> float:
        return self.bf16 / self.fp8


def gains(weights: list[OwnedWeight], tokens: int) -> list[Gain]:
    """A Gain for each shape of the weights whose GEMMs are in FP8. tokens: of a micro-batch; if no FP8 GEMM takes that
    number, there is no Gain. Waits for the GPU, some tenths of a second."""
    if tokens % GEMM_MULTIPLE:
        return []
    here = {tuple(weight.param.shape): weight for weight in weights if weight.fp8}
    counts = Counter(tuple(weight.param.shape) for weight in weights if weight.fp8)
    found, on_plan = [], plans.on_plan
    plans.on_plan = None
    try:
        for (n, k), weight in here.items():
            ms = timing.in_turns(_products(weight, tokens), RUNS)
            found.append(Gain(n, k, counts[n, k], **ms))
    except torch.OutOfMemoryError:  # no reason to end a run
        found = []
    finally:
        plans.on_plan = on_plan
        plans.renew()  # training's plans alone are logged and searched
        torch.cuda.empty_cache()  # training allocates other sizes
    return found


def _products(weight: OwnedWeight, tokens: int) -> dict[str, Callable[[], None]]:
    """{name of a Gain's type: runs the three products of a linear on random data in it}."""
    (n, k), device, config = weight.param.shape, weight.param.device, weight.config
    noise = torch.Generator(device).manual_seed(0)  # the run's own generators stay as they are
    sizes = (tokens, k), (n, k), (tokens, n)
    x, w, dy = (torch.randn(size, dtype=torch.bfloat16, device=device, generator=noise) for size in sizes)
    one = torch.ones((), device=device)
    fmt, grad_fmt = config.forward_format, config.grad_format
    w_fp8 = ops.quantize(w, fmt, one)  # cast once a step, or stored so
    w_t = ops.transpose(w_fp8) if config.keep_transpose_cache else None

    def in_bf16() -> None:
        for a, b in ((x, w.t()), (dy, w), (dy.t(), x)):
            torch.matmul(a, b)

    def in_fp8() -> None:
        a = ScaledTensor(*_both(x, fmt, one))
        gemm.gemm(a, ScaledTensor(w_fp8, one), gemm.Epilogue(dtype=x.dtype), fast_accum=True)
        b = ScaledTensor(*_both(dy, grad_fmt, one))
        gemm.gemm(b, ScaledTensor(ops.transpose(w_fp8) if w_t is None else w_t, one), gemm.Epilogue(dtype=x.dtype))
        if config.wgrad:
            gemm.gemm(b.T, a.T, gemm.Epilogue(dtype=x.dtype))
        else:
            torch.matmul(dy.t(), x)

    return {"bf16": in_bf16, "fp8": in_fp8}


def _both(x: torch.Tensor, fmt, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    payload, columns = ops.quantize(x, fmt, scale, transpose=True)
    return payload, scale, columns


def speed(args, weights: list[OwnedWeight]) -> list[str]:
    """The line about time, which rank 0 measures on a GPU. args: Megatron's."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    weights = [weight for weight in weights if weight.expert is None]  # an expert has fewer tokens
    on_gpu = all(weight.param.is_cuda for weight in weights)
    return said(gains(weights, tokens)) if on_gpu and args.rank == 0 else []


def said(found: list[Gain]) -> list[str]:
    if not found:
        return []
    bf16, fp8 = (sum(gain.linears * getattr(gain, name) for gain in found) for name in ("bf16", "fp8"))
    both = f"{fp8:.2f} ms in FP8, {bf16:.2f} in BF16 ({bf16 / fp8:.2f} x)"
    line = f"a micro-batch's linears, each cast on its own: {both}"
    slower = [f"{gain.n} x {gain.k} ({gain.speed:.2f} x)" for gain in found if gain.speed <= 1]
    return [line + (f"; FP8 is no faster for {', '.join(slower)}" if slower else "")]


def memory(args, sets: list[WeightSet]) -> list[str]:
    """The line about memory, if this rank has linears: the bytes that the engine holds for them, and the bytes that
    stock would hold with these arguments."""
    buckets, linears = [b for owned in sets for b in owned.buckets], [w for owned in sets for w in owned.linears]
    if not linears:
        return []
    frozen = sum(weight.param.nbytes for weight in linears if not weight.trained)
    ours = sum(t.nbytes for bucket in buckets for tensors in bucket.buffers().values() for t in tensors) + frozen
    ours += sum(copies(weight) * weight.param.numel() for weight in linears)
    ranks = args.data_parallel_size * args.context_parallel_size if args.use_distributed_optimizer else 1
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else 2
    each = {True: WEIGHT + gradient + STATE / ranks, False: WEIGHT}
    stocks = sum(weight.param.numel() * each[weight.trained] for weight in linears)
    return [f"the linears' weights, gradients and states: {ours / 1e9:.3g} GB on this rank, stock's {stocks / 1e9:.3g}"]


def copies(weight: OwnedWeight) -> int:
    """How many bytes an element a weight's FP8 GEMMs keep of copies of it, from the first step on."""
    return weight.fp8 * ((weight.storage == "bf16") + weight.config.keep_transpose_cache)
