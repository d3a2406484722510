"""What every test gets: one thread a process, a clear reason where a GPU is missing, and its turn."""

import os

import pytest

# Before torch is imported. The runs that tests start are several processes on a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Files that take long, the longest first: a worker of xdist takes a file as a whole, and nobody should begin a long one
# when the others have nothing left. First those of the nightly tests, 4 to 27 minutes of a worker each, of which
# Slurm's mostly wait; then what takes 10 to 70 seconds of every change's tests (--durations, 2026-11-24 and 23).
LONG = """test_layouts test_checkpoints test_slurm test_config_rehearsals test_kills test_latent_runs test_forked_runs
test_emulation_runs test_triton_interpreter test_architecture test_lab_report test_levels test_lab_sweep test_safety
test_stock_equality test_probe_runs test_overlap_runs test_gradient_runs test_watch_runs test_entry test_activation_runs
test_reduce test_benchmarks test_fp8_head test_metrics_runs test_saves test_rehearsal test_tutorial test_build_ahead
test_sharpness_runs test_monitor_runs test_full_rank test_seams test_rehearsal_runs test_slurm_script""".split()


def _why_no_fp8_gpu() -> str | None:
    import torch  # seconds, which the process that only hands out tests does not need

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


@pytest.fixture(autouse=True)
def _one_gpu_of_several(request):
    """Workers share the machine's GPUs: each test computes on its worker's own, and leaves no memory cached there."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    import torch

    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    torch.cuda.set_device(int(worker) % torch.cuda.device_count())
    yield
    torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores: ranks wait for each other, and two workers left a sixth of two cores idle."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return 1 + len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    reason = _why_no_fp8_gpu()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
