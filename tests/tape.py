"""A CUDA graph's stand-in on the CPU: a tape of every operation that the dispatcher sees, collectives too.

    with tape.recording(graph): step()      writes down what the step does; memory that it has changed is put back
    graph.replay()                          all of it, without Python

As a graph, a tape knows tensors by their memory. What the host has decided, or counted, while it was written does not
happen again. So a run on the tape shows whether replays have what they need, with any number of ranks, over gloo. It
does not show what streams do, nor random numbers: Megatron's state of them is the host's.

The products and casts of experts read counts on the host, on a CPU. On a GPU they are kernels, which read them there.
So each is one entry (`Whole`), which reads the counts anew.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map


class Tape:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, tuple, dict, list]] = []

    def register_generator_state(self, state) -> None:
        pass

    def replay(self) -> None:
        sent, expected = [], []
        with torch.no_grad():
            for func, args, kwargs, written in self.entries:
                # Stages send and receive at once: neither is waited for before the other has begun.
                between_stages = func.name() in ("c10d::send", "c10d::recv_")
                while expected and not between_stages:
                    expected.pop().wait()
                done = tree_flatten(func(*args, **kwargs))[0]
                for work in (d for d in done if isinstance(d, torch.ScriptObject)):
                    if between_stages:
                        (sent if func.name() == "c10d::send" else expected).append(work)
                    else:
                        work.wait()
                fresh = [d for d in done if isinstance(d, torch.Tensor)]
                for i, held in written:
                    held.copy_(fresh[i])
        for work in (*expected, *sent):
            work.wait()


class Whole:
    """A function that is one entry of a tape."""

    writing: "_Writing | None" = None  # the tape that is being written

    def __init__(self, function: Callable):
        self.function = function
        functools.update_wrapper(self, function)

    def name(self) -> str:
        return self.function.__name__

    def __call__(self, *args, **kwargs):
        if self.writing is None:
            return self.function(*map(_forgotten, args), **kwargs)
        with _disable_current_modes():
            self.writing._keep(_tensors((args, kwargs)))
            result = self.function(*args, **kwargs)
        self.writing.write(self, args, kwargs, result)
        return result


def _forgotten(x: Any) -> Any:
    """x, if it has tables of experts' rows, without what the host knows of them."""
    from megatron_fp8.gemm.grouped import GroupedTensor
    from megatron_fp8.ops.groups import Groups

    if isinstance(x, GroupedTensor):
        return dataclasses.replace(x, groups=_forgotten(x.groups))
    return dataclasses.replace(x, known=None) if isinstance(x, Groups) else x


class _Writing(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self._own: list[Any] = []  # memory that the step has made, which must not be taken for other memory
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # other memory, and what it held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if func._schema.is_mutable or func.namespace == "c10d":
            self._keep(given)
        result = func(*args, **kwargs)
        self.write(func, args, kwargs, result)
        return result

    def write(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """What func(*args, **kwargs) has done."""
        memory = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = enumerate(_tensors(result))
        written = [(i, t.detach()) for i, t in made if t.untyped_storage()._cdata not in memory]
        self._own += [t.untyped_storage() for _, t in written]
        changes = isinstance(func, Whole) or func._schema.is_mutable or func.namespace == "c10d"
        if not isinstance(func, Whole) and "empty" in func._schema.name:
            return  # nothing is written
        if written or changes:
            held = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            self.tape.entries.append((func, *held, written))

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        own = {storage._cdata for storage in self._own}
        for storage in (t.untyped_storage() for t in tensors):
            if storage._cdata not in own and storage._cdata not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage._cdata] = memory, memory.clone()

    def put_back(self) -> None:
        for memory, held in self._before.values():
            memory.copy_(held)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def recording(graph: Tape, **options):
    """In place of torch.cuda.graph."""
    writing, wait = _Writing(graph), Work.wait

    def wait_unseen(work, *args) -> bool:
        with _disable_current_modes():  # gloo copies there what it has received elsewhere
            return wait(work, *args)

    Work.wait, Whole.writing = wait_unseen, writing
    try:
        with writing:
            yield
    finally:
        Work.wait, Whole.writing = wait, None
        writing.put_back()


def install() -> None:
    """Have the run of this process record tapes."""
    from megatron_fp8 import cpu
    from megatron_fp8.flags import graphs

    cpu.install()
    import megatron.core.full_cuda_graph  # noqa: F401
    import megatron.core.tensor_parallel.random as random

    graphs.can_record = lambda: True
    initialize = random.initialize_rng_tracker  # a CPU's generator has no state that graphs can share
    random.initialize_rng_tracker = lambda *args, **kwargs: initialize(force_reset=kwargs.get("force_reset", False))
    random.get_all_rng_states = dict
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = Tape, recording, lambda: None
