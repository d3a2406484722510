"""Bytes on the wire for the models of FP8-LM's Table 1: the count of our collectives against the paper's Table 5.

The collectives run in torch's fake process group, which sends nothing, on tensors of the meta device, which have no
memory. So one process can count the bytes that one of 32 ranks sends for 7 billion weights. In the paper, a GPU sends
in a step

    (W / (TP PP) * b + 2 V h / TP * 6) * (DP - 1) / DP  bytes,   W = 12 h^2 L,  b = 6 for BF16,  b = 2 for FP8

b is the bytes of the gradient (4, or 1) plus those of the weight (2, or 1). Embedding and head stay at 6.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch._C._distributed_c10d import FakeProcessGroup

from megatron_fp8.comm import tensor, wire
from megatron_fp8.comm.reduce import reduce_blocks, reduce_fp32
from megatron_fp8.comm.shared import SharedScale
from megatron_fp8.numerics.auto_scaling import ScalingRule
from megatron_fp8.numerics.blocks import PackedBlocks

GIB, VOCABULARY = 2**30, 50_304


@dataclass(frozen=True)
class Model:
    """tp_bf16, tp_fp8: GiB of activations for a micro-batch of `mbs`, from Table 7."""

    hidden: int
    layers: int
    tp: int
    pp: int
    dp: int
    bf16: float  # GiB, Table 5
    fp8: float
    mbs: int = 0
    tp_bf16: float = 0.0
    tp_fp8: float = 0.0

    @property
    def weights(self) -> int:
        """The number of weights in a rank's linears."""
        return 12 * self.hidden**2 * self.layers // (self.tp * self.pp)

    @property
    def embeddings(self) -> float:
        """Bytes that a rank sends for the embedding and the head: the paper's term."""
        return 2 * VOCABULARY * self.hidden / self.tp * 6 * (self.dp - 1) / self.dp

    @property
    def sent(self) -> float:
        """Bytes that a rank sends for each byte of its weights."""
        return self.weights * (self.dp - 1) / self.dp

    @property
    def group(self) -> FakeProcessGroup:
        """The data-parallel group."""
        return FakeProcessGroup._create_internal(1, self.dp)


MODELS = {
    "7B": Model(4096, 32, 1, 1, 32, 37.2, 13.9),
    "13B": Model(5120, 40, 2, 1, 16, 34.3, 12.4, 2, 4.6875, 3.125),
    "175B": Model(12288, 96, 8, 4, 4, 23.4, 8.2, 1, 5.90625, 3.9375),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request):
    wire.sent_bytes.clear()
    yield request.param
    wire.sent_bytes.clear()


