"""What FP8 did to the tensors of a step, counted where the tensors are, on the steps that log.

A cast takes x to payload * scale_inv. Of each cast, per tensor (ops/reference_statistics.py has the details):

    overflows      finite x beyond the format's maximum * scale_inv: they were clipped
    underflows     non-zero x whose payload is zero
    cur_amax       max|x|
    scale_inv      its smallest and largest value (blocks of zeros aside)

The casts:

    activation     x, at every micro-batch's forward pass
    gradient       dy, at every backward pass
    weight         W, once; not where it is stored in E4M3
    wgrad          dW: FP8 storage at every addition, wanted sum against what was stored; FP32 or BF16 storage when it
                   is cast for the wire; the shared scale's wire always. No cast: nothing to count.

Of the gradient summed over data parallelism ("wgrad_reduced"):

    saturations    elements at +-448 where the sum itself is FP8 (`--fp8-grad-reduce shared`): this share moves mu
    SNR            10 log10(sum ref^2 / sum (g - ref)^2) dB; g: the gradient as the optimizer takes it; ref: the same
                   micro-batches' dW added in FP32 and summed over data parallelism in FP32 (`--fp8-log-grad-snr`).
                   Both use the same GEMM operands, so this is the noise of storage and wire alone.

On all other steps `watch` of weights and buckets is None, and nothing here runs. On a step that logs, one kernel
reads each cast tensor and its payload again, 3 bytes an element of BF16; the SNR holds 4 bytes a parameter, does one
more weight-gradient GEMM a micro-batch (none with FP32 storage) and one FP32 reduction. Until the optimizer's step is
made nothing goes from host to device or back, since each such copy, of a single number too, would make the host wait;
then one copy brings everything.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import mpu

from .. import ops
from ..comm import wire
from ..comm.reduce import reduce_fp32
from ..comm.shared import ScaledShard, SharedScale, at_maximum
from ..engine.gradients import GradStore, Wgrad
from ..engine.optimizer import EngineOptimizer
from ..engine.weights import Bucket, Reduced
from ..flags.config import Fp8Config
from ..flags.emulate import linear_name
from ..layers.linear import Fp8Weight
from ..numerics.blocks import block_scales
from ..numerics.formats import E4M3
from ..ops import count_cast
from .write import CASTS, Tally, current_iteration, write

_, _, WEIGHT, WGRAD = range(len(CASTS))  # the first two are a linear's roles, INPUT and GRAD


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def attach(config: Fp8Config, engine: EngineOptimizer) -> None:
    """Give the engine a monitor, in a run that logs statistics."""
    if config.log_interval:
        sharing = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        stages = mpu.get_pipeline_model_parallel_group()
        engine.monitor = Monitor(config, engine.buckets, engine.shared_scale, sharing, stages)


class Monitor:
    """Counts on the steps that log: between `begin` and `end`, weights and buckets call `cast`, `add` and `reduce`.

    Args:
        buckets: all buckets of this rank.
        shared: the state of `--fp8-grad-reduce shared`, else None.
        sharing: the ranks that hold parts or replicas of the same tensors: tensor, data and context parallelism.
        stages: the pipeline-parallel group, whose ranks hold different layers.

    Attributes:
        on_tallies: called on every rank with what was written, {weight's name: tally}, and the iteration.
    """

    def __init__(self, config: Fp8Config, buckets: list[Bucket], shared: SharedScale | None, sharing, stages):
        self.interval, self.snr, self.wire = config.log_interval, config.log_grad_snr, config.grad_reduce
        self.buckets, self.shared, self.sharing, self.stages = buckets, shared, sharing, stages
        self.weights = [weight for bucket in buckets for weight in bucket.weights]
        self.active = False
        self.on_tallies: Callable[[dict[str, Tally], int], None] = lambda tallies, iteration: None
        self._row = {weight: i for i, weight in enumerate(self.weights)}
        self._reference: dict[GradStore, torch.Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: of one that logs, count."""
        self.iteration = current_iteration()
        self._watch(self.iteration % self.interval == 0)
        self._reference.clear()  # of a step that never ended
        if not self.active:
            return
        device = self.weights[0].param.device if self.weights else torch.device("cuda")  # a stage may have none
        count = len(self.weights)
        # count_cast's counts and extremes, of each tensor of CASTS
        self._casts = torch.zeros(count, len(CASTS), 3, dtype=torch.int64, device=device)
        self._extremes = torch.full((count, len(CASTS), 3), -torch.inf, device=device)
        # elements of the sum, saturations; signal, noise
        self._reduced = torch.zeros(count, 4, dtype=torch.float64, device=device)
        self._mu = self.shared.mu if self.shared else None  # replaced, never written, by the step
        for weight in self.weights:
            if weight.fp8 and weight.stored is None:  # a stored one was never cast
                quantized = weight.quantized()  # which the forward pass then finds done
                self.cast(weight, WEIGHT, weight.param, quantized.payload, quantized.scale_inv)
        if self.snr:
            for grads in (bucket.grads for bucket in self.buckets if bucket.grads.storage != "fp32"):
                self._reference[grads] = torch.zeros(grads.numel, device=device)

    def cast(self, weight: Fp8Weight, tensor: int, wanted, payload, scale_inv) -> None:
        """Count a cast of CASTS[tensor], in count_cast's terms."""
        row = self._row[weight]
        count_cast(wanted, payload, scale_inv, self._casts[row, tensor], self._extremes[row, tensor])

    @torch.no_grad()
    def add(self, weight: Fp8Weight, wgrad: Wgrad) -> None:
        """Add a micro-batch's gradient to where it is stored, and count what that did."""
        slot = weight.grad
        if slot.store in self._reference:
            part = self._reference[slot.store][slot.start : slot.start + weight.param.numel()]
            wgrad(out=part.view(slot.shape), accumulate=slot.adds > 0)
        if slot.store.storage != "fp8":
            slot.add(wgrad)
            return
        dense = wgrad(dtype=torch.bfloat16)
        wanted = dense.flatten()
        if slot.adds:
            wanted = slot.blocks.dequantize().add_(wanted)
        slot.add(lambda **_: dense)
        stored = slot.blocks
        self.cast(weight, WGRAD, wanted, stored.payload, block_scales(stored.exponents))

    def reduce(self, bucket: Bucket, reduce: Callable[[Bucket], wire.Stages]) -> wire.Stages:
        """The stages of the bucket's reduction, and counts of its cast for the wire and of what became of the sum."""
        grads = bucket.grads
        if self.wire == "block" and grads.storage != "fp8" and bucket.group.size() > 1:
            self._count_sent(bucket)
        reference = self._reference.pop(grads, None)
        if self.snr and reference is None:
            reference = grads.dense().clone()
        reduced, handles = yield from reduce(bucket)
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
            sent = ops.quantize_blocks(values[a:b])  # what the bucket will send, a weight at a time
            self.cast(weight, WGRAD, values[a:b], sent.payload, block_scales(sent.exponents))

    def _count_shared(self, bucket: Bucket, reduced: ScaledShard) -> None:
        values = bucket.grads.dense()
        for (weight, a, b), scale_inv in zip(bucket.spans, reduced.inverse, strict=True):
            wanted = values[a:b].view(weight.param.shape)
            self.cast(weight, WGRAD, wanted, ops.quantize(wanted, E4M3, scale_inv.reciprocal()), scale_inv)
        for a, b, i in reduced.pieces:
            row = self._reduced[self._row[bucket.weights[i]]]
            row[0] += b - a
            row[1] += at_maximum(reduced.payload[a:b])

    def _compare(self, bucket: Bucket, reduced: Reduced, reference: torch.Tensor) -> None:
        """Signal and noise of this rank's shard against the reference's."""
        values, shard = reduced.look(), bucket.shard
        for weight, a, b in bucket.spans:
            lo, hi = max(a, shard.start) - shard.start, min(b, shard.stop) - shard.start
            if lo < hi:
                row = self._reduced[self._row[weight]]
                row[2] += _square_sum(reference[lo:hi])
                row[3] += _square_sum(values[lo:hi] - reference[lo:hi])

    @torch.no_grad()
    def end(self) -> None:
        """End a step, made or skipped: of one that logs, agree on the counts and write them."""
        if not self.active:
            return
        self._watch(False)
        extremes = self._extremes.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.sharing)  # which may drop a NaN, but no infinity
        sums = torch.cat([self._casts.flatten(1), self._reduced], 1)  # float64: exact to 2^53
        dist.all_reduce(sums, group=self.sharing)
        mu = [] if self._mu is None else [self._mu[:, None]]
        found = torch.cat([sums, extremes.flatten(1), *mu], 1).cpu()  # the one wait
        tallies = {}
        for weight, row in zip(self.weights, found, strict=True):
            casts, reduced, largest, own_mu = row.split([3 * len(CASTS), 4, 3 * len(CASTS), len(mu)])
            tally = Tally(casts.view(-1, 3).tolist(), largest.view(-1, 3).tolist(), reduced.tolist(), *own_mu.tolist())
            tallies[linear_name(weight.path, weight.layer_number)] = tally
        stages: list[dict[str, Tally]] = [tallies]
        if self.stages.size() > 1:
            stages *= self.stages.size()
            dist.all_gather_object(stages, tallies, group=self.stages)
        found_everywhere = {name: tally for stage in stages for name, tally in stage.items()}
        write(found_everywhere, self.iteration)
        self.on_tallies(found_everywhere, self.iteration)

    def _watch(self, active: bool) -> None:
        if active != self.active:
            self.active = active
            for weight in self.weights:
                weight.watch = self if active else None
            for bucket in self.buckets:
                bucket.watch = self if active else None
