"""What the host does beside the replay of a graphed step (engine/step_graph.py), with a graph that runs nothing."""

import contextlib
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from megatron.core.utils import GlobalMemoryBuffer

from megatron_fp8.comm.wire import sent_bytes
from megatron_fp8.engine import step_graph
from megatron_fp8.engine.events import Events, Observer
from megatron_fp8.engine.gatherer import ChunkGather
from megatron_fp8.engine.reductions import Local
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import DelayedScaling


class Looking(Observer):
    def cast(self, weight, role, x, q):
        pass


class Checks:
    """LateChecks that were asked for one a step."""

    reruns = False

    def __init__(self, did: list):
        self.did = did

    @contextlib.contextmanager
    def recording(self):
        yield ["is it NaN?"]

    def repeat(self, recorded: list) -> None:
        self.did.append(*recorded)


class Job:
    """A run of one weight: `did` is what happened, `step` what Megatron does for one."""

    def __init__(self, monkeypatch, fails: bool = False, reads_ahead: bool = True, wanted: bool = True):
        self.did: list = []
        self.interrupted = lambda: None  # what a recording that fails has done before
        job = self

        class Graph:
            def replay(self):
                job.did.append("replay")

        config = SimpleNamespace(timers="theirs", batch_p2p_sync=True)
        self.weight = SimpleNamespace(
            sink=None, scratch=SimpleNamespace(memory=None), invalidate=lambda: self.did.append("forget")
        )
        self.gather = SimpleNamespace(early=True, overlap=False, land=lambda: None)
        self.scaling = DelayedScaling([E4M3], 1, "most_recent", 0, "cpu")
        self.scaling.amax.fill_(1.0)
        self.scaling.update()  # as after a step
        owned = SimpleNamespace(
            linears=[self.weight], scaling=self.scaling, weight_scaling=None, reduction=Local(), gathers=[self.gather],
            buckets=[], remember=lambda: lambda: self.did.append("know"),
            begin_step=lambda steps: self.did.append(("begin", steps)), finish_gathers=lambda: None,
        )  # fmt: skip
        self.owned = owned
        self.config, self.events, self.data = config, Events(), iter(range(1000))
        self.watch = SimpleNamespace(any_in_bf16=False)
        self.lines: list[str] = []

        def schedule(**kwargs):
            (data,) = kwargs["data_iterator"]
            self.did.append(("run", list(data)))
            if fails and config.timers is None:
                self.interrupted()
                raise RuntimeError("operation not permitted when stream is capturing\nAnd more.")
            if not kwargs["forward_only"]:
                sent_bytes["grads"] += 100
            return "losses"

        def data_read(sources, model, training, number):
            return [iter([next(source) for _ in range(number)]) for source in sources]

        self.wrapper = SimpleNamespace(forward_backward_func=schedule, data_read=data_read, cuda_graph_warmup_steps=1)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(step_graph, "get_shared_capture_stream", lambda: None)
        monkeypatch.setattr(step_graph, "get_all_rng_states", dict)
        self.buffers = GlobalMemoryBuffer()
        monkeypatch.setattr(step_graph, "get_global_memory_buffer", lambda: self.buffers)
        monkeypatch.setattr(step_graph, "get_model_config", lambda model: config)
        engine = SimpleNamespace(sets=[owned], events=self.events, watch=self.watch, steps=7)
        self.graph = step_graph.StepGraph(engine, Checks(self.did), reads_ahead, self.lines.extend, lambda: wanted)
        self._call = self.graph.around(lambda wrapper, *args, **kwargs: None)
        zero_grad = functools.partial(self.did.append, "zero")
        self.chunk = SimpleNamespace(
            bucket_groups=[], expert_parallel_bucket_groups=[], zero_grad_buffer=zero_grad,
            ddp_config=SimpleNamespace(overlap_param_gather=False), remove_forward_pre_hook_handles={},
        )  # fmt: skip

    def step(self, number: int = 2, forward_only: bool = False, amax: float = 1.0) -> list:
        """What one step did, which ends with new scales."""
        self.did.clear()
        sent_bytes.clear()
        data = [self.data if not forward_only else iter([-1])]
        kwargs = {"num_microbatches": number, "seq_length": 8, "micro_batch_size": 1, "forward_only": forward_only}
        assert self._call(self.wrapper, model=[self.chunk], data_iterator=data, **kwargs) == "losses"
        assert forward_only or sent_bytes["grads"] == 100  # of a replay too, and not of a recording beside it
        if not forward_only:
            self.scaling.amax.fill_(amax)
            self.scaling.update()
        return list(self.did)


