"""engine/gain_lines.py with a stand-in for the clock, on the CPU."""

from types import SimpleNamespace

import architecture
import pytest
import torch

from megatron_fp8 import gemm
from megatron_fp8.engine.gain_lines import Gain, gains, memory, said, speed
from megatron_fp8.engine.owned_weight import owned_weights
from megatron_fp8.gemm import timing

TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


def weights(flags: str = ""):
    return owned_weights([architecture.build(["--fp8-gemm", "fp8", *flags.split()], level=True)])


def test_every_shape_is_measured_once_and_counted(monkeypatch):
    """In FP8 three GEMMs of the linear's sizes, of operands cast in both layouts; the run's random numbers stay."""
    seen, multiply = [], gemm.gemm

    def counting(a, b, *rest, **options):
        y = multiply(a, b, *rest, **options)
        seen.append(tuple(y.shape))
        return y

    monkeypatch.setattr(gemm, "gemm", counting)
    turns = iter(range(1, 9))

    def in_turns(calls, runs):
        return {name: call() or next(turns) for name, call in calls.items()}

    monkeypatch.setattr(timing, "in_turns", in_turns)
    ours = weights()
    state = torch.get_rng_state()
    found = gains(ours, TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    shapes = {tuple(weight.param.shape) for weight in ours}
    assert {(gain.n, gain.k) for gain in found} == shapes and len(found) == len(shapes) == 4
    assert all(gain.linears == 2 for gain in found)  # of two layers
    assert [(gain.bf16, gain.fp8) for gain in found] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    expected = [size for gain in found for size in ((TOKENS, gain.n), (TOKENS, gain.k), (gain.n, gain.k))]
    assert seen == expected


def test_a_weight_gradient_in_bf16_is_measured_so(monkeypatch):
    calls, multiply = [], gemm.gemm
    monkeypatch.setattr(gemm, "gemm", lambda *args, **options: calls.append(1) or multiply(*args, **options))
    monkeypatch.setattr(timing, "in_turns", lambda calls, runs: {name: call() or 1.0 for name, call in calls.items()})
    gains(weights("--no-fp8-wgrad"), TOKENS)
    assert len(calls) == 2 * 4


def test_what_no_fp8_gemm_takes_is_not_measured():
    assert gains(weights("--fp8-gemm bf16"), TOKENS) == []
    assert gains(weights(), TOKENS + 1) == gains([], TOKENS) == [] == said([])


def test_what_has_no_memory_for_it_is_not_measured(monkeypatch):
    def in_turns(calls, runs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(timing, "in_turns", in_turns)
    assert gains(weights(), TOKENS) == []


def test_the_line_names_what_is_no_faster():
    (line,) = said([Gain(3072, 768, 12, 2.0, 1.0), Gain(768, 768, 12, 0.5, 0.6)])
    assert "19.20 ms in FP8, 30.00 in BF16 (1.56 x); FP8 is no faster for 768 x 768 (0.83 x)" in line
    (line,) = said([Gain(3072, 768, 1, 2.0, 1.0)])
    assert line.endswith("1.00 ms in FP8, 2.00 in BF16 (2.00 x)")


@pytest.mark.parametrize(
    ("storage", "kept", "expected"), [("fp8", False, "4"), ("bf16", False, "4.2"), ("bf16", True, "4.4")]
)
def test_the_line_on_memory(storage, kept, expected):
    """With the copies in FP8 that come in the first step."""
    config = SimpleNamespace(keep_transpose_cache=kept)

    class Bucket:
        def __init__(self, size: int):
            param = torch.empty(size, 1000, device="meta")
            weight = SimpleNamespace(param=param, fp8=True, storage=storage, config=config, trained=True)
            self.weights = [weight] * 2

        def buffers(self):
            return {"weight": [torch.empty(2_000_000_000, dtype=torch.uint8, device="meta")], "master": []}

    args = SimpleNamespace(
        use_distributed_optimizer=True,
        data_parallel_size=2,
        context_parallel_size=2,
        accumulate_allreduce_grads_in_fp32=True,
    )
    buckets = [Bucket(50_000), Bucket(50_000)]  # 2e8 numbers, 2 + 4 + 12 / 4 bytes each of stock's
    sets = [SimpleNamespace(buckets=buckets, linears=[weight for bucket in buckets for weight in bucket.weights])]
    line = f"the linears' weights, gradients and states: {expected} GB on this rank, stock's "
    assert memory(args, []) == [] and memory(args, sets) == [line + "1.8"]
    args.use_distributed_optimizer = args.accumulate_allreduce_grads_in_fp32 = False
    assert memory(args, sets) == [line + "3.2"]


def test_nothing_is_measured_without_a_gpu(monkeypatch):
    monkeypatch.setattr(timing, "in_turns", lambda *args: pytest.fail("measured"))
    args = SimpleNamespace(seq_length=TOKENS, micro_batch_size=1, context_parallel_size=1, rank=0)
    assert speed(args, weights()) == speed(args, []) == []


@pytest.mark.parametrize(("dtype", "expected"), [(torch.uint8, "0.1"), (torch.bfloat16, "0.3")])
def test_what_is_frozen_takes_a_byte_or_stays_in_bf16_beside_its_copy(dtype, expected):
    args = SimpleNamespace(
        use_distributed_optimizer=False,
        data_parallel_size=1,
        context_parallel_size=1,
        accumulate_allreduce_grads_in_fp32=True,
    )
    weight = SimpleNamespace(
        param=torch.empty(100_000, 1000, dtype=dtype, device="meta"),
        fp8=True,
        storage="fp8" if dtype == torch.uint8 else "bf16",
        config=SimpleNamespace(keep_transpose_cache=False),
        trained=False,
    )
    (line,) = memory(args, [SimpleNamespace(buckets=[], linears=[weight])])
    assert line.endswith(f": {expected} GB on this rank, stock's 0.2")
