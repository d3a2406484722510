"""All forward and backward passes of a step, with what ranks exchange in them, as one CUDA graph.

A host that launches kernel by kernel may be slower than its GPU. In a step of GPT-125M the GPU works for 94 ms, and the
host needs 120 to launch that work. With tensor parallelism, at micro-batch 1, a GPU waits for more than half of the
time even with GPT-175B's layers. A graph is launched at once.

    host   scales ─► replay ─► the next step's data ─► norm, Adam            as before, outside the graph
    GPU             gather, forward, backward | ... | sum of gradients | norm, Adam

Stock's wrapper (`--cuda-graph-impl full_iteration`) records a step and replays it. NCCL's collectives are recorded too,
each on its stream: in a replay they overlap as they did when they were recorded. A replay runs no Python. So the host
of a level does beside it what changes from step to step:

    scales      casts and E4M3 weights have new scale tensors after each step: copied into those that were recorded
    seeds       each step's rounding has its own: the recorded kernels read them from memory, filled before each replay
    gathers     of weights (--overlap-param-gather) belong to the forward pass: none starts before it
    knowledge   which sums are there, and where: each part can `remember` it as it was after the recorded step
    checks      of the loss are made when the replay is launched (monitor/loss_checks.py)
    copies      quantised BF16 weights and kept transposes are made once a step: inside, and forgotten before

All ranks record in the same step, after steps that have used every communicator. If one rank cannot record, all go on
without a graph, and run that step again with the same data. Some steps run without a graph: those that an observer
looks at (statistics, a probe), those with linears in BF16 for a while after a spike, and evaluations. Their memory
comes on top of the graph's, which keeps a step's activations for good. Each number of micro-batches has its own graph,
in the same memory, after a first step without. The bits are the same either way. flags/graphs.py says what rules a
graph out.

Source: Megatron-LM's FullCudaGraphWrapper records a whole step with its collectives too.
"""

import atexit
import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.random import get_all_rng_states
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config

from ..comm.shared import SharedScale
from ..comm.wire import sent_bytes
from ..numerics.scaling import Slots
from ..ranks import gathered
from .gatherer import ChunkGather
from .grad_store import GradSink, RecordedSeeds
from .optimizer import EngineOptimizer
from .weight_set import WeightSet

_ENOUGH = 6  # steps
MOST = 4  # graphs; a batch that ramps up needs one for each number of micro-batches, and the oldest goes


