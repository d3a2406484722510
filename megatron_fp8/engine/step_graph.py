"""All forward and backward passes of a step as one CUDA graph (`--cuda-graph-impl full_iteration`).

A small model waits for its host: of a step of GPT-125M the GPU works 94 ms, and the host needs 120 to launch what it
does. A graph is launched at once.

    host   scales ─► replay ─► the next step's data ─► reduce, norm, Adam        as ever, outside the graph
    GPU              forward, backward | forward, ... | reduce, norm, Adam

Stock's wrapper records the step and replays it. What stock does not know of is ours: a replay runs no Python, so
whatever the host of a level does anew in each step must be done beside it:

    scales      of casts and of E4M3 weights are new tensors after each step: copied into those that were recorded
    reduction   of gradients belongs to the host as much as to the GPU (engine/overlap.py): it is left out of the
                recording, and called after each replay
    sinks       count the micro-batches that gave them a gradient: told what the recorded step had counted
    quantised   copies of BF16 weights and kept transposes are made once a step: so inside, and forgotten before

A step that somebody looks at (statistics, a probe, a watch) or that is not the recorded one (another number of
micro-batches while the batch ramps up, linears in BF16 for a while after a spike) is run as without a graph, and so are
evaluations; their memory comes on top of the graph's, which keeps a step's activations for good. The bits are the same
either way. What the host decides anew in every step rules a graph out from the start (flags/graphs.py).
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.full_cuda_graph import get_shared_capture_stream
from megatron.core.tensor_parallel.random import get_all_rng_states
from megatron.core.utils import get_model_config

from ..errors import UserError
from ..numerics.scaling import Slots
from .gradients import GradSink
from .optimizer import EngineOptimizer


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded step.

    Attributes:
        key: what tells its kind of step from others.
        scales: the tensors it reads scales from, each with the Slots that it was of, and the attribute's name.
        adds: how many gradients each sink had then.
        finalize: reduces the gradients, by the arguments of then.
        result: what stock's schedule returned, in the graph's memory.
        kept: memory of ours that it uses.
    """

    graph: torch.cuda.CUDAGraph
    key: tuple
    scales: list[tuple[torch.Tensor, Slots, str]]
    adds: dict[GradSink, int]
    finalize: Callable[[], None]
    result: Any
    kept: list[Any]

    def replay(self, meanwhile: Callable[[], None]) -> Any:
        """The step again, with the scales and the data of now; the host does `meanwhile` while the GPU works."""
        for recorded, slots, name in self.scales:
            now = getattr(slots, name)
            if now is not recorded:
                recorded.copy_(now)
        self.graph.replay()
        meanwhile()
        for sink, adds in self.adds.items():
            sink.adds = adds
        self.finalize()
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
        """Have `count` ready, or what is left."""
        while len(self._ready) < count:
            try:
                self._ready.append(next(self.source))
            except StopIteration:  # who asks for one will be told
                return


class StepGraph:
    """What stands for FullCudaGraphWrapper.__call__ in a run with a level."""

    def __init__(self, engine: EngineOptimizer, log: Callable[[list[str]], None]):
        self._engine, self._log = engine, log
        self._steps = 0  # run without a graph
        self._recorded: Recorded | None = None
        self._data: ReadAhead | None = None

    def _reading(self, source: Iterator) -> "ReadAhead":
        if self._data is None or self._data.source is not source:
            self._data = ReadAhead(source)
        return self._data

    def around(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def __call__(wrapper, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs["forward_only"]:
                return wrapper.forward_backward_func(*args, **kwargs)
            number, source = kwargs["num_microbatches"], kwargs["data_iterator"]
            data = self._reading(source[0] if isinstance(source, list) else source)
            read = wrapper.data_read(data, kwargs["model"], True, number)
            step = functools.partial(wrapper.forward_backward_func, **{**kwargs, "data_iterator": read})
            key = number, kwargs["seq_length"], kwargs["micro_batch_size"], *(w.fp8 for w in self._weights)
            if self._looked_at:
                return step()
            if self._recorded is None and self._steps >= max(1, wrapper.cuda_graph_warmup_steps) and self._warm:
                self._recorded = self._record(step, key, get_model_config(kwargs["model"][0]))
                self._log([f"the step of {number} micro-batches is a CUDA graph from now on"])
            if self._recorded is not None and self._recorded.key == key:
                return self._recorded.replay(meanwhile=functools.partial(data.read, number))
            self._steps += 1
            return step()

        return __call__

    @property
    def _weights(self):
        return [weight for owned in self._engine.sets for weight in owned.weights]

    @property
    def _looked_at(self) -> bool:
        """Whether somebody wants to be told what happens inside."""
        events = self._engine.events
        return bool(events.cast or events.forward or events.backward or events.gradient or events.gradient_added)

    @property
    def _warm(self) -> bool:
        """Whether casts have their scales: the first step's are made just in time."""
        return all(owned.scaling is None or owned.scaling.warm for owned in self._engine.sets)

    def _record(self, step: Callable, key: tuple, config) -> Recorded:
        """Record step(), without running it; `config` of the model is put back as it was."""
        calls: list[tuple[tuple, dict]] = []
        stock, timers = config.finalize_model_grads_func, config.timers
        for weight in self._weights:
            weight.invalidate()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        config.finalize_model_grads_func = lambda *args, **kwargs: calls.append((args, kwargs))
        config.timers = None  # theirs wait for the GPU
        try:
            with torch.cuda.graph(graph, stream=get_shared_capture_stream(), capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"--cuda-graph-impl full_iteration: the step cannot be recorded ({reason}): remove it"
            ) from error
        finally:
            config.finalize_model_grads_func, config.timers = stock, timers

        def finalize() -> None:
            for args, kwargs in calls:
                stock(*args, **kwargs)

        slots = [s for owned in self._engine.sets for s in (owned.scaling, owned.weight_scaling) if s is not None]
        sinks = [weight.sink for weight in self._weights if weight.sink is not None]
        return Recorded(
            graph,
            key,
            [(getattr(s, name), s, name) for s in slots for name in ("scale", "scale_inv")],
            {sink: sink.adds for sink in sinks},
            finalize,
            result,
            [weight.scratch.memory for weight in self._weights],
        )
