"""Train the same few steps again and again in one process, and print a digest of what came of them each time.

    TRIALS      how often; each time the checkpoint of --load is loaded again, and the same samples are read
    PRESSURE=1  around every asynchronous collective, on each rank by chance: the host sleeps, the GPU sleeps; and
                memory of the size that was just sent is taken, filled with NaN codes and given back; from the second
                trial on the allocator may have little more than the first trial needed
    LATE=1      and each collective begins and lands up to 10 ms late on the GPU, while the computation goes on
    BREAK       a fault to find: "sent", what is sent is overwritten while it is on the wire; "landing", nobody waits
                for gradients; "gather", nobody waits for weights

Each rank prints `trial N digest HASH`: of the losses, and of every bit of the model's weights and the engine's states.
"""

import contextlib
import functools
import hashlib
import os
import random
import runpy
import sys
import time

import torch
import torch.distributed as dist
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.checkpointing import load_checkpoint
from megatron.training.global_vars import get_args, get_timers

from megatron_fp8.comm import wire
from megatron_fp8.engine.gatherer import ChunkGather

TRIALS, PRESSURE, BREAK = int(os.environ["TRIALS"]), os.environ.get("PRESSURE"), os.environ.get("BREAK", "")
LATE = os.environ.get("LATE")
chance = random.Random()  # of the system's noise: another one on each rank and in each run
NAN = 0x7F
losses: list[float] = []


class Replay:
    """A data iterator that begins again with `rewind`."""

    def __init__(self, samples):
        self.samples, self.seen, self.place = samples, [], 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.seen):
            self.seen.append(next(self.samples))
        self.place += 1
        return self.seen[self.place - 1]

    def rewind(self):
        self.place = 0


def digest(model, optimizer) -> str:
    """Of the losses of a trial and of every bit of the model's weights and the engine's states."""
    optimizer.prepare_model_params_for_param_sync()
    total = hashlib.sha256(repr(losses).encode())
    held = [param.detach() for chunk in model for param in chunk.parameters()]
    for bucket in optimizer.engine.buckets:
        held += [t for kind in ("master", "exp_avg", "exp_avg_sq") for t in bucket.buffers()[kind]]
    for tensor in held:
        total.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def trials(forward_step, model, optimizer, scheduler, data, validation, process, config, *rest, **named):
    args = get_args()
    replay = Replay(data)
    for trial in range(TRIALS):
        args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
        scheduler.num_steps = 0
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint([*model], optimizer, scheduler)
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
            setattr(config, name, None)
        replay.rewind()
        losses.clear()
        given = forward_step, model, optimizer, scheduler, RerunDataIterator(replay), validation, process, config
        result = stock_train(*given, *rest, **named)
        get_timers()("interval-time").stop()
        if args.overlap_param_gather:
            training.enable_forward_pre_hook(model)  # as it was before
        print(f"trial {trial} digest {digest(model, optimizer)}\n", end="", flush=True)
        if trial == 0 and PRESSURE and not cpu_only:
            torch.cuda.empty_cache()
            room = 1.3 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, room))
    return result


def remembered(stock):
    def train_step(*given, **named):
        result = stock(*given, **named)
        losses.extend(float(value.float().sum()) for value in result[0].values())
        return result

    return train_step


def pause() -> None:
    if chance.random() < 0.3:
        time.sleep(chance.random() * 2e-3)
    if chance.random() < 0.3 and not cpu_only:
        torch.cuda._sleep(int(chance.random() * 2e6))  # about a millisecond


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """From which late collectives are launched."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def late():
    """What is launched in here begins up to 10 ms later on the GPU, while the computation goes on."""
    if cpu_only or not LATE:
        yield
        return
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(chance.random() * 2e7))
        yield


class Late:
    """The handle of a collective that lands up to 10 ms late, on a stream of its own.

    NCCL runs a group's collectives one after the other: who waits for the last has all. Stock waits for its own
    gradients after ours are sent, which would hide that nobody waits for ours.
    """

    def __init__(self, received: torch.Tensor, arrived: torch.Tensor, handle):
        self._kept, stream = (received, arrived), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            handle.wait()
            torch.cuda._sleep(int(chance.random() * 2e7))
            received.copy_(arrived)
        self._landed = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._landed)


def pressed(stock):
    def collective(received, sent, *given, async_op=False, **named):
        if not async_op:
            return stock(received, sent, *given, **named)
        pause()
        overwritten = BREAK == "sent" and stock is all_to_all
        if overwritten and cpu_only:  # before, as on a wire that is slow: gloo's may be done when the call returns
            sent.view(torch.uint8).fill_(NAN)
        arrived = torch.empty_like(received) if LATE and not cpu_only else received
        with late():
            handle = stock(arrived, sent, *given, async_op=True, **named)
        if arrived is not received:
            handle = Late(received, arrived, handle)
        if overwritten and not cpu_only:
            sent.view(torch.uint8).fill_(NAN)
        for _ in range(2):
            torch.full((sent.nbytes,), NAN, dtype=torch.uint8, device=sent.device)
        pause()
        return handle

    return collective


from megatron_fp8 import cpu

cpu_only = cpu.needed()
stock_train, training.train = training.train, trials
training.train_step = remembered(training.train_step)
all_to_all = dist.all_to_all_single
if PRESSURE:
    for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, pressed(getattr(dist, name)))
if BREAK == "landing":
    wire.Flight._wait = lambda flight: flight._handles.clear()
if BREAK == "gather":
    ChunkGather._need = lambda gather, count: gather._start(len(gather.buckets))
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