class Checks(Protocol):
    """A step's checks of its losses (monitor/loss_checks.py). reruns: whether a failed check runs the step again."""

    reruns: bool

    def recording(self) -> contextlib.AbstractContextManager[list]: ...

    def repeat(self, recorded: list) -> None: ...


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded step.

    Attributes:
        scales: the tensors it reads scales from, each with the Slots that held it, and the attribute's name.
        seeds: of its stochastic rounding.
        checks: of its losses.
        sent: the bytes that it sends, by kind.
        restore: each puts back what the host knew about a part after the step.
        result: stock's schedule returned it; it lies in the graph's memory.
        kept: older memory that it uses, and that its owners may drop.
    """

    graph: torch.cuda.CUDAGraph
    scales: list[tuple[torch.Tensor, Slots | SharedScale, str]]
    seeds: RecordedSeeds
    checks: list
    sent: Counter[str]
    restore: list[Callable[[], None]]
    result: Any
    kept: list[Any]

    def replay(self) -> Any:
        """Launch the step again, with the present scales, seeds and data."""
        for recorded, slots, name in self.scales:
            now = getattr(slots, name)
            if now is not recorded:
                recorded.copy_(now)
        self.seeds.fill()
        self.graph.replay()
        sent_bytes.update(self.sent)
        for restore in self.restore:
            restore()
        return self.result


class ReadAhead:
    """An iterator of micro-batches, some of which are read before they are asked for.

    A graph needs the data of a whole step before it begins, and would wait for it: 20 to 30 ms of a step of a 7B slice.
    """

    def __init__(self, source: Iterator):
        self.source = source
        self._ready: deque = deque()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Any:
        return self._ready.popleft() if self._ready else next(self.source)

    def read(self, count: int) -> None:
        """Have `count` micro-batches ready, or all that are left."""
        while len(self._ready) < count:
            try:
                self._ready.append(next(self.source))
            except StopIteration:  # the code that asks for one will be told
                return


class Pace:
    """Says once, when some steps have been graphs, how long a step takes with a graph and how long it took without. A
    step is timed from its start to the start of the next."""

    def __init__(self, log: Callable[[list[str]], None]):
        self._log = log
        self._began = 0.0
        self._without: list[float] = []
        self._with: list[float] = []
        self.graphed = False  # whether the present step is one

    def step(self) -> None:
        """A step begins."""
        began, self._began = self._began, time.monotonic()
        times, self.graphed = self._with if self.graphed else self._without, False
        if began:
            times.append(self._began - began)
        if times is self._with and len(times) == _ENOUGH:  # others compile, record, or evaluate
            ms = [f"{min(times) * 1e3:.0f} ms" for times in (self._with, self._without)]
            self._log([f"a step takes {ms[0]} at least as a CUDA graph, and took {ms[1]} at least without"])


class StepGraph:
    """Replaces FullCudaGraphWrapper.__call__ in a run with a level.

    Args:
        reads_ahead: whether the next step's data may be read during a replay: only if nothing else reads the data or
            saves how far it was read.
        wanted: whether a graph is worth it for this rank; asked when the first could be recorded.
    """

    def __init__(
        self,
        engine: EngineOptimizer,
        checks: Checks,
        reads_ahead: bool,
        log: Callable[[list[str]], None],
        wanted: Callable[[], bool] = lambda: True,
    ):
        self._engine, self._checks, self._reads_ahead, self._log = engine, checks, reads_ahead, log
        self._wanted, self._pace = wanted, Pace(log)
        self._steps = 0  # without a graph
        # For each kind of step, how many additions read a seed. A kind is recorded after it has run once with known
        # scales, because a recording may load no kernel. Without them other kernels cast, and experts cast twice.
        self._additions: dict[tuple, int] = {}
        self._recorded: dict[tuple, Recorded] = {}
        self._pool: Any = None  # the memory of all graphs
        self._off = False  # for the rest of the run
        self._data: list[ReadAhead | None] = []
        for gather in self._gathers:
            gather.early = False
        atexit.register(self.forget)

    def forget(self) -> None:
        """Free all graphs: NCCL waits for those that use a communicator before it ends that."""
        self._recorded.clear()

    def around(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def __call__(wrapper, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs["forward_only"]:
                return wrapper.forward_backward_func(*args, **kwargs)
            model, number = kwargs["model"], kwargs["num_microbatches"]
            read = wrapper.data_read(self._sources(kwargs["data_iterator"]), model, True, number)
            lists = [None if chunk is None else list(chunk) for chunk in read]

            def step() -> Any:
                again = [None if chunk is None else iter(chunk) for chunk in lists]
                return wrapper.forward_backward_func(**{**kwargs, "data_iterator": again})

            self._pace.step()
            if self._off or self._looked_at or self._checks.reruns or kwargs.get("force_all_reduce"):
                self._steps += 1
                return step()
            key = number, kwargs["seq_length"], kwargs["micro_batch_size"]
            warmed_up = self._steps >= wrapper.cuda_graph_warmup_steps and key in self._additions
            if key not in self._recorded and warmed_up:
                self._record(step, key, model)
            if key in self._recorded:
                self._pace.graphed = True
                return self._replay(self._recorded[key], number)
            self._steps += 1
            scaled = self._scaled
            with RecordedSeeds(self._sinks) as seeds:
                result = step()
            if scaled:
                self._additions[key] = seeds.count
            return result

        return __call__

    def _sources(self, source: Any) -> list[ReadAhead | None]:
        """Each model chunk's iterator of data; None if this rank is given none."""
        sources = source if isinstance(source, list) else [source]
        if [data and data.source for data in self._data] != sources:
            self._data = [None if chunk is None else ReadAhead(chunk) for chunk in sources]
        return self._data

    def _replay(self, recorded: Recorded, number: int) -> Any:
        for gather in self._gathers:
            gather.land()
        result = recorded.replay()
        self._checks.repeat(recorded.checks)
        for data in self._data if self._reads_ahead else ():
            if data is not None:
                data.read(number)  # while the GPU works
        return result

    @property
    def _weights(self):
        return [weight for owned in self._engine.sets for weight in owned.linears]

    @property
    def _gathers(self) -> list[ChunkGather]:
        return [gather for owned in self._engine.sets for gather in owned.gathers]

    @property
    def _sinks(self) -> list[GradSink]:
        return [weight.sink for weight in self._weights if weight.sink is not None]

    @property
    def _looked_at(self) -> bool:
        """Whether an observer wants to see inside the step, or some linears compute in BF16 for a while."""
        events, watch = self._engine.events, self._engine.watch
        inside = events.cast, events.forward, events.backward, events.gradient, events.gradient_added, events.reducing
        return any(inside) or bool(events.launched) or (watch is not None and watch.any_in_bf16)

    @property
    def _scaled(self) -> bool:
        """Whether casts have their scales: after a first step."""
        return all(owned.scaling is None or owned.scaling.warm for owned in self._engine.sets)

    def _warm(self, model: list) -> bool:
        """Whether casts have their scales, and modules wait for their weights: both are so after a first step."""
        return self._scaled and all(
            bool(chunk.remove_forward_pre_hook_handles) or not chunk.ddp_config.overlap_param_gather for chunk in model
        )

    def _record(self, step: Callable, key: tuple, model: list) -> None:
        """Record step() on all ranks, without running it; or on none."""
        found = gathered((self._warm(model), bool(self._recorded) or self._wanted()))
        if not all(warm for warm, _ in found):
            return
        if not any(wanted for _, wanted in found):
            self._go_on_without("no CUDA graph of a step: the hosts are ahead of their GPUs")
            return
        while len(self._recorded) >= MOST:
            del self._recorded[next(iter(self._recorded))]
        recorded, reason = None, ""
        sent = sent_bytes.copy()
        try:
            recorded = self._capture(step, model, self._additions[key])
        except RuntimeError as error:  # CUDA's: something cannot be recorded, or memory is short
            reason = _first_line(error)
        sent_bytes.clear()
        sent_bytes.update(sent)
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(gathered(reason)) if why]
        if recorded is not None and not reasons:
            self._recorded[key] = recorded
            self._log([f"the step of {key[0]} micro-batches is a CUDA graph from now on"])
            return
        self._recorded.clear()
        torch.cuda.empty_cache()  # the recording had taken memory
        self._begin_again(model)
        self._go_on_without(f"the run goes on without a CUDA graph: a step cannot be recorded ({reasons[0]})")

    def _go_on_without(self, line: str) -> None:
        """Record no more. Gathers may again start before their step."""
        self._off = True
        for gather in self._gathers:
            gather.early = True
        self._log([line])

    def _capture(self, step: Callable, model: list, additions: int) -> Recorded:
        config, before = get_model_config(model[0]), sent_bytes.copy()
        weights = self._weights
        for weight in weights:
            weight.invalidate()
        self._finish_gathers(model)
        self._forget_gathers(model)
        for owned in self._engine.sets:
            if owned.weight_scaling is not None:
                owned.weight_scaling.wait()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        seeds = RecordedSeeds(self._sinks, additions)
        # Megatron's timers wait for the GPU. Megatron also waits after each exchange of pipeline stages, for old torch.
        theirs = {"timers": None, "batch_p2p_sync": False}
        kept = [tensor for owned in self._engine.sets for b in owned.buckets for tensor in b.grads.tensors]
        # Stock's LM head gathers into these. An evaluation with larger micro-batches puts larger ones in their place.
        kept += get_global_memory_buffer().buffer.values()
        with _as(config, theirs), self._checks.recording() as checks, seeds, torch.cuda.graph(
            graph, pool=self._pool, stream=get_shared_capture_stream(), capture_error_mode="thread_local"
        ):
            result = step()
        scales = [(getattr(part, name), part, name) for owned in self._engine.sets for part, name in _scales(owned)]
        restore = [owned.remember() for owned in self._engine.sets]
        restore += [functools.partial(_after_step, group) for chunk in model for group in _groups(chunk)]
        tracked = dict(MTPLossLoggingHelper.tracker)
        return Recorded(
            graph,
            scales,
            seeds,
            checks,
            sent_bytes - before,
            [*restore, functools.partial(MTPLossLoggingHelper.tracker.update, tracked)],
            result,
            [*kept, *(weight.scratch.memory for weight in weights)],
        )

    def _finish_gathers(self, model: list) -> None:
        for owned in self._engine.sets:
            owned.finish_gathers()
        for chunk in model:
            for group in _groups(chunk):
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()

    def _forget_gathers(self, model: list) -> None:
        """Let the next step gather all weights itself, if gathers overlap: an evaluation may have gathered them."""
        for gather in self._gathers:
            if gather.overlap:
                gather.begin()
        for chunk in model:
            for group in _groups(chunk):
                group.param_gather_handle, group.param_gather_dispatched = None, False

    def _begin_again(self, model: list) -> None:
        """Forget what a failed recording has told the host. Its gathers are neither waited for nor finished: none of
        them runs, and the ranks stopped at different ones."""
        for owned in self._engine.sets:
            owned.begin_step(self._engine.steps)
        self._forget_gathers(model)
        for weight in self._weights:
            weight.invalidate()
        for chunk in model:
            for group in _groups(chunk):
                group.grad_reduce_handle = None
            chunk.zero_grad_buffer()


def _first_line(error: BaseException) -> str:
    """The first line of the first error: the end of a failed recording raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _scales(owned: WeightSet) -> list[tuple[Slots | SharedScale, str]]:
    """The holders of the set's scales, and the attributes that are new tensors after each step."""
    found: list[tuple[Slots | SharedScale, str]] = []
    for part in owned.scaling, owned.weight_scaling:
        if part is not None:
            found += [(part, "scale"), (part, "scale_inv")]
    shared = owned.reduction.shared
    return found if shared is None else [*found, (shared, "mu")]


def _groups(chunk) -> list:
    """Stock's bucket groups of a model chunk."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _after_step(group) -> None:
    """Tell stock's bucket group what it knows after a step."""
    group.param_gather_dispatched, group.grad_reduce_finished = False, True


@contextlib.contextmanager
def _as(config, values: dict[str, Any]):
    """`config` has these values inside the block."""
    stock = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(stock)
