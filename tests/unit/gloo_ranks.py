"""Runs a function in a real gloo group, one process a rank, forked like the tests' training runs (tools/launch.py)."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import ROOT, forked

from megatron_fp8 import cpu

WHERE = os.pathsep.join(str(ROOT / folder) for folder in ("", "tools", "tests", "tests/unit"))


def run_ranks(work: Callable[[int, int], Any], ranks: int, folder: Path) -> list[Any]:
    """The results of work(rank, ranks), a test module's function, on each rank. folder: empty, for the results."""
    command = [__file__, work.__module__, work.__qualname__, str(folder)]
    forked(ranks, command, folder / "log", timeout=600, env={"PYTHONPATH": WHERE})
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _be_a_rank(module: str, name: str, folder: str) -> None:
    cpu.uninstall()  # the parent process has installed it
    work = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        torch.save(work(rank, dist.get_world_size()), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _be_a_rank(*sys.argv[1:])
