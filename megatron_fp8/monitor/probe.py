"""Compare the three GEMMs of every linear in one step with the same GEMMs of unrounded operands.

    fprop   y = x W^T               dgrad   dx = dy W               wgrad   dW = dy^T x
    q       the product of the operands that the GEMM read: FP8 payloads times scales, or emulated
    ref     the product of the same operands in BF16, before they were rounded

    error   |q - ref| / |ref|       Frobenius norms
    gain    <q, ref> / <ref, ref>   1 if the rounding neither shrinks nor stretches (numerics/emulation.py)

q = gain * ref + r with r orthogonal to ref, so error^2 = (gain - 1)^2 + |r|^2 / |ref|^2. An error of 4 % with a gain of
1 is noise; an error of 8 % with a gain of 0.92 is a bias.

BF16 holds every FP8 number, so both products have BF16 operands and an FP32 sum, and q is scaled after it. They leave
out a tensor core's narrower sum (gemm/interface.py) and the rounding of the result to BF16. Training does not use them:
the step's own GEMMs run as always, and the losses are the same to the last bit.

The reference's W is the stored weight if that is BF16, as a BF16 run would multiply. If the weight is stored in E4M3
(O3), W is the optimizer's master rounded to BF16. The error then contains the rounding of the storage, as it contains
the rounding of the cast at O1 and O2. x and dy are those of this run, with all earlier rounding in them.

For each operand, over all elements of the step:

    underflow     share of elements that are not zero, but were read as zero
    saturation    share of finite elements beyond the format's maximum times the scale: clipped, or read as infinite
    kurtosis      E[(t - mean)^4] / E[(t - mean)^2]^2: 3 for a normal distribution, about n for one outlier among n
    amax          largest magnitude
    scale         the cast's smallest and largest scale

Sums of squares, dot products, counts and power sums are added over micro-batches and over data-, tensor- and context-
parallel ranks, in FP64 (the kurtosis loses digits if the mean is beyond 1,000 standard deviations). A GEMM here is one
rank's, of one micro-batch. If tensor parallelism cuts the sum (fprop of linear_proj and linear_fc2, dgrad of linear_qkv
and linear_fc1), the parts are compared before they are added; wgrad is compared before micro-batches are added.
Recomputed activations are counted once.

Cost. On other steps: a test of an empty tuple. On a probed step: x is kept in BF16 for the backward pass, as in a BF16
run; two BF16 GEMMs for each GEMM, a portion of rows at a time, and some passes in FP64; with sequence parallelism two
more gathers of x; 2 bytes for each E4M3 weight, and 4 more for each weight of the bucket that is being gathered.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engine.events import Observer
from ..engine.optimizer import EngineOptimizer
from ..engine.owned_weight import GRAD, INPUT, OwnedWeight
from ..engine.weight_set import WeightSet
from ..errors import UserError
from ..flags.probe import FOLDER, ProbePlan
from ..numerics.emulation import EmulatedFormat
from ..numerics.scaled import ScaledTensor
from ..ops import count_cast
from ..ranks import all_reduce_largest, gathered
from .writers import CASTS, current_iteration, say

FPROP, DGRAD, WGRAD = range(3)
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = CASTS[:3]  # activation, gradient, weight: the first two are a linear's roles, INPUT and GRAD
WEIGHT = OPERANDS.index("weight")
_MARGIN = 1 + 2.0**-20  # on the largest number that is not clipped, as in ops/reference_statistics.py
_AT_ONCE = 2**24  # elements whose FP64 temporaries exist at the same time

type Read = ScaledTensor | torch.Tensor  # an operand as a GEMM reads it: FP8, or emulated values in BF16


def _values(operand: Read) -> torch.Tensor:
    """The operand in BF16, without its scale."""
    if not isinstance(operand, ScaledTensor):
        return operand
    if operand.payload is not None:
        return operand.payload.to(torch.bfloat16)
    assert operand.columns is not None
    return operand.columns.t().to(torch.bfloat16)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (m, k) @ b (k, n) of BF16 operands, summed in FP32, as FP64."""
    product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
    return product.double()


