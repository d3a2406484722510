"""The process that one_rank.py starts: one true rank of a job at full size, in stock's fake process group.

It reports the rank's memory and the kernels that were compiled.

    python -m megatron_fp8.tools.rehearsal.full_rank SCRIPT FLAGS --fake-process-group  RANK, WORLD_SIZE: the job's

In stock's fake group every collective returns at once and leaves its output uninitialised. A step then mostly contains
NaN, is skipped, and never allocates what the optimizer needs. So here a rank receives zeros, or its own data if it
sends as much as it receives: meaningless numbers, but finite. Memory, kernels and shapes are the job's.
"""

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .kernels import Kernels

MARK = "FULL RANK"


def receive_zeros() -> None:
    """Make collectives of torch.distributed return numbers. Call before importing Megatron, which keeps their names."""

    def clearing(stock: Callable, name: str) -> Callable:
        @functools.wraps(stock)
        def collective(*args, **kwargs):
            received = args[0] if args else kwargs[name]
            others = [value for value in (*args, *kwargs.values()) if value is not received]
            given = {memory for value in others for memory in _memory(value)}
            for tensor in received if isinstance(received, list | tuple) else [received]:
                if _memory(tensor).isdisjoint(given):  # else it gathers in place, and its own part must stay
                    tensor.detach().zero_()
            return stock(*args, **kwargs)

        return collective

    for function, name in (
        ("all_gather_into_tensor", "output_tensor"), ("_all_gather_base", "output_tensor"),
        ("reduce_scatter_tensor", "output"), ("_reduce_scatter_base", "output"), ("all_to_all_single", "output"),
        ("all_gather", "tensor_list"), ("reduce_scatter", "output"), ("recv", "tensor"), ("irecv", "tensor"),
    ):  # fmt: skip
        wrapped = clearing(getattr(dist, function), name)
        for module in (dist, dist.distributed_c10d):  # P2POp compares functions with those of the second module
            setattr(module, function, wrapped)
    dist.broadcast_object_list = lambda objects, *args, **kwargs: None

    def all_gather_object(objects, one, *args, **kwargs):
        objects[:] = [one] * len(objects)

    dist.all_gather_object = all_gather_object


def _memory(value: Any) -> set[int]:
    """The address of the storage of a tensor, or of each tensor in a list."""
    tensors = value if isinstance(value, list | tuple) else [value]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


def train_on_every_stage() -> None:
    """Make ranks of middle stages train. Rank 0 tells stock's ranks whether there is data to train on. A stage between
    the first and the last reads no data, and nothing tells it here, so it would train no step and seem to succeed."""
    import megatron.training.training as training

    stock = training.build_train_valid_test_data_loaders

    @functools.wraps(stock)
    def build(*args, **kwargs):
        loaders = stock(*args, **kwargs)
        training.get_args().do_train = True
        return loaders

    training.build_train_valid_test_data_loaders = build


def main(argv: list[str]) -> None:
    """Run the script argv[0]. Then print one line of JSON: bytes of torch's allocator and of the GPU; how many Triton
    kernels were compiled, in how many seconds, how many were cached, and the folder of the cache."""
    on_gpu = torch.cuda.is_available()  # asked before the plugin declares the CPU a device
    kernels = Kernels()
    if on_gpu:
        kernels.listen()
    receive_zeros()
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    from ...flags.usage import hide_missing_package_warnings
    from ...plugin import install

    hide_missing_package_warnings()
    install()
    train_on_every_stage()
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        found: dict[str, Any] = {}
        if on_gpu:
            free, there = torch.cuda.mem_get_info()
            found = {
                "held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(), "device": there - free, "there": there,
                **kernels.counts(),
            }  # fmt: skip
        print(f"{MARK} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    from ...flags.usage import one_line_errors

    with one_line_errors():
        main(sys.argv[1:])
