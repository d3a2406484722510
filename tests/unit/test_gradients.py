"""Where weight gradients wait: three storages, what overwrites and what adds, the noise, and the bytes."""


import pytest
import torch
from engine_parts import Known

from megatron_fp8.comm.wire import Flight
from megatron_fp8.engine.grad_store import GradSink, grad_store
from megatron_fp8.numerics.blocks import PackedBlocks
from megatron_fp8.ops.reference import sum_blocks

STORAGES = ("fp32", "bf16", "fp8")
SHARDS, SHARD = 3, 2048
SHAPE, START = torch.Size([48, 80]), 5 * 128  # in all three shards
N, NUMEL = SHAPE.numel(), SHARDS * SHARD
NAN, INF = float("nan"), float("inf")


def gradient(seed=1, shape=SHAPE):
    """BF16 values, held in FP32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def slot(storage, start=START, identity=(7, 0, 3)):
    made = GradSink(grad_store(SHARDS, SHARD, storage, "cpu"), start, SHAPE, identity)
    made.begin_step(4)
    return made


def stored(slot):
    return slot.store.dense().float()[slot.start : slot.start + N].view(SHAPE)


def near(got, exact, ulps):
    """Within so many units in the last place of E4M3: 2^-3 of a normal value, 2^-17 of twice a block's maximum."""
    floor = exact.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(exact.shape) * 2.0**-16
    return ((got.double() - exact).abs() <= ulps * torch.maximum(exact.abs() / 8, floor)).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_the_first_gradient_of_a_step_overwrites(storage):
    place = slot(storage)
    for junk in (100.0, NAN, INF):
        place.take(Known(torch.full(SHAPE, junk)))
        place.take(Known(torch.full(SHAPE, junk)))
        place.begin_step(5)
        place.take(Known(gradient()))
        if storage == "fp8":
            assert near(stored(place), gradient().double(), 0.5)
        else:
            assert torch.equal(stored(place), gradient())
        place.begin_step(6)


@pytest.mark.parametrize("storage", STORAGES)
def test_later_gradients_add(storage):
    place, exact = slot(storage), torch.zeros(SHAPE, dtype=torch.float64)
    for micro_batch in range(5):
        before = stored(place).double() if micro_batch else 0.0
        place.take(Known(gradient(micro_batch)))
        exact += gradient(micro_batch).double()
        now = before + gradient(micro_batch).double()
        if storage == "fp32":
            assert ((stored(place) - exact).abs() <= 2.0**-21 * 10).all()
        elif storage == "bf16":
            assert torch.equal(stored(place), now.float().bfloat16().float())
        else:
            assert near(stored(place), now, 1 if micro_batch else 0.5)  # stochastic: either neighbour
    assert place.adds == 5


def test_small_contributions_survive_in_fp8():
    """1/64 is below half of E4M3's step at 1, 1/8: to nearest, 1 would stay."""
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(20):
        place = slot("fp8")
        place.begin_step(step)
        place.take(Known(torch.ones(SHAPE)))
        place.take(Known(torch.full(SHAPE, 1 / 64)))
        assert set(stored(place).unique().tolist()) == {1.0, 1.125}
        total += stored(place)
    deviation = (1 / 8 * 7 / 8) ** 0.5 / 8 / (20 * N) ** 0.5
    assert abs(total.mean().item() / 20 - 65 / 64) < 5 * deviation


def test_fp8_noise_is_made_of_the_weight_the_step_and_the_micro_batch():
    def run(identity=(7, 0, 3), step=4, zeros=0, start=START):
        place = slot("fp8", start, identity)
        place.begin_step(step)
        for values in (gradient(1), *[torch.zeros(SHAPE)] * zeros, gradient(2)):
            place.take(Known(values))
        return stored(place)

    once = run()
    assert torch.equal(run(), once)
    assert torch.equal(run(start=0), once)  # wherever its bucket has it
    for other in (run(identity=(7, 1, 3)), run(identity=(8, 0, 3)), run(step=5), run(zeros=1)):
        share = (other != once).double().mean().item()
        assert 0.1 < share < 0.9  # (a zero adds nothing: the last micro-batch has another number, that is all)


