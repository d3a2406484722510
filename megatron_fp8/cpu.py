"""Runs Megatron's own training loop on a machine without a GPU, by making "cuda" mean the CPU.

Megatron-LM has no CPU mode: it asserts that CUDA is available, creates its tensors on "cuda", saves the CUDA random
state and compares `tensor.type()` with "torch.cuda.FloatTensor". Its computations would run on a CPU all the same. So
this module does not change Megatron's code. While it is installed, it changes the meaning of "cuda" in the process:

  1. What takes a device takes a CUDA device (a string, a torch.device or an integer) as the CPU: torch's functions that
     make tensors, and `tensor.to()`. `tensor.cuda()` is the tensor itself, and `tensor.type()` the name that the tensor
     would have on a GPU. A TorchFunctionMode would see every call into torch, and take a fifth of a small run's time.
  2. Attributes of `torch.cuda` that need a driver are replaced: there is one device, which is always idle; streams and
     events do nothing; memory figures are zero; and both devices share one random generator, the CPU's. A data loader's
     iterator draws a seed for its workers from the CPU's generator, which on a GPU is not dropout's. So the generator's
     state is restored after this draw. Otherwise a resumed run, which makes its iterators again after reading its
     checkpoint, would have other dropout masks.
  3. Two functions of Megatron that only warm up or build for a GPU become empty. A third, which copies the sizes for an
     experts' all-to-all to the host, handles CPU tensors as it handles a GPU's. A fourth, which gives a recomputed
     tensor's memory to its views, copies it.
  4. On a processor for which oneDNN has no BF16 product (x86 without AVX-512), torch multiplies BF16 matrices by plain
     loops, ten times slower than FP32 ones. There `mm`, `bmm`, `addmm` and `baddbmm` multiply in FP32 and round the
     result to BF16. So do torch's loops, which add in another order: 1 result in 10,000 rounds the other way.

Communication goes through gloo (`adapt_args`). gloo has every collective that Megatron's GPT uses, except for gathering
tensors of unequal sizes, such as the experts' tokens. These are broadcast one by one, as NCCL does.

Limits: a missing stream wait cannot be found here; memory is not measured; and `torch.cuda.is_available()` is True for
all code in the process (use `needed()` instead).
"""

import atexit
import collections
import contextlib
import functools
import importlib.util
import os
import socket
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # it inspects torch.cuda at its first import, which must see the real one
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .errors import PassingError
from .rebind import Hook, Rebound, When

_GPU_PRESENT = torch.cuda.is_available()  # asked before anything is replaced
_CPU = torch.device("cpu")
_MAKERS = """arange as_tensor asarray empty empty_like empty_permuted empty_strided eye full full_like linspace logspace
normal ones ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
sparse_coo_tensor tensor tril_indices triu_indices zeros zeros_like""".split()
_NEW = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()  # methods of a tensor
_installed = False
_rebound = Rebound()
_ON_CPU = When("on a machine without a GPU", lambda run: needed())
HOOKS = (  # rows of the table of hooks
    Hook(
        *("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", "cpu.moving_to_cpu"),
        *("tensor as_numpy record_stream", _ON_CPU),
        "Makes of the sizes of an all-to-all what it makes of a GPU's: gloo takes no tensor for sizes.",
    ),
    # It would compile fused kernels, and draw from what is here the generator of the initial weights an
    # amount that depends on the tensor-parallel size: TP 1 and TP 2 would start from different networks.
    Hook(
        *("megatron.training.initialize", "_warmup_jit_function", "cpu.doing_nothing", "", _ON_CPU),
        "Compiles no kernels for a GPU, and draws no random numbers.",
    ),
    Hook(
        *("megatron.core.tensor_parallel.random", "_get_share_storage", "cpu.giving_storage", "", _ON_CPU),
        "Copies what a selective recomputation has made again: to share it, Megatron compiles C++, for half a minute.",
    ),
)
COMPILE_HELPERS = Hook(
    *("megatron.core.datasets.utils", "compile_helpers", "cpu.doing_nothing", ""),
    When("if the helpers are built and their Makefile is not there"),
    "Lets the wheel from PyPI train at all.",
)


def needed() -> bool:
    """Whether this machine has no CUDA device. The answer is right even if this module is installed."""
    return not _GPU_PRESENT


