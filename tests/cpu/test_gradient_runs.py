"""Weight gradients through Megatron's loop: every storage and wire, every cut of a batch, overlap, resume, norms.

Buckets of 10,000 elements: a bucket for each weight of the tiny model, so that order and overlap have something to do.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from launch import ROOT
from megatron_runs import SIX_STEPS, TINY_GPT, run_megatron, script_path

O1 = "--fp8-level O1 "
DISTRIBUTED = " --use-distributed-optimizer"
OVERLAP = DISTRIBUTED + " --overlap-grad-reduce --ddp-bucket-size 10000"
EXACT = O1 + "--fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32"
INTERLEAVED = " --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
RECOMPUTE = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 1"
nightly = pytest.mark.slow


def train(nproc, flags):
    return run_megatron(nproc, [*TINY_GPT, *SIX_STEPS, *flags.split()])


def cells(storage, wire):
    return f"{O1}--fp8-grad-accum {storage} --fp8-grad-reduce {wire}"


def zeros(run):
    fields = [field.split(":") for line in run.lines if " iteration " in line for field in line.split("|")]
    return [float(f[1]) for f in fields if f[0].strip() == "num zeros"]


# --- against stock


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, OVERLAP + " --log-num-zeros-in-grad"),
        pytest.param(2, OVERLAP + RECOMPUTE, marks=nightly),
        pytest.param(2, OVERLAP + " --recompute-granularity selective --recompute-modules mlp", marks=nightly),
        pytest.param(2, OVERLAP + INTERLEAVED, marks=nightly),
        pytest.param(4, OVERLAP + INTERLEAVED, marks=nightly),
        pytest.param(4, OVERLAP + INTERLEAVED + " --no-align-grad-reduce", marks=nightly),
        pytest.param(2, OVERLAP + " --micro-batch-size 1 --calculate-per-token-loss", marks=nightly),
    ],
)
def test_in_full_precision_overlapped_buckets_train_as_stocks_do(nproc, flags):
    """To the last digit until the second update; then Adam's fused operations differ in theirs."""
    flags += " --clip-grad 0"
    stock, ours = train(nproc, flags), train(nproc, f"{EXACT} {flags}")
    assert len(stock.losses) == 6 and stock.losses[-1] < stock.losses[0] - 0.2
    assert ours.losses[:3] == stock.losses[:3] and ours.losses == pytest.approx(stock.losses, rel=5e-5)
    assert zeros(ours)[:3] == zeros(stock)[:3] and len(zeros(ours)) == (6 if "zeros" in flags else 0)


# --- storages and wires


@pytest.mark.parametrize(
    ("storage", "wire"),
    [
        ("fp8", "block"),
        pytest.param("fp8", "shared", marks=nightly),  # test_safety.py trains with it
        pytest.param("bf16", "block", marks=nightly),
        pytest.param("fp32", "block", marks=nightly),
        pytest.param("fp32", "shared", marks=nightly),
        pytest.param("bf16", "fp32", marks=nightly),
        pytest.param("bf16", "shared", marks=nightly),
        pytest.param("fp8", "fp32", marks=nightly),
    ],
)
def test_every_storage_and_wire_trains_close_to_fp32(storage, wire):
    reference = train(2, cells("fp32", "fp32") + OVERLAP)
    run = train(2, cells(storage, wire) + OVERLAP)
    assert reference.losses[-1] < reference.losses[0] - 0.3
    assert run.losses == pytest.approx(reference.losses, abs=1e-3)
    assert run.grad_norms == pytest.approx(reference.grad_norms, abs=5e-3)
    assert run.losses != reference.losses
    assert sum(step.skipped for step in run.steps) == 0


@pytest.mark.parametrize("scaling", ["pre", "post"])
@nightly
def test_shared_scales_without_auto_scaling_train(scaling):
    auto = train(2, cells("fp8", "shared") + OVERLAP)
    run = train(2, f"{cells('fp8', 'shared')}{OVERLAP} --fp8-grad-scaling {scaling}")
    assert run.losses == pytest.approx(auto.losses, abs=2e-3)
    assert run.losses != auto.losses


@pytest.mark.parametrize(
    ("nproc", "cut"),
    [
        pytest.param(4, "--fp8-grad-reduce-hierarchy 2", id="2 nodes of 2"),
        pytest.param(2, "--fp8-grad-reduce-hierarchy node", id="one node: one level", marks=nightly),
    ],
)
def test_the_two_level_reduction_trains(nproc, cut):
    reference = train(2, cells("fp32", "fp32") + OVERLAP)
    run = train(nproc, f"{cells('fp8', 'block')}{OVERLAP} {cut} --train-iters 3")
    assert len(run.losses) == 3 and run.losses == pytest.approx(reference.losses[:3], abs=2e-3)
    assert sum(step.skipped for step in run.steps) == 0
    (sent,) = [line for line in run.lines if "MB sent a step" in line]
    assert ("grad_reduce_across_nodes" in sent) == (nproc == 4)


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        pytest.param(2, cells("fp8", "block"), marks=nightly),  # test_overlap_runs.py has it, with O3
        pytest.param(2, cells("fp32", "shared"), marks=nightly),
        pytest.param(2, cells("fp8", "block") + INTERLEAVED, marks=nightly),
        pytest.param(4, cells("fp8", "block") + INTERLEAVED, marks=nightly),
    ],
)
def test_overlap_changes_no_digit(nproc, flags):
    flags += " --clip-grad 0"  # buckets without overlap are larger, and the norm's sum in another order
    overlapped, plain = train(nproc, flags + OVERLAP), train(nproc, flags + DISTRIBUTED)
    assert overlapped.losses == plain.losses


