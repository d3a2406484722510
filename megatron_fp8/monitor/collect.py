"""Count on the device what FP8 did to a step's tensors, on the steps that log.

A cast takes x to payload * scale_inv. For each tensor's casts (details in ops/reference_statistics.py):

    overflows      finite x beyond the format's maximum * scale_inv: they were clipped
    underflows     non-zero x whose payload is zero
    cur_amax       max|x|
    scale_inv      its smallest and largest value (without blocks of zeros)

The casts:

    activation     x, in every micro-batch's forward pass
    gradient       dy, in every backward pass
    weight         W, once a step; not if it is stored in E4M3
    wgrad          dW. FP8 storage: at every addition, the exact sum against the stored one. FP32 or BF16 storage: when
                   dW is cast for the wire; with the shared scale, always. Without a cast nothing is counted.

For the gradient summed over data parallelism ("wgrad_reduced"):

    saturations    elements at +-448 if the sum itself is FP8 (`--fp8-grad-reduce shared`): this share moves mu
    SNR            10 log10(sum ref^2 / sum (g - ref)^2) dB; g: the gradient that the optimizer takes; ref: the same
                   micro-batches' dW added in FP32 and summed over data parallelism in FP32 (`--fp8-log-grad-snr`).
                   Both use the same GEMM operands, so this is the noise of storage and wire alone.

On other steps nothing is subscribed and nothing here runs. On a step that logs, one kernel reads each cast tensor and
its payload again, 3 bytes an element of BF16. The SNR holds 4 bytes a parameter and takes one FP32 reduction and one
more weight-gradient GEMM a micro-batch; FP8 storage's counts take that GEMM too. Until the optimizer's step is made,
nothing is copied between host and device, since even a copy of one number makes the host wait. Then one copy brings
all results.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import ops
from ..comm import wire
from ..comm.reduce import reduce_fp32
from ..comm.shared import ScaledShard, at_maximum
from ..engine.bucket import Bucket, Reduced
from ..engine.events import Events, Observer
from ..engine.grad_store import BlockStore, GradStore
from ..engine.optimizer import EngineOptimizer
from ..engine.owned_weight import OwnedWeight
from ..engine.weight_set import WeightSet
from ..flags.config import Fp8Config
from ..gemm import Product
from ..numerics.blocks import block_scales
from ..numerics.formats import E4M3
from ..numerics.scaled import ScaledTensor
from ..ops import count_cast
from ..ranks import all_reduce_largest, gathered
from .writers import CASTS, Tally, current_iteration, write

_, _, WEIGHT, WGRAD = range(len(CASTS))  # the first two are a linear's roles, INPUT and GRAD


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def attach(config: Fp8Config, engine: EngineOptimizer) -> "Monitor | None":
    """Subscribe a monitor in a run that logs statistics. Returns it, or None in other runs."""
    if not config.log_interval:
        return None
    monitor = Monitor(config, engine.sets, engine.events)
    engine.events.subscribe(monitor)
    return monitor


class Monitor(Observer):
    """Subscribes a `Counts` for each step that logs, from beginning to end, and writes the results.

    Args:
        sets: all weight sets of this rank.

    Attributes:
        counts: of the current step, if it logs.
        on_tallies: called on every rank with the results, {weight's name: tally}, and the iteration.
    """

    def __init__(self, config: Fp8Config, sets: list[WeightSet], events: Events):
        self.interval, self._config = config.log_interval, config
        self._sets, self._events = sets, events
        self.counts: Counts | None = None
        self.on_tallies: Callable[[dict[str, Tally], int], None] = lambda tallies, iteration: None

    def begin_step(self) -> None:
        """Begin a step. If it logs, start counting."""
        self._forget()  # the counts of a step that never ended
        self._iteration = current_iteration()
        if self._iteration % self.interval == 0:
            self.counts = Counts(self._config, self._sets)
            self._events.subscribe(self.counts)

    def end_step(self) -> None:
        """End a step, made or skipped. If it logs, reduce the counts over the ranks and write them."""
        if self.counts is None:
            return
        agreed = self.counts.agree()
        self._forget()
        found_everywhere: dict[str, Tally] = {}
        for owned, tallies in zip(self._sets, agreed, strict=True):
            for stage in gathered(tallies, owned.of.stages):
                found_everywhere.update(stage)
        write(found_everywhere, self._iteration)
        self.on_tallies(found_everywhere, self._iteration)

    def _forget(self) -> None:
        if self.counts is not None:
            self._events.unsubscribe(self.counts)
            self.counts = None


class Counts(Observer):
    """Counts of what the casts and sums of one step did."""

    @torch.no_grad()
    def __init__(self, config: Fp8Config, sets: list[WeightSet]):
        self._snr, self._wire = config.log_grad_snr, config.grad_reduce
        buckets = [bucket for owned in sets for bucket in owned.buckets]
        self._sets = sets
        self._weights = [weight for owned in sets for weight in owned.linears]
        self._row = {weight: i for i, weight in enumerate(self._weights)}
        device = self._weights[0].param.device if self._weights else torch.device("cuda")  # a stage may have none
        count = len(self._weights)
        # count_cast's counts and extremes, for each tensor of CASTS
        self._casts = torch.zeros(count, len(CASTS), 3, dtype=torch.int64, device=device)
        self._extremes = torch.full((count, len(CASTS), 3), -torch.inf, device=device)
        # elements of the sum, saturations; signal, noise
        self._reduced = torch.zeros(count, 4, dtype=torch.float64, device=device)
        shared = [(owned.reduction.shared, len(owned.frozen)) for owned in sets if owned.reduction.shared is not None]
        # The step replaces mu and never writes into it. Frozen weights have no mu; they are padded.
        self._mu = [torch.nn.functional.pad(scale.mu, (0, frozen)) for scale, frozen in shared]
        self._reference: dict[GradStore, torch.Tensor] = {}
        self._wanted: torch.Tensor | None = None  # the exact result of the addition in progress
        for weight in self._weights:
            if weight.fp8 and weight.stored is None:  # a weight stored in E4M3 is never cast
                # The forward pass then reuses this cast.
                self.cast(weight, WEIGHT, weight.param, weight.quantized())
        if self._snr:
            for grads in (bucket.grads for bucket in buckets if bucket.grads.storage != "fp32"):
                self._reference[grads] = torch.zeros(grads.numel, device=device)

    def cast(self, weight: OwnedWeight, tensor: int, wanted: torch.Tensor, q: ScaledTensor) -> None:
        """Count a cast of CASTS[tensor]. The roles INPUT and GRAD are indices of CASTS too."""
        self._count(weight, tensor, wanted, q.payload, q.scale_inv)

    def _count(self, weight: OwnedWeight, tensor: int, wanted, payload, scale_inv) -> None:
        row = self._row[weight]
        count_cast(wanted, payload, scale_inv, self._casts[row, tensor], self._extremes[row, tensor])

    @torch.no_grad()
    def gradient(self, weight: OwnedWeight, product: Product) -> None:
        """Add a gradient to the reference. For FP8 storage, keep the exact sum that should be stored."""
        sink = weight.sink
        assert sink is not None
        if sink.store in self._reference:
            part = self._reference[sink.store][sink.start : sink.start + weight.param.numel()]
            product.compute(into=part.view(sink.shape), accumulate=sink.adds > 0)
        if isinstance(sink.store, BlockStore):
            wanted = product.compute(dtype=torch.bfloat16).flatten()
            stored = sink.store.read(sink.start, sink.shape.numel()) if sink.adds else None
            self._wanted = wanted if stored is None else stored.dequantize().add_(wanted)

    @torch.no_grad()
    def gradient_added(self, weight: OwnedWeight) -> None:
        """Count how FP8 storage changed the sum."""
        sink = weight.sink
        assert sink is not None
        if isinstance(sink.store, BlockStore):
            stored = sink.store.read(sink.start, sink.shape.numel())
            self._count(weight, WGRAD, self._wanted, stored.payload, block_scales(stored.exponents))
            self._wanted = None

    def reducing(self, bucket: Bucket, stages: wire.Stages) -> wire.Stages:
        """Run the stages of the bucket's reduction; count its cast for the wire, and compare the sum."""
        grads = bucket.grads
        if self._wire == "block" and grads.storage != "fp8" and bucket.group.size() > 1:
            self._count_sent(bucket)
        reference = self._reference.pop(grads, None)
        if self._snr and reference is None:
            reference = grads.dense().clone()
        reduced, handles = yield from stages
        yield handles
        if isinstance(reduced, ScaledShard):
            self._count_shared(bucket, reduced)
        if reference is not None:
            true, handles = yield from reduce_fp32(reference, bucket.group, bucket.sharded)
            yield handles
            self._compare(bucket, reduced, true.values)
        return reduced, []

    def _count_sent(self, bucket: Bucket) -> None:
        values = bucket.grads.dense()
        for weight, a, b in bucket.spans:
            sent = ops.quantize_blocks(values[a:b])  # the same as the bucket will send, a weight at a time
            self._count(weight, WGRAD, values[a:b], sent.payload, block_scales(sent.exponents))

    def _count_shared(self, bucket: Bucket, reduced: ScaledShard) -> None:
        values = bucket.grads.dense()
        for (weight, a, b), scale_inv in zip(bucket.spans, reduced.inverse, strict=True):
            wanted = values[a:b].view(weight.param.shape)
            self._count(weight, WGRAD, wanted, ops.quantize(wanted, E4M3, scale_inv.reciprocal()), scale_inv)
        for a, b, i in reduced.pieces:
            row = self._reduced[self._row[bucket.weights[i]]]
            row[0] += b - a
            row[1] += at_maximum(reduced.payload[a:b])

    def _compare(self, bucket: Bucket, reduced: Reduced, reference: torch.Tensor) -> None:
        """Add signal and noise of this rank's shard, measured against the reference's shard."""
        values = reduced.look()
        for i, lo, hi in bucket.pieces():
            row = self._reduced[self._row[bucket.weights[i]]]
            row[2] += _square_sum(reference[lo:hi])
            row[3] += _square_sum(values[lo:hi] - reference[lo:hi])

    @torch.no_grad()
    def agree(self) -> list[dict[str, Tally]]:
        """Reduce the counts over the ranks that share the weights: for each set {weight's name: tally}."""
        sums = torch.cat([self._casts.flatten(1), self._reduced], 1)  # float64: exact to 2^53
        sizes = [len(owned.linears) for owned in self._sets]
        for owned, largest, added in zip(self._sets, self._extremes.split(sizes), sums.split(sizes), strict=True):
            all_reduce_largest(largest, owned.of.sharing)
            dist.all_reduce(added, group=owned.of.sharing)
        mu = [torch.cat(self._mu)[:, None]] if self._mu else []
        found = torch.cat([sums, self._extremes.flatten(1), *mu], 1).cpu()  # the one wait
        tallies = []
        for owned, rows in zip(self._sets, found.split(sizes), strict=True):
            tallies.append({w.name: self._tally(w, row, len(mu)) for w, row in zip(owned.linears, rows, strict=True)})
        return tallies

    def _tally(self, weight: OwnedWeight, row: torch.Tensor, mus: int) -> Tally:
        casts, reduced, largest, own_mu = row.split([3 * len(CASTS), 4, 3 * len(CASTS), mus])
        own_mu = own_mu.tolist() if weight.trained else []
        return Tally(casts.view(-1, 3).tolist(), largest.view(-1, 3).tolist(), reduced.tolist(), *own_mu)