def test_dense_storage_draws_no_noise(monkeypatch):
    def seed(self):
        raise AssertionError("a hash for nothing")

    monkeypatch.setattr(GradSink, "seed", seed)
    for storage in ("fp32", "bf16"):
        place = slot(storage)
        for micro_batch in range(3):
            place.take(Known(gradient(micro_batch)))
    place = slot("fp8")
    place.take(Known(gradient(1)))  # the first overwrites, to nearest
    with pytest.raises(AssertionError, match="for nothing"):
        place.take(Known(gradient(2)))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_gradient_touches_no_neighbour(storage):
    place = slot(storage)
    whole = GradSink(place.store, 0, torch.Size([SHARDS, SHARD]), (1,))
    whole.take(Known(gradient(3, whole.shape)))
    before = place.store.dense().clone()
    place.take(Known(gradient(1)))
    place.take(Known(gradient(2)))
    place.store.clear(START, N)
    after = place.store.dense()
    assert torch.equal(after[:START], before[:START]) and torch.equal(after[START + N :], before[START + N :])
    assert (after[START : START + N] == 0).all() and (before != 0).all()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_weight_without_a_gradient_has_a_zero_one(storage):
    place = slot(storage)
    place.take(Known(torch.full(SHAPE, NAN)))
    place.close()  # it has one
    assert stored(place).isnan().all()
    place.begin_step(5)
    place.close()
    assert (stored(place) == 0).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("micro_batch", [0, 1, 2])
def test_what_is_not_finite_stays_so(storage, value, micro_batch):
    place, bad = slot(storage), gradient(9)
    bad[7, 11] = value
    for i in range(3):
        place.take(Known(bad if i == micro_batch else gradient(i)))
    assert not stored(place)[7, 11].isfinite()
    assert (~stored(place).isfinite()).sum() == 1


@pytest.mark.parametrize(("storage", "bytes_each"), [("fp32", 4), ("bf16", 2), ("fp8", 1 + 1 / 128)])
def test_bytes_allocated(storage, bytes_each):
    store = grad_store(4, 1 << 14, storage, "cpu")
    held = sum(t.untyped_storage().nbytes() for t in store.tensors)
    assert held == (1 << 16) * bytes_each
    assert storage != "fp8" or held / (1 << 16) <= 1 + 4 / 128


def copied(store):
    """What every rank has received if it is all that it sends; and what it sends, and where it was to receive."""
    sent, room = store.to_send()
    received = room or PackedBlocks.empty(SHARDS, SHARD, "cpu")
    received.data.copy_(sent.data)
    store.keep_received(received)
    return received, sent, room


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_dense_storage_receives_what_is_reduced(storage):
    place = slot(storage)
    place.take(Known(gradient()))
    (memory,) = place.store.tensors
    packed, _, _ = copied(place.store)
    assert packed.data.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert packed.data.nbytes == NUMEL + NUMEL // 128
    assert near(packed.dequantize()[START : START + N].view(SHAPE), gradient().double(), 0.5)
    place.begin_step(5)
    place.take(Known(gradient(2)))
    assert torch.equal(stored(place), gradient(2))  # and is a gradient's again


def test_fp8_storage_is_sent_as_it_is_and_what_comes_takes_its_place():
    place = slot("fp8")
    place.take(Known(gradient()))
    before = place.store.tensors[0]
    packed, sent, room = copied(place.store)
    assert sent.data is before and room is None
    assert place.store.tensors[0] is packed.data is not before
    assert torch.equal(packed.data, before)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_group_of_one_reads_the_storage(storage):
    place = GradSink(grad_store(1, NUMEL, storage, "cpu"), START, SHAPE, (1,))
    place.take(Known(gradient()))
    reduced = Flight(place.store.local()).land()
    assert torch.equal(reduced.look(), place.store.dense().float())
    assert reduced.square_sum().item() == pytest.approx(place.store.dense().double().square().sum().item(), rel=1e-5)
    part = reduced.gradient(START, START + 256)  # as Adam takes it: dense, or payload and exponents
    if storage == "fp8":
        part = sum_blocks(*part, torch.empty(256))
    assert torch.equal(part.float(), reduced.look()[START : START + 256])
