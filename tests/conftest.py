"""What every test gets: one thread a process, a clear reason where a GPU is missing, and its turn."""

import gc
import multiprocessing
import os
import sys
from collections import Counter

import pytest

# Until all test files are imported, see pytest_collection_finish: what imports make stays, so to look through it for
# garbage, ten times over, is a fifth of this start, which each worker of xdist makes.
gc.disable()

# Before torch is imported. The runs that tests start are several processes on a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Files that take long, the longest first: a worker of xdist takes a file as a whole, and nobody should begin a long one
# when the others have nothing left. First those of the nightly tests, 4 to 27 minutes of a worker each, of which
# Slurm's mostly wait; then what takes 6 to 35 CPU seconds of every change's tests (2026-11-26).
LONG = """test_layouts test_checkpoints test_slurm test_config_rehearsals test_kills test_latent_runs test_forked_runs
test_emulation_runs test_lab_report test_triton_interpreter test_dpo_runs test_architecture test_expert_runs test_safety
test_levels test_watch_runs test_lab_sweep test_processes test_gradient_runs test_seams test_hf_folder
test_step_graph_ranks test_frozen_runs test_stock_equality test_context_runs test_rehearsal test_metrics_runs
test_probe_runs test_overlap_runs test_plugin test_monitor_runs test_grad_studies test_fp8_head
test_rehearsal_runs test_emulation test_fused_gradients test_slurm_plants test_cutlass_build test_estimate
test_slurm_script test_sft_runs test_injections test_launch_script test_reduce test_saves test_changed_resumes
test_contributing test_entry test_bisect""".split()


def _worker() -> int:
    """This process's number among xdist's workers; 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _begin_ranks_at_a_gpu_of_this_worker(count: int) -> None:
    """Name this machine's `count` GPUs in another order for the processes that tests start: with four GPUs, ranks of
    the first worker's two-GPU tests take 0 and 1, those of the second worker's 2 and 3. This process has started its
    driver and reads the variable no more."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = 2 * _worker() + 2 * _worker() // count  # once round, one further: 1 and 2, then 3 and 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[(first + i) % count] for i in range(count))


def _why_no_fp8_gpu() -> str | None:
    import torch  # seconds, which the process that only hands out tests does not need

    if not torch.cuda.is_available():
        return "needs a CUDA GPU: none here"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        return f"needs FP8 tensor cores, compute capability 8.9: this GPU has {'{}.{}'.format(*capability)}"
    return None


def _read_help_once() -> None:
    """Keep the help that Megatron's parser reads from the source of its configurations: half of the time to build it,
    and hundreds of tests build one."""
    module = sys.modules.get("megatron.training.argument_utils")
    if module is not None and not hasattr(module.ArgumentGroupFactory._get_field_docstrings, "__wrapped__"):
        from megatron_fp8.tools.rehearsal.ranks import read_once

        module.ArgumentGroupFactory._get_field_docstrings = read_once(module.ArgumentGroupFactory._get_field_docstrings)


@pytest.fixture(autouse=True)
def _environment():
    """A test that builds a model leaves Megatron's NVTE_* variables behind, which runs started later would inherit."""
    before = dict(os.environ)
    _read_help_once()
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # pytest's, another at a test's end
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def fresh_random_data():
    """Seed torch anew, and say with what: a failing test shows it. A file takes it by pytest.mark.usefixtures."""
    import torch

    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _one_gpu_of_several(request):
    """Workers share the machine's GPUs: each test computes on its worker's own, and leaves no memory cached there."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    import torch

    torch.cuda.set_device(_worker() % torch.cuda.device_count())
    yield
    torch.cuda.empty_cache()


def pytest_sessionfinish() -> None:
    """End what Megatron has started here, such as the manager of a save's results. One was found alive after a run.
    Exit functions end it, but xdist does not wait for a worker that takes long to exit."""
    for child in multiprocessing.active_children():
        child.terminate()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Before a worker of xdist starts. The workers share one warm process, that of the process which starts them: each
    of their own would import for five seconds, and take 600 MB."""
    from megatron_runs import door

    node.workerinput["door"] = door()


def pytest_configure(config: pytest.Config) -> None:
    if name := getattr(config, "workerinput", {}).get("door"):
        import launch
        import megatron_runs

        own = launch.warm_server

        def warm_server(gpus: bool):
            """One whose runs see GPUs is a worker's own, in its order of them."""
            return own(gpus) if gpus else megatron_runs.through(name)

        launch.warm_server = megatron_runs.warm_server = warm_server


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores: ranks wait for each other, and two workers left a sixth of two cores idle."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return 1 + len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is here by now is not looked through again
    gc.set_threshold(20_000)  # of every 2,000 new objects it takes 3 % of the tests' time
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    reason = _why_no_fp8_gpu()
    if reason:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.config.disable = True  # a CPU's compiler takes 20 seconds, and the functions are Megatron's
        # One of each file says so: to skip each of 2,100 tests takes five seconds.
        gpu = {item for item in items if item.get_closest_marker("gpu")}
        of_file = Counter(item.path for item in gpu)
        for item in items:
            if item in gpu and (count := of_file.pop(item.path, 0)):
                item.add_marker(pytest.mark.skip(reason=f"{reason} ({count} tests)"))
                gpu.remove(item)
        items[:] = [item for item in items if item not in gpu]
    else:
        import torch

        _begin_ranks_at_a_gpu_of_this_worker(torch.cuda.device_count())