def on_meta(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


def reduced_in_blocks(model) -> int:
    packed = PackedBlocks.empty(model.dp, model.weights // model.dp, "meta")
    wire.Flight(reduce_blocks(packed, model.group, True)).land()
    return wire.sent_bytes.pop("grad_reduce")


@functools.cache
def reduced_with_a_shared_scale(model) -> tuple[int, int]:
    """Bytes of gradients and of scales if each linear of a rank is a tensor: qkv, proj, fc1, fc2 of every layer."""
    share, layers = model.hidden**2 // model.tp, model.layers // model.pp
    sizes = [part * share for part in (3, 1, 4, 4)] * layers
    assert sum(sizes) == model.weights
    shared = SharedScale(ScalingRule(), sizes, model.group, model.group, True, "meta")
    for first in range(0, len(sizes), 4):  # one layer in a bucket
        ends = torch.tensor(sizes[first : first + 4]).cumsum(0).tolist()
        spans = [(end - sizes[first + i], end, first + i) for i, end in enumerate(ends)]
        wire.Flight(shared.reduce(on_meta(ends[-1], torch.bfloat16), spans)).land()
    shared.end_step(1)
    sent = wire.sent_bytes.pop("grad_reduce"), wire.sent_bytes.pop("grad_scales")
    assert not wire.sent_bytes
    return sent


def gathered(model, dtype) -> int:
    wire.all_gather_weights(on_meta(model.weights, dtype), model.group)
    return wire.sent_bytes.pop("weight_gather")


def test_blocks_cost_a_byte_and_a_128th(model):
    assert reduced_in_blocks(model) == model.sent * (1 + 1 / 128)
    assert not wire.sent_bytes


def test_a_shared_scale_costs_a_byte_and_its_scales_next_to_nothing(model):
    gradients, scales = reduced_with_a_shared_scale(model)
    assert gradients == model.sent and 0 < scales < 1e-6 * model.sent


def test_the_papers_volume_of_fp8(model):
    """FP8 gradients, and weights gathered in one byte. At O1 they take two: see test_o1_gathers_weights_in_bf16."""
    total = reduced_with_a_shared_scale(model)[0] + gathered(model, torch.uint8) + model.embeddings
    formula = (model.weights * 2 + 2 * VOCABULARY * model.hidden / model.tp * 6) * (model.dp - 1) / model.dp
    assert total == pytest.approx(formula, rel=1e-12)
    assert total / GIB == pytest.approx(model.fp8, abs=0.1)


def test_the_papers_volume_of_bf16(model):
    """FP32 gradients and BF16 weights, with `--fp8-grad-reduce fp32`."""
    wire.Flight(reduce_fp32(on_meta(model.weights, torch.float32), model.group, True)).land()
    total = wire.sent_bytes.pop("grad_reduce") + gathered(model, torch.bfloat16) + model.embeddings
    assert total / GIB == pytest.approx(model.bf16, abs=0.1)


def test_o1_gathers_weights_in_bf16(model):
    """3 + 1/128 bytes a weight instead of 6: FP8 gradients save three, and BF16 weights save nothing."""
    gradients, weights = reduced_in_blocks(model), gathered(model, torch.bfloat16)
    assert (gradients + weights) / model.sent == pytest.approx(3 + 1 / 128, rel=1e-12)
    o1 = (gradients + weights + model.embeddings) / GIB
    assert model.fp8 < o1 < 0.6 * model.bf16
    print(f"O1 sends {o1:.1f} GiB, the paper's FP8 {model.fp8}, BF16 {model.bf16}")


# --- tensor and sequence parallelism: 2 column-parallel and 2 row-parallel linears a layer

SEQUENCE = 2048


def activations(model, gathers_fp8: bool, forward_fp8: bool, backward_fp8: bool) -> tuple[float, float]:
    """GiB that a rank sends for a micro-batch: (for its column-parallel linears, for its row-parallel ones)."""
    group = FakeProcessGroup._create_internal(0, model.tp)
    rows, layers = SEQUENCE * model.mbs, model.layers // model.pp
    own = torch.empty(
        rows // model.tp, model.hidden, dtype=torch.uint8 if gathers_fp8 else torch.bfloat16, device="meta"
    )
    whole = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device="meta")
    column = tensor.gather(own, group), tensor.gather(own, group), tensor.add(whole, group, True, backward_fp8)
    row = tensor.add(whole, group, True, forward_fp8), tensor.gather(own, group)
    sent = []
    for collectives in (column, row):
        for stages in collectives:
            wire.Flight(stages).land()
        sent.append(2 * layers * (wire.sent_bytes.pop("tp_gather") + wire.sent_bytes.pop("tp_sum")) / GIB)
    assert not wire.sent_bytes
    return tuple(sent)


@pytest.mark.parametrize("name", ["13B", "175B"])
def test_activations_are_the_formulas(name):
    """The paper counts only the column-parallel linears' three collectives; the row-parallel ones have two more."""
    wire.sent_bytes.clear()
    model = MODELS[name]
    once = 2 * model.layers // model.pp * (model.tp - 1) * SEQUENCE * model.mbs * model.hidden / model.tp / GIB
    bf16, row = activations(model, False, False, False)
    assert bf16 == 3 * 2 * once == model.tp_bf16 and row == 2 * 2 * once
    assert activations(model, True, False, False) == (model.tp_fp8, 3 * once)  # O3: gathers in FP8
    assert activations(model, True, False, True) == ((3 + 1 / 128) * once, 3 * once)
    column, row = activations(model, True, True, True)
    assert (column, row) == ((3 + 1 / 128) * once, (2 + 1 / 128) * once)
    assert column + row == (bf16 * 5 / 3) * (1 / 2 + 1 / 640)  # 5 of 10 bytes, and 1/128 more for each of the two sums