def compare(read: tuple[Read, Read], exact: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(3,) FP64: |q - ref|^2, |ref|^2 and <q, ref> of the products q and ref.

    read, exact: the factors (m, k) and (k, n), as the GEMM read them and in BF16.
    """
    (a, b), (exact_a, exact_b) = map(_values, read), exact
    found = torch.zeros(3, dtype=torch.float64, device=a.device)
    rows = max(1, _AT_ONCE // b.shape[1])
    for i in range(0, len(a), rows):
        q, ref = _product(a[i : i + rows], b), _product(exact_a[i : i + rows], exact_b)
        for operand in read:
            if isinstance(operand, ScaledTensor):
                q *= operand.scale_inv.double()
        found += torch.stack([(q - ref).square_().sum(), ref.square().sum(), q.mul_(ref).sum()])
    return found


def power_sums(x: torch.Tensor) -> torch.Tensor:
    """(5,) FP64: sums of x, x^2, x^3 and x^4, and the number of elements that are not finite. x: any shape, float."""
    found = torch.zeros(5, dtype=torch.float64, device=x.device)
    for part in x.reshape(-1).split(_AT_ONCE):
        t = part.double()
        square = t * t
        sums = [t.sum(), square.sum(), (square * t).sum(), square.square().sum()]
        found += torch.stack([*sums, (~part.isfinite()).sum().double()])
    return found


def kurtosis(count: float, sums: list[float]) -> float:
    """The fourth standardised moment of `count` elements, from `power_sums`; NaN if all elements are the same."""
    mean, square, cube, fourth = (s / count for s in sums[:4])
    variance = square - mean**2
    if not variance > 1e-12 * square:  # only the error of the sums
        return math.nan
    return (fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4) / variance**2


def count_emulated(x: torch.Tensor, read: torch.Tensor, how: EmulatedFormat | None, counts: torch.Tensor) -> None:
    """Add to `counts` what ops.count_cast would, for x read as emulated numbers. how None: x was read as it is."""
    limit = math.inf if how is None or how.scaled else how.format.max * _MARGIN  # with a scale nothing saturates
    size = x.abs().float()
    counts[0] += x.numel()
    counts[1] += ((size > limit) & (size < torch.inf)).sum()
    counts[2] += ((x != 0) & (read == 0)).sum()


def probe_step(plan: ProbePlan, engine: EngineOptimizer, step: Callable[[], Any]) -> Any:
    """Run a training step and return its result. Probe it if it is one of the plan's steps."""
    iteration = current_iteration()
    if iteration not in plan.steps:
        return step()
    probe = Probe(engine.sets)
    engine.events.subscribe(probe)
    try:
        result = step()
    finally:
        engine.events.unsubscribe(probe)
    found = probe.end()
    if dist.get_rank() == 0:
        write(plan.folder, iteration, found)
    return result


class Probe(Observer):
    """Observes the GEMMs of the step during which it is subscribed.

    Args:
        sets: all weight sets of this rank; their FP8 and emulated linears are probed.
    """

    @torch.no_grad()
    def __init__(self, sets: list[WeightSet]):
        # Of each set, in forward order; buckets are in backward order.
        self._members = [(owned.of, [w for w in owned.linears if _looked_at(w)][::-1]) for owned in sets][::-1]
        self.weights = [weight for _, members in self._members for weight in members]
        self._row = {weight: i for i, weight in enumerate(self.weights)}
        devices = [weight.param.device for owned in sets for weight in owned.linears]
        device = devices[0] if devices else torch.device("cuda")  # a stage may have none
        count = len(self.weights)
        self._gemms = torch.zeros(count, len(GEMMS), 3, dtype=torch.float64, device=device)
        self._counts = torch.zeros(count, len(OPERANDS), 3, dtype=torch.int64, device=device)
        self._sums = torch.zeros(count, len(OPERANDS), 5, dtype=torch.float64, device=device)
        self._extremes = torch.full((count, len(OPERANDS), 3), -torch.inf, device=device)
        self._formats: dict[tuple[int, int], str] = {}
        self._masters: dict[OwnedWeight, torch.Tensor] = {}
        for bucket in (bucket for owned in sets for bucket in owned.buckets):
            if bucket.scaling is not None:
                values = bucket.unsharded(bucket.masters())
                for weight, start, stop in bucket.spans:
                    self._masters[weight] = values[start:stop].view(weight.param.shape).bfloat16()

    def _exact(self, weight: OwnedWeight) -> torch.Tensor:
        return self._masters[weight] if weight in self._masters else weight.dense().detach()

    def forward(self, weight: OwnedWeight, x: torch.Tensor, read_x: Read, read_w: Read) -> None:
        """Probe y = x W^T. x: (M, K) in BF16. read_x, read_w: x and W (N, K) as the GEMM read them."""
        if weight not in self._row:
            return
        exact = self._exact(weight)
        self._look(weight, INPUT, x, read_x)
        if (self._row[weight], WEIGHT) not in self._formats:  # once: W is the same for every micro-batch
            self._look(weight, WEIGHT, exact, read_w)
        self._compare(weight, FPROP, (read_x, read_w.T), (x, exact.t()))

    def backward(
        self, weight: OwnedWeight, x: torch.Tensor, dy: torch.Tensor, dgrad: tuple, wgrad: tuple | None
    ) -> None:
        """Probe dx = dy W and dW = dy^T x: x (M, K) and dy (M, N) in BF16.

        dgrad: (dy (M, N), W (N, K)) as that GEMM read them; W is None if there is no dx.
        wgrad: (dy, x) as that GEMM read them; None for a frozen weight.
        """
        if weight not in self._row:
            return
        self._look(weight, GRAD, dy, dgrad[0])
        if dgrad[1] is not None:
            self._compare(weight, DGRAD, dgrad, (dy, self._exact(weight)))
        if wgrad is not None:
            self._compare(weight, WGRAD, (wgrad[0].T, wgrad[1]), (dy.t(), x))

    def _compare(self, weight: OwnedWeight, gemm: int, read: tuple, exact: tuple) -> None:
        self._gemms[self._row[weight], gemm] += compare(read, exact)

    def _look(self, weight: OwnedWeight, operand: int, x: torch.Tensor, read: Read) -> None:
        row = self._row[weight]
        counts, extremes = self._counts[row, operand], self._extremes[row, operand]
        if isinstance(read, ScaledTensor):
            name = read.format.name.upper()
            count_cast(x, read.payload, read.scale_inv, counts, extremes)
        else:
            plan = weight.emulate
            how = plan.for_operand(weight.path, weight.layer_number, OPERANDS[operand], weight.step) if plan else None
            name = str(how) if how else "BF16"
            count_emulated(x, read, how, counts)
            extremes[0] = torch.maximum(extremes[0], x.abs().amax())
        self._formats[row, operand] = name
        self._sums[row, operand] += power_sums(x)

    @torch.no_grad()
    def end(self) -> dict[str, Any]:
        """Reduce over the ranks: {linear: {GEMM: gemm_statistics, operand: operand_statistics}}, on every rank."""
        self._masters.clear()
        sums = torch.cat([self._gemms, self._counts, self._sums], 2)  # FP64: counts are exact to 2^53
        linears: dict[str, Any] = {}
        sizes = [len(members) for _, members in self._members]
        parts = zip(self._members, self._extremes.split(sizes), sums.split(sizes), strict=True)
        for (of, members), largest, added in parts:
            all_reduce_largest(largest, of.sharing)
            dist.all_reduce(added, group=of.sharing)
            rows = zip(members, added.tolist(), largest.tolist(), strict=True)
            found = {weight.name: self._statistics(weight, *row) for weight, *row in rows}
            for stage in gathered(found, of.stages):
                linears.update(stage)
        return dict(sorted(linears.items(), key=lambda item: _layer(item[0])))

    def _statistics(self, weight: OwnedWeight, sums: list, largest: list) -> dict[str, Any]:
        """{GEMM: gemm_statistics, operand: operand_statistics} of one linear."""
        row = self._row[weight]
        gemms = {name: gemm_statistics(sums[i][:3]) for i, name in enumerate(GEMMS)}
        operands = {
            name: operand_statistics(self._formats.get((row, i), ""), sums[i][3:6], sums[i][6:], largest[i])
            for i, name in enumerate(OPERANDS)
        }
        return {**gemms, **operands}


def _looked_at(weight: OwnedWeight) -> bool:
    """Whether its linear is in FP8 or emulated."""
    return weight.fp8 or bool(weight.emulate and weight.emulate.covers(weight.path, weight.layer_number))


def _layer(name: str) -> tuple[str, int]:
    """The sort key of a linear's name: the block, and the layer's number."""
    block, _, rest = name.partition(".layers.")
    return block, int(rest.partition(".")[0])


def _finite(**values: float) -> dict[str, float | None]:
    """Replace values that JSON cannot hold by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def gemm_statistics(sums: list[float]) -> dict[str, float | None]:
    """{"error", "gain"} from sums of `compare`; None if nothing was computed, or not all is finite."""
    noise, signal, dot = sums
    if not signal:
        return _finite(error=math.nan, gain=math.nan)
    return _finite(error=math.sqrt(noise / signal), gain=dot / signal)


def operand_statistics(
    name: str, counts: list[float], sums: list[float], extremes: list[float]
) -> dict[str, float | str | None]:
    """{"format", "underflow", "saturation", "kurtosis", "amax", "scale_min", "scale_max", "not_finite"} of an operand.

    Args:
        name: of its format.
        counts: elements, saturations, underflows.
        sums: of `power_sums`.
        extremes: amax, the largest scale_inv, minus the smallest; minus infinity if there was none.

    Shares are of 1. A value is None if there is none, or if not all elements are finite.
    """
    elements, saturations, underflows = counts
    if not elements:
        return {"format": name}
    amax, largest, smallest = extremes
    shares = {"underflow": underflows / elements, "saturation": saturations / elements}
    scales = {"scale_min": 1 / largest, "scale_max": -1 / smallest} if math.isfinite(largest + smallest) else {}
    of = {"kurtosis": kurtosis(elements, sums), "amax": amax, "scale_min": math.nan, "scale_max": math.nan, **scales}
    return {"format": name, **shares, **_finite(**of), "not_finite": sums[4]}


def make(folder: str) -> None:
    """Make the folder when a run begins: UserError on rank 0 if it cannot be written, not first at the probe."""
    if os.environ.get("RANK", "0") == "0":
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(f"{FOLDER.name} {folder}: {error.strerror}; name another folder") from None


def write(folder: str, step: int, linears: dict[str, Any]) -> None:
    """Write a probed step's JSON file, and log a line with the worst values."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)  # again: a reader may have moved the folder
    text = json.dumps({"step": step, "linears": linears}, indent=1, allow_nan=False)
    (path / f"step-{step}.json").write_text(text + "\n")
    say(step, summary(linears))


def summary(linears: dict[str, Any]) -> str:
    """The largest error of each GEMM, and the gain farthest from 1, with the linears' names."""
    parts, gains = [], []
    for gemm in GEMMS:
        found = {name: values[gemm] for name, values in linears.items() if values[gemm]["error"] is not None}
        gains += [(values["gain"], gemm, name) for name, values in found.items()]
        if found:
            name = max(found, key=lambda name: found[name]["error"])
            parts.append(f"largest {gemm} error {100 * found[name]['error']:.4g} % {name}")
    if gains:
        gain, gemm, name = max(gains, key=lambda row: abs(row[0] - 1))
        parts.append(f"worst gain {gain:.4g} {gemm} {name}")
    return "; ".join(parts) or ("no GEMM was finite" if linears else "no linear is FP8 or emulated")
