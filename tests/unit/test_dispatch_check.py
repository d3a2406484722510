"""What --fp8-dispatch asks of a model as a script has made it: all experts of a layer alike, stock's dispatcher."""

import dataclasses

import architecture
import pytest
from commands import error_of

from megatron_fp8.engine.owned_weight import owned_weights
from megatron_fp8.layers.dispatch import Fp8Dispatcher, check_dispatch, dispatch_in_fp8

OWNED = "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --fp8-experts"
OWNED += " --moe-grouped-gemm --fp8-gemm fp8"
TO_ALL = "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1"  # which stock's dispatcher serves


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


def built(flags: str = TO_ALL):
    """(A model, its configuration with --fp8-dispatch both, its experts' weights)"""
    model = architecture.build(f"{OWNED} {flags}".split(), level=True)
    weights = [weight for weight in owned_weights([model]) if weight.expert is not None]
    return model, dataclasses.replace(weights[0].config, dispatch="both"), weights


def test_experts_of_a_layer_are_alike():
    """Or all of the same linears are not in FP8, and their rows are sent in BF16."""
    model, fp8, weights = built()
    check_dispatch(fp8, [model])
    for weight in weights:
        if weight.path.endswith("linear_fc2") and weight.layer_number == 2:
            weight.keep_in_bf16()
    check_dispatch(fp8, [model])


def test_one_expert_in_bf16_or_frozen_is_named():
    model, fp8, weights = built()
    third = next(w for w in weights if w.expert == 2 and w.path.endswith("linear_fc1") and w.layer_number == 1)
    third.keep_in_bf16()
    line = error_of(lambda chunks: check_dispatch(fp8, chunks), [model])
    assert line.startswith(f"--fp8-dispatch both: {third.name} is frozen or in BF16, and decoder.layers.0.mlp.experts.")
    assert line.endswith("; treat all experts of a layer alike, or remove the flag")
    third.fp8 = True
    check_dispatch(fp8, [model])
    third.param.requires_grad_(False)
    assert third.name in error_of(lambda chunks: check_dispatch(fp8, chunks), [model])
    check_dispatch(dataclasses.replace(fp8, dispatch="off"), [model])


def test_dispatchers_are_exchanged():
    model, fp8, _ = built()
    dispatch_in_fp8(model, dataclasses.replace(fp8, dispatch="off"))
    layers = [module for module in model.modules() if hasattr(module, "token_dispatcher")]
    assert len(layers) == 2 and not any(isinstance(layer.token_dispatcher, Fp8Dispatcher) for layer in layers)
    dispatch_in_fp8(model, fp8)
    assert all(isinstance(layer.token_dispatcher, Fp8Dispatcher) for layer in layers)


def test_another_dispatcher_of_a_script_is_refused():
    model, fp8, _ = built("--moe-token-dispatcher-type allgather")
    line = error_of(lambda chunk: dispatch_in_fp8(chunk, fp8), model)
    assert "has a MoEAllGatherTokenDispatcher and Fp8Experts; only stock's all-to-all dispatcher sends FP8" in line