def install() -> None:
    """Make "cuda" mean the CPU in this process. Call it before Megatron is imported, in the main thread.

    Idempotent. Megatron decorates functions with torch.compile as it is imported, hence the order.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _device_constructors()  # torch keeps these for `with torch.device(...)`: its own functions, not what replaces them
    for owner, substitutes in _substitutes():
        for name, value in substitutes.items():
            _rebound.replace(owner, name, value)
    if not _multiplies_bf16():
        _rebound.append(_multiply_in_fp32())
    atexit.register(_leave_groups)

    for hook in HOOKS:
        hook.put(_rebound)


def uninstall() -> None:
    """Undo `install` and `skip_dataset_compile`, in reverse order. Does nothing if neither was called."""
    global _installed
    if _installed:
        _installed = False
        atexit.unregister(_leave_groups)
    _rebound.put_back()


def skip_dataset_compile() -> None:
    """Keep Megatron from running `make` for its dataset helpers if they are already built.

    The wheel from PyPI has the compiled helpers but no Makefile, so stock training from the wheel exits at once, also
    on a GPU. A Megatron-LM checkout has the Makefile and is not changed. Idempotent.
    """
    import megatron.core.datasets.utils as utils

    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    makefile = os.path.join(os.path.dirname(utils.__file__), "Makefile")
    if built and not os.path.exists(makefile) and utils.compile_helpers is not _nothing:
        COMPILE_HELPERS.put(_rebound)


def check_node(args) -> None:
    """Raise PassingError if Slurm has given this task GPUs and torch finds none, as on a node with a broken driver.

    The task would go to gloo on the CPU. Tasks of other nodes would wait for it in NCCL, and if no node has a GPU a
    large model would train on CPUs for the whole time of the job.
    """
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # on purpose
    if needed() and args.distributed_backend != "gloo" and given not in ("", "0") and not hidden:
        raise PassingError(
            f"node {socket.gethostname()}: torch finds no GPU, and Slurm has given the job {given} there; run "
            "megatron-fp8 doctor on the node, and exclude it (sbatch --exclude); to train on CPUs add "
            "--distributed-backend gloo"
        )


def adapt_args(args) -> list[str]:
    """Edit Megatron's parsed arguments for a machine without a GPU; return one log line for each change."""
    if not needed() or args.distributed_backend == "gloo":
        return []
    changed = f"no CUDA device: --distributed-backend {args.distributed_backend} -> gloo, training on the CPU"
    args.distributed_backend = "gloo"
    return [changed]


def _leave_groups() -> None:
    """End gloo's threads before the process ends. Otherwise they sometimes abort it at the very end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _is_cuda(device: Any) -> bool:
    """Whether `device` names a GPU: "cuda", "cuda:0", torch.device("cuda") or a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(stock: Callable) -> Callable:
    """`stock`, which makes a tensor, on the CPU if a GPU is asked for; no memory is pinned, which needs a GPU."""

    @functools.wraps(stock)
    def make(*args, **kwargs):
        if kwargs:
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return stock(*args, **kwargs)

    return make


