"""Runs of tests/scripts/overlapped_trials.py: what came of the same steps, trial after trial, on every rank."""

from pathlib import Path

from launch import ROOT
from megatron_runs import run_megatron, script_path

OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
# Without a clip: where stock cuts its own gradients otherwise, the norm's sum, and so the clip, differs in a last bit.
COMMON = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --clip-grad 0"
# With one queue to the GPU what a stream waits for holds up all streams: nothing can be read too early.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def prepare(flags: list[str], folder: Path, gpu: bool = False) -> list[str]:
    """Train two steps and save; the flags that go on from there."""
    flags = [*flags, *COMMON.split()]
    run_megatron(2, [*flags, *f"--save {folder} --save-interval 2 --exit-interval 2".split()], gpu=gpu)
    return [*flags, "--load", str(folder)]


def digests(flags: list[str], trials: int, gpu: bool = False, **environment: str) -> list[tuple[str, ...]]:
    """Of each trial, the digests of all ranks."""
    run = run_megatron(
        2,
        flags,
        script=str(ROOT / "tests/scripts/overlapped_trials.py"),
        gpu=gpu,
        timeout=600,
        env={"PYTHONPATH": script_path(), "TRIALS": str(trials), **QUEUES, **environment},
    )
    found: dict[int, list[str]] = {}
    for line in run.lines:
        if line.startswith("trial "):
            _, trial, _, digest = line.split()
            found.setdefault(int(trial), []).append(digest)
    assert len(found) == trials and all(len(ranks) == 2 for ranks in found.values())
    return [tuple(sorted(found[trial])) for trial in range(trials)]