@pytest.mark.parametrize(
    "wire", [pytest.param(wire, marks=nightly) for wire in ("shared", "block", "fp32")]
)
def test_a_resumed_run_draws_the_same_noise_and_scales(wire, tmp_path):
    flags = f"{cells('fp8', wire)}{OVERLAP} --train-iters 10"
    whole = train(2, flags)
    first = train(2, f"{flags} --save {tmp_path} --save-interval 5 --exit-interval 5")
    rest = train(2, f"{flags} --load {tmp_path}")
    assert len(first.losses) == len(rest.losses) == 5
    assert first.grad_norms + rest.grad_norms == whole.grad_norms
    resumed, expected = first.losses + rest.losses, list(whole.losses)
    del resumed[6], expected[6]  # stock logs the mean of a resumed run's first two losses there
    assert resumed == expected


# --- the gradients themselves


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """dump(nproc, flags) -> .grads {weight: (numel,) FP64}, .stock and .norms of the first step."""

    @functools.cache
    def dump(nproc, flags):
        folder = tmp_path_factory.mktemp("dump")
        run_megatron(
            nproc,
            [*TINY_GPT, "--exit-interval", "1", "--fp8-gemm", "bf16", *flags.split()],
            script=str(ROOT / "tests/scripts/dumped_gradients.py"),
            env={"PYTHONPATH": script_path(), "DUMP": str(folder)},
        )
        ranks = [torch.load(folder / f"{rank}.pt") for rank in range(nproc)]
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for rank in ranks:
            for name, found in rank["ours"].items():
                parts.setdefault(name, {}).update(found)
        return SimpleNamespace(
            grads={name: torch.cat([p for _, p in sorted(found.items())]).double() for name, found in parts.items()},
            stock=[g.double().flatten() for rank in ranks for g in rank["stock"]],
            norms=[rank["norms"] for rank in ranks],
        )

    return dump


def relative_errors(dumped, reference):
    assert dumped.grads.keys() == reference.grads.keys() and len(reference.grads) == 8
    return [((dumped.grads[n] - g).norm() / g.norm()).item() for n, g in reference.grads.items()]


def cut(micro_batch, nproc):
    return f"--micro-batch-size {micro_batch}" + (DISTRIBUTED if nproc > 1 else "")


CUTS = [
    (2, 4),
    (1, 1),
    *(pytest.param(*c, marks=nightly) for c in [(1, 4), (1, 2), (2, 2), (2, 1)]),
]


@pytest.mark.parametrize(("nproc", "micro_batch"), CUTS)
def test_fp8_storage_errs_as_stochastic_rounding_must(nproc, micro_batch, dump):
    """Step k of M adds k/M of the final variance, at worst; a wire of blocks sends the storage as it is."""
    reference = dump(1, f"{cells('fp32', 'fp32')} {cut(4, 1)}")
    errors = relative_errors(dump(nproc, f"{cells('fp8', 'block')} {cut(micro_batch, nproc)}"), reference)
    additions = 8 // nproc // micro_batch
    bound = 0.03 if additions == 1 else 0.04 * math.sqrt((additions - 1) / 2 + 1)
    assert min(errors) > 0.015 and max(errors) <= bound, (errors, bound)


@pytest.mark.parametrize(
    ("storage", "wire", "micro_batch", "least", "most"),
    [
        ("fp32", "block", 2, 0.015, 0.03),
        pytest.param("fp32", "block", 4, 0.015, 0.03, marks=nightly),
        pytest.param("bf16", "block", 1, 0.015, 0.03, marks=nightly),
        pytest.param("fp32", "fp32", 1, 0, 0.005, marks=nightly),  # BF16 GEMMs of other sizes
        pytest.param("fp32", "shared", 2, 0.015, 0.06, marks=nightly),
    ],
)
def test_a_wire_errs_by_its_one_rounding(storage, wire, micro_batch, least, most, dump):
    reference = dump(1, f"{cells('fp32', 'fp32')} {cut(4, 1)}")
    errors = relative_errors(dump(2, f"{cells(storage, wire)} {cut(micro_batch, 2)}"), reference)
    assert least <= min(errors) and max(errors) <= most, errors


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, f"{cells('fp8', 'block')} {cut(2, 2)}"),
        pytest.param(4, cells("fp8", "block") + OVERLAP, marks=nightly),  # some shards are padding only
        pytest.param(2, cells("fp32", "shared") + DISTRIBUTED, marks=nightly),
        pytest.param(2, cells("fp32", "fp32") + DISTRIBUTED, marks=nightly),
        pytest.param(2, cells("fp8", "block") + " --pipeline-model-parallel-size 2", marks=nightly),
    ],
)
def test_the_chains_norms_are_those_of_the_gradients(nproc, flags, dump):
    dumped = dump(nproc, flags)
    everything = torch.cat([*dumped.grads.values(), *dumped.stock])
    for p in (1.0, 2.0, 3.0, math.inf):
        expected = torch.linalg.vector_norm(everything, p).item()
        assert [norms[p] for norms in dumped.norms] == pytest.approx([expected] * nproc, rel=1e-5), p