def _methods() -> dict[str, Callable]:
    """{name of a tensor's method: what stands for it}"""
    stock_to, stock_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(stock_to)
    def to(tensor, *args, **kwargs):
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        elif _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return stock_to(tensor, *args, **kwargs)

    @functools.wraps(stock_type)
    def type_(tensor, *args, **kwargs):
        found = stock_type(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return {
        **{name: _on_cpu(getattr(torch.Tensor, name)) for name in _NEW},
        "to": to,
        "type": type_,
        "cuda": lambda tensor, *args, **kwargs: tensor,
        "pin_memory": lambda tensor, *args, **kwargs: tensor,
    }


def _multiplies_bf16() -> bool:
    """Whether oneDNN, if torch was built with it, multiplies BF16 matrices on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _multiply_in_fp32() -> Callable[[], None]:
    """Replace torch's products of BF16 matrices on the CPU, those of autograd too -> the undo.

    Products of other dtypes go to the same kernels as before, by the names of those that take an output.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that a kernel is replaced
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            library.impl(name, _in_fp32(getattr(torch.ops.aten, name).out), "CPU", allow_override=True)
    return library._destroy


def _in_fp32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`product` of BF16 tensors, computed in FP32 and rounded once."""

    def multiply(first, *others, **scalars):
        if first.dtype != torch.bfloat16:
            return product(first, *others, out=torch.empty(0, dtype=first.dtype), **scalars)
        return product(first.float(), *(other.float() for other in others), out=torch.empty(0), **scalars).bfloat16()

    return multiply


def _nothing(*args, **kwargs) -> None:
    """Replaces every call whose only effect would be on a GPU."""


def doing_nothing(stock: Callable) -> Callable[..., None]:
    """A hook's maker: `_nothing`."""
    return _nothing


def _always(value: int | None, *names: str) -> dict[str, Callable[..., int | None]]:
    """{name: a function that returns `value`}, each a function of its own.

    torch's compiler has a rule for each function, and these names have different rules.
    """
    return {name: lambda *args, **kwargs: value for name in names}


class _Works:
    """One handle for several collectives."""

    def __init__(self, works: list[Any]):
        self._works = works

    def wait(self, *args) -> bool:
        return all([work.wait(*args) for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _gathering_any_sizes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch.distributed.all_gather for tensors whose sizes differ from rank to rank; every rank knows all sizes."""

    @functools.wraps(stock)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if len({part.shape for part in tensor_list}) <= 1 or "gloo" not in torch.distributed.get_backend(group):
            return stock(tensor_list, tensor, group, async_op)
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        works = [
            torch.distributed.broadcast(part, group=group, async_op=True, group_src=rank)
            for rank, part in enumerate(tensor_list)
            if part.numel()
        ]
        handle = _Works(works)
        if async_op:
            return handle
        handle.wait()

    return all_gather


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Like Megatron's, but converts CPU tensors too. Megatron's leaves them, and gloo takes no tensor for sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def moving_to_cpu(stock: Callable) -> Callable[..., Any]:
    """A hook's maker: `_move_to_cpu`."""
    return _move_to_cpu


def _give_storage(output: torch.Tensor, again: torch.Tensor) -> None:
    """Fill the memory of `output`, which was given back, for all its views; no version of theirs changes."""
    given, made = output.untyped_storage(), again.untyped_storage()
    given.resize_(made.nbytes())
    given.copy_(made)


def giving_storage(stock: Callable) -> Callable[[], Callable]:
    """A hook's maker: what gets `_give_storage`."""
    return lambda: _give_storage


class _Stream:
    """Stands for a CUDA stream or event on which all work is done."""

    cuda_stream = 0
    device = _CPU
    wait_stream = wait_event = wait = record = synchronize = _nothing

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, end: "_Stream") -> float:
        return 0.0


def _substitutes() -> list[tuple[Any, dict[str, Any]]]:
    """(owner, {attribute: stand-in}) for everything outside Megatron that needs a CUDA driver."""
    stream = _Stream()
    generator = torch.default_generator
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )

    def get_rng_state(*args, **kwargs):
        return generator.get_state()

    def set_rng_state(state, *args, **kwargs):
        generator.set_state(state)

    stock_init, stock_context = _BaseDataLoaderIter.__init__, DeviceContext.__init__

    def make_loader_iterator(self, loader):
        # On a GPU this does not advance dropout's generator; see the top of the file.
        state = generator.get_state()
        stock_init(self, loader)
        generator.set_state(state)

    def begin_context(self, device):  # with torch.device(...): ...
        stock_context(self, _CPU if _is_cuda(device) else device)

    cuda = {
        # one device, always idle
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        **_always(0, "current_device"),  # an index, because some callers build f"cuda:{index}" from it
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        **_always(None, "init", "_lazy_init", "set_device", "synchronize", "ipc_collect"),
        "_lazy_call": lambda call, **kwargs: call(),
        # streams and events
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        **_always(None, "set_stream"),
        "nvtx": types.SimpleNamespace(**_always(None, "range_push", "range_pop", "mark")),
        # random numbers
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        **_always(None, "manual_seed_all"),  # torch.manual_seed calls it, after seeding this very generator
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        # memory
        **_always(None, "empty_cache", "reset_peak_memory_stats"),
        **_always(0, "memory_allocated", "max_memory_allocated", "device_memory_used"),
        **_always(0, "memory_reserved", "max_memory_reserved", "utilization"),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
    }
    accelerator = {
        **_always(0, "current_device_index"),  # called by a DataLoader's thread that pins memory
        "device_index": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,  # from 2.15 on, torch.optim asks it if a graph is captured
        **_always(None, "set_device_index", "set_stream", "synchronize"),
    }
    substitutes: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, cuda),
        (torch.cuda.random, {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}),
        (torch, {"compile": lambda model=None, **kwargs: model if model is not None else lambda f: f}),
        (torch, {name: _on_cpu(getattr(torch, name)) for name in _MAKERS}),
        (torch.accelerator, accelerator),
        (torch.Tensor, _methods()),
        (DeviceContext, {"__init__": begin_context}),
        (_BaseDataLoaderIter, {"__init__": make_loader_iterator}),
        (torch.distributed, {"all_gather": _gathering_any_sizes(torch.distributed.all_gather)}),
    ]
    if hasattr(torch._C, "_cuda_setRNGState"):  # Megatron uses it if it exists
        substitutes.append((torch._C, {"_cuda_setRNGState": set_rng_state}))
    return substitutes
