"""What every test gets: one thread a process, and a clear reason where a GPU is missing."""

import os

import pytest

# Before torch is imported. The runs that tests start are several processes on a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


def _why_no_fp8_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: none here"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        return f"needs FP8 tensor cores, compute capability 8.9: this GPU has {'{}.{}'.format(*capability)}"
    return None


@pytest.fixture(autouse=True)
def _environment():
    """A test that builds a model leaves Megatron's NVTE_* variables behind, which runs started later would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_fp8_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
