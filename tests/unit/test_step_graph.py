"""What the host does beside the replay of a graphed step (engine/step_graph.py), with a graph that runs nothing."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8.engine import step_graph
from megatron_fp8.engine.events import Events, Observer
from megatron_fp8.errors import UserError
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import DelayedScaling


class Looking(Observer):
    def cast(self, weight, role, x, q):
        pass


class Sink:
    adds = 0


class Job:
    """A run of one weight: `did` is what happened, `step` what Megatron does for one."""

    def __init__(self, monkeypatch, fails: bool = False):
        self.did: list = []
        job = self

        class Graph:
            def replay(self):
                job.did.append("replay")

        config = SimpleNamespace(timers="theirs")
        config.finalize_model_grads_func = lambda *args, **kwargs: self.did.append(("sum", *args))
        self.sink = Sink()
        self.weight = SimpleNamespace(
            fp8=True, sink=self.sink, scratch=SimpleNamespace(memory=None), invalidate=lambda: self.did.append("forget")
        )
        self.scaling = DelayedScaling([E4M3], 1, "most_recent", 0, "cpu")
        owned = SimpleNamespace(weights=[self.weight], scaling=self.scaling, weight_scaling=None)
        self.config, self.events, self.data = config, Events(), iter(range(1000))
        self.lines: list[str] = []

        def schedule(**kwargs):
            read = list(kwargs["data_iterator"])
            self.did.append(("run", read))
            if fails and config.timers is None:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.sink.adds += kwargs["num_microbatches"]
            if not kwargs["forward_only"]:
                config.finalize_model_grads_func("model", tokens=None)
            return "losses"

        def data_read(source, model, training, number):
            return iter([next(source) for _ in range(number)])

        self.wrapper = SimpleNamespace(forward_backward_func=schedule, data_read=data_read, cuda_graph_warmup_steps=1)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: contextlib.nullcontext())
        monkeypatch.setattr(step_graph, "get_shared_capture_stream", lambda: None)
        monkeypatch.setattr(step_graph, "get_all_rng_states", dict)
        monkeypatch.setattr(step_graph, "get_model_config", lambda model: config)
        engine = SimpleNamespace(sets=[owned], events=self.events)
        self._call = step_graph.StepGraph(engine, self.lines.extend).around(lambda wrapper, *args, **kwargs: None)

    def step(self, number: int = 2, forward_only: bool = False, amax: float = 1.0) -> list:
        """What one step did; its sums have been begun, and it ends with new scales."""
        self.did.clear()
        self.sink.adds = 0
        kwargs = {"num_microbatches": number, "seq_length": 8, "micro_batch_size": 1, "forward_only": forward_only}
        assert self._call(self.wrapper, model=["chunk"], data_iterator=[self.data], **kwargs) == "losses"
        self.adds = self.sink.adds
        if not forward_only:
            self.scaling.amax.fill_(amax)
            self.scaling.update()
        return list(self.did)


SUM = ("sum", "model")


def test_one_step_is_recorded_and_the_rest_replayed(monkeypatch):
    job = Job(monkeypatch)
    assert job.step() == [("run", [0, 1]), SUM]
    assert job.step(forward_only=True) == [("run", [job.data])]  # an evaluation, with its own data
    assert job.step() == ["forget", ("run", [2, 3]), "replay", SUM] and len(job.lines) == 1
    assert (job.config.timers, job.adds) == ("theirs", 2)
    assert job.step() == ["replay", SUM]
    assert job.adds == 2  # or the sum would take it that no gradient came


def test_a_replay_reads_the_scales_of_now_and_the_data_in_their_order(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    recorded = job.scaling.scale, job.scaling.scale_inv
    job.step(amax=1.75)
    assert job.scaling.scale is not recorded[0] and recorded[0].item() == 448.0
    job.step(amax=4.0)
    assert (recorded[0].item(), recorded[1].item()) == (256.0, 1 / 256)
    assert job.step(3)[0] == ("run", [6, 7, 8])  # two of them had been read ahead


def test_what_is_looked_at_or_another_step_runs_as_without(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    job.step()
    looking = Looking()
    job.events.subscribe(looking)
    assert job.step()[0][0] == "run"
    job.events.unsubscribe(looking)
    assert job.step(4)[0][0] == "run"
    job.weight.fp8 = False
    assert job.step()[0][0] == "run"
    job.weight.fp8 = True
    assert job.step() == ["replay", SUM]


def test_without_scales_nothing_is_recorded(monkeypatch):
    job = Job(monkeypatch)
    job.step()
    job.scaling.warm = False
    assert job.step()[0][0] == "run" and not job.lines
    assert job.step()[0] == "forget"


def test_a_step_that_cannot_be_recorded(monkeypatch):
    job = Job(monkeypatch, fails=True)
    job.step()
    with pytest.raises(UserError, match=r"--cuda-graph-impl full_iteration.*not permitted when stream.*remove it"):
        job.step()
    assert job.config.timers == "theirs" and job.config.finalize_model_grads_func is not None


def test_the_end_of_the_data_is_told_to_who_asks():
    data = step_graph.ReadAhead(iter([1, 2, 3]))
    data.read(2)
    data.read(5)
    assert [next(data), next(data), next(data)] == [1, 2, 3]
    with pytest.raises(StopIteration):
        next(data)
