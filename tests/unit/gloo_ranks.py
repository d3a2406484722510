"""A function in real gloo groups: one process a rank, all of them children of one that imports everything once."""

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_ranks(work: Callable[[int, int], Any], ranks: int, folder: Path, imports: list[str], limit=600) -> list[Any]:
    """What work(rank, ranks) returns on each rank; `imports`: modules to have before the ranks are forked."""
    multiprocessing.set_forkserver_preload(["torch", *imports])
    context = torch.multiprocessing.start_processes(
        _begin, (work, ranks, str(folder)), nprocs=ranks, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _begin(rank: int, work: Callable[[int, int], Any], ranks: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    try:
        torch.save(work(rank, ranks), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