REPLAY = ["replay", "know", "is it NaN?"]


def test_one_step_is_recorded_and_the_rest_replayed(monkeypatch):
    job = Job(monkeypatch)
    assert job.step() == [("run", [0, 1])]
    assert job.step(forward_only=True) == [("run", [-1])]  # an evaluation, with its own data
    assert job.step() == ["forget", ("run", [2, 3]), *REPLAY] and len(job.lines) == 1
    assert (job.config.timers, job.config.batch_p2p_sync) == ("theirs", True)
    assert job.step() == REPLAY


def test_a_replay_reads_the_scales_of_now_and_the_data_in_their_order(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    recorded = job.scaling.scale, job.scaling.scale_inv
    job.step(amax=1.75)
    assert job.scaling.scale is not recorded[0] and recorded[0].item() == 448.0
    job.step(amax=4.0)
    assert (recorded[0].item(), recorded[1].item()) == (256.0, 1 / 256)
    looking = Looking()
    job.events.subscribe(looking)
    assert job.step(3) == [("run", [6, 7, 8])]  # two of them had been read ahead


def test_data_that_others_read_too_are_not_read_ahead(monkeypatch):
    job = Job(monkeypatch, reads_ahead=False)
    job.step()
    job.step()
    job.step()
    assert next(job.data) == 6


def test_what_is_looked_at_or_another_step_runs_as_without(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    job.step()
    looking = Looking()
    job.events.subscribe(looking)
    assert job.step()[0][0] == "run"
    job.events.unsubscribe(looking)
    job.watch.any_in_bf16 = True
    assert job.step()[0][0] == "run"
    job.watch.any_in_bf16 = False
    Checks.reruns = True
    assert job.step()[0][0] == "run"
    Checks.reruns = False
    assert job.step() == REPLAY


def test_each_number_of_micro_batches_has_a_graph_and_the_oldest_goes(monkeypatch):
    job = Job(monkeypatch)
    for number in range(1, step_graph.MOST + 2):
        assert job.step(number)[0][0] == "run"  # the first loads kernels
        assert job.step(number)[0] == "forget" and job.step(number) == REPLAY
    assert job.step(2) == REPLAY and job.step(1)[0] == "forget"
    assert job.step(2)[0] == "forget"  # it was the oldest then


def test_memory_that_an_evaluation_outgrows_stays_the_graphs(monkeypatch):
    """--eval-micro-batch-size above --micro-batch-size: stock drops what it gathers the LM head's input into."""
    job = Job(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    used = weakref.ref(job.buffers.get_tensor([4], torch.bfloat16, "mpu")._base)
    job.step()
    job.step()
    job.buffers.get_tensor([8], torch.bfloat16, "mpu")
    assert used() is not None
    job.graph.forget()
    assert used() is None


def test_a_step_without_scales_loads_not_the_kernels_of_a_recording(monkeypatch):
    job = Job(monkeypatch)
    job.scaling.warm = False
    assert job.step()[0][0] == "run"
    assert job.step()[0][0] == "run"
    assert job.step()[0] == "forget" and job.step() == REPLAY


def test_without_scales_nothing_is_recorded(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    job.scaling.warm = False
    assert job.step()[0][0] == "run" and not job.lines
    assert job.step()[0] == "forget"


def test_before_modules_wait_for_their_weights_nothing_is_recorded(monkeypatch):
    """If the first steps are skipped, Megatron hangs no hooks; what is recorded then would gather no weights."""
    job = Job(monkeypatch)
    job.chunk.ddp_config.overlap_param_gather = True
    job.step()
    assert job.step()[0][0] == "run" and not job.lines
    job.chunk.remove_forward_pre_hook_handles["a module"] = "its hook"
    assert job.step()[0] == "forget"


def test_a_step_that_cannot_be_recorded_runs_with_the_same_data_and_no_other_is_tried(monkeypatch):
    job = Job(monkeypatch, fails=True)
    assert not job.gather.early  # the graph is to have all gathers
    job.step()
    assert job.step() == ["forget", ("run", [2, 3]), ("begin", 7), "forget", "zero", ("run", [2, 3])]
    assert job.lines == [
        "the run goes on without a CUDA graph: a step cannot be recorded (rank 0: operation not "
        "permitted when stream is capturing)"
    ]
    assert (job.config.timers, job.config.batch_p2p_sync) == ("theirs", True)
    assert job.step() == [("run", [4, 5])] and job.gather.early


def test_hosts_that_are_ahead_need_no_graph(monkeypatch):
    job = Job(monkeypatch, wanted=False)
    for first in 0, 2, 4:
        assert job.step() == [("run", [first, first + 1])]
    assert job.lines == ["no CUDA graph of a step: the hosts are ahead of their GPUs"] and job.gather.early


class Group:
    """Stock's bucket group, or a bucket of ours, in one: a gather that is recorded cannot be waited for."""

    def __init__(self, did: list):
        self.did, self.weights = did, []
        self.param_gather_handle: Group | None = None
        self.param_gather_dispatched, self.grad_reduce_handle = False, None

    def gather(self) -> None:
        self.did.append("gather")
        self.param_gather_handle, self.param_gather_dispatched = self, True

    def wait(self) -> None:
        raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")

    def land_weights(self) -> None:
        pass


def test_gathers_under_way_in_a_recording_that_failed_are_neither_waited_for_nor_finished(monkeypatch):
    """The ranks stop at different ones: who went on with the rest of them would be alone."""
    job = Job(monkeypatch, fails=True)
    job.chunk.ddp_config.overlap_param_gather = True
    job.chunk.remove_forward_pre_hook_handles["a module"] = "its hook"
    job.chunk.bucket_groups.append(stock := Group([]))
    ours = ChunkGather([Group(job.did) for _ in range(4)], overlap=True)
    job.owned.gathers.append(ours)
    ours.early = False

    def interrupted() -> None:
        ours._need(1)
        stock.gather()

    job.interrupted = interrupted
    job.step()
    assert job.step().count("gather") == 2  # as far as the recording came
    assert stock.param_gather_handle is None and not stock.param_gather_dispatched
    ours.finish()
    assert job.did.count("gather") == 6  # the next step has all of them


def test_the_pace_is_said_once(monkeypatch):
    """Steps without a graph may come right behind the last that it counts."""
    clock, said = iter([1, 9, *range(10, 17), 16.5, 17, 18, 19]), []
    monkeypatch.setattr(step_graph.time, "monotonic", lambda: next(clock))
    pace = step_graph.Pace(said.extend)
    for graphed in [False, False, *[True] * 6, False, False, False, True, True]:
        pace.step()
        pace.graphed = graphed
    assert said == ["a step takes 1000 ms at least as a CUDA graph, and took 1000 ms at least without"]


def test_nothing_of_a_graph_is_left_at_the_end(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    job.step()
    job.graph.forget()
    assert job.step()[0] == "forget"


def test_the_end_of_the_data_is_told_to_who_asks():
    data = step_graph.ReadAhead(iter([1, 2, 3]))
    data.read(2)
    data.read(5)
    assert [next(data), next(data), next(data)] == [1, 2, 3]
    with pytest.raises(StopIteration):
        next(data)
