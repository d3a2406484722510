"""Sharpness on CUDA: logits of a real size against FP64 on the CPU, no wait for the host, and runs unchanged by it."""

import pytest
import torch
from megatron_runs import TINY_GPT, run_megatron

from megatron_fp8.monitor.logit_sharpness import Sharpness, Statistics, closed_form

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 50_304), pytest.param((2001, 517), marks=pytest.mark.smoke)])
def test_is_that_of_the_cpu(dtype, shape):
    logits = (torch.randn(shape) * 2 - 3).to(dtype)
    targets, valid = torch.randint(shape[1], shape[:1]), torch.rand(shape[0]) < 0.9
    logits[5, 7] = float("nan")
    given = [tensor.cuda() for tensor in (logits, targets, valid)]
    statistics = Statistics(Sharpness._fields, "cuda")
    closed_form(*given[:2])  # whatever waits only once
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = closed_form(*given[:2])
        statistics.add(torch.stack(found), given[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = closed_form(logits.double(), targets)
    for ours, theirs in zip(found, exact, strict=True):
        assert torch.allclose(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    on_cpu = Statistics(Sharpness._fields)
    on_cpu.add(torch.stack(found).cpu(), valid)
    assert torch.equal(statistics.counts.cpu(), on_cpu.counts)
    for name, row in statistics.summary().items():
        assert row == pytest.approx(on_cpu.summary()[name], rel=1e-9)


@pytest.mark.parametrize("level", ["", "--fp8-level O2"])
def test_losses_are_the_same_to_the_last_digit(level):
    flags = [*TINY_GPT, "--deterministic-mode", *level.split()]
    plain = run_megatron(1, flags, gpu=True)
    measured = run_megatron(1, [*flags, "--fp8-sharpness-interval", "5"], gpu=True)
    assert measured.losses == plain.losses and measured.grad_norms == plain.grad_norms
    assert sum(line.startswith("[fp8] iteration") and "centred" in line for line in measured.lines) == 2
