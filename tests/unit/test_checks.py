"""Checks before a run starts: CUDA_DEVICE_MAX_CONNECTIONS, and a script that trains a GPT."""

import sys
import types
from argparse import Namespace

import pytest
import torch

from megatron_fp8 import cpu
from megatron_fp8.errors import UserError
from megatron_fp8.flags import checks, graphs
from megatron_fp8.flags.checks import (
    GRAPH_REGISTER,
    MAX_CONNECTIONS,
    check_model,
    check_script,
    check_stage,
    set_graph_register,
    set_max_connections,
)


def asked(monkeypatch, capability=(9, 0), tp=1, cp=1, value=None, started=False):
    """(lines for the log, the variable afterwards)."""
    monkeypatch.setattr(checks, "_compute_capability", lambda: capability)
    monkeypatch.setattr(cpu, "needed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.delenv(MAX_CONNECTIONS, raising=False)
    if value is not None:
        monkeypatch.setenv(MAX_CONNECTIONS, value)
    args = Namespace(tensor_model_parallel_size=tp, context_parallel_size=cp)
    return set_max_connections(args), checks.os.environ.get(MAX_CONNECTIONS)


def test_one_queue_is_set_where_megatron_demands_it(monkeypatch):
    said = f"--tensor-model-parallel-size 2: set {MAX_CONNECTIONS}=1, which Megatron demands before Blackwell"
    assert asked(monkeypatch, tp=2) == ([said], "1")
    assert asked(monkeypatch, tp=2, capability=None) == ([said], "1")
    lines, value = asked(monkeypatch, cp=4)
    assert lines[0].startswith("--context-parallel-size 4: ") and value == "1"


@pytest.mark.parametrize("case", [{}, {"tp": 2, "capability": (10, 0)}], ids=["one", "Blackwell"])
def test_and_nowhere_else(case, monkeypatch):
    assert asked(monkeypatch, **case) == ([], None)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_nccl_registers_no_graph_in_expandable_segments(name, monkeypatch):
    def asked(world=2, graphed=True, allocator="expandable_segments:True", register=None, started=False):
        for variable, value in {**dict.fromkeys(checks.ALLOCATOR), name: allocator, GRAPH_REGISTER: register}.items():
            monkeypatch.setenv(variable, value or "")  # also so that what is set here is undone
            if value is None:
                monkeypatch.delenv(variable)
        monkeypatch.setattr(graphs, "graphed", lambda args: graphed)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: started)
        return set_graph_register(Namespace(world_size=world)), checks.os.environ.get(GRAPH_REGISTER)

    (line,), value = asked()
    assert line.startswith(f"CUDA graphs with {name}=expandable_segments:True: set {GRAPH_REGISTER}=0") and value == "0"
    assert asked(register="1")[1] == "0" and asked(register="0", started=True) == ([], "0")
    assert [asked(**other) for other in ({"world": 1}, {"graphed": False}, {"allocator": "x:1"})] == [([], None)] * 3
    with pytest.raises(UserError, match=f"export {GRAPH_REGISTER}=0 before the start"):
        asked(started=True)


def test_what_is_set_stays_where_megatron_takes_it(monkeypatch):
    assert asked(monkeypatch, tp=2, value="1") == ([], "1")
    assert asked(monkeypatch, value="32") == ([], "32")
    (line,), value = asked(monkeypatch, tp=2, value="32")
    assert f"{MAX_CONNECTIONS}=1 instead of 32, which Megatron demands" in line and value == "1"


def test_after_cuda_has_started_it_is_too_late(monkeypatch):
    with pytest.raises(ValueError, match=f"--tensor-model-parallel-size 2: Megatron needs {MAX_CONNECTIONS}=1"):
        asked(monkeypatch, tp=2, started=True)


def model_class(name, package):
    return type(name, (torch.nn.Module,), {"__module__": f"megatron.core.models.{package}"})


OTHERS = [("T5Model", "T5"), ("BertModel", "bert"), ("HybridModel", "hybrid"), ("LLaVAModel", "multimodal")]


@pytest.mark.parametrize(("name", "package"), OTHERS)
def test_a_script_with_another_model_is_refused(name, package, monkeypatch):
    script = types.SimpleNamespace(**{name: model_class(name, package)})
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(ValueError, match=f"--fp8-level O1: the script trains a {name}, a level supports"):
        check_script("O1")


@pytest.mark.parametrize("more", [{}, {"T5Model": model_class("T5Model", "T5")}], ids=["alone", "and-another"])
def test_a_gpts_script_passes(more, monkeypatch):
    names = {"GPTModel": model_class("GPTModel", "gpt"), "MyModel": torch.nn.Linear, "ModelType": int, **more}
    script = types.SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, "__main__", script)
    check_script("O1")


def test_a_model_that_a_script_has_from_elsewhere_is_refused():
    if cpu.needed():
        cpu.install()
    try:
        with pytest.raises(ValueError, match="the script trains a Linear"):
            check_model("O3", [torch.nn.Linear(2, 2)])
    finally:
        cpu.uninstall()


def test_a_stage_that_cannot_be_saved_is_refused():
    empty, full = torch.nn.ReLU(), torch.nn.Linear(2, 2)
    check_stage(None, [empty])
    check_stage("x", [empty, full])
    with pytest.raises(ValueError, match="--save x: the stage of rank 0 has no parameters"):
        check_stage("x", [empty])
