"""A parcel's way: on which paths stock passes on the very tensor that carries it, and what comes where it does not."""

import sys
from pathlib import Path

import architecture
import pytest
import torch

from megatron_fp8.layers import linear
from megatron_fp8.layers.linear import _OwnedLinear
from megatron_fp8.layers.parcel import Calls, Parcel, arriving, carried, hold, plan, recipe_of
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling

FP8 = ["--fp8-gemm", "fp8"]
QKV, PROJ, FC1, FC2 = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
RECOMPUTE = "--recompute-granularity"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 "
    "--position-embedding-type rope --q-lora-rank 32"
)
EACH = {QKV, FC1, FC2}
PATHS = {  # what comes in FP8 of the linears' inputs
    "": EACH,
    "--swiglu --normalization RMSNorm --disable-bias-linear": EACH,
    f"{RECOMPUTE} full --recompute-method uniform --recompute-num-layers 1": EACH,
    f"{RECOMPUTE} selective --recompute-modules layernorm core_attn": EACH,
    f"{RECOMPUTE} selective --recompute-modules mlp": EACH,
    "--mlp-chunks-for-training 2": EACH,
    f"{LATENT} --qk-layernorm": {"linear_q_up_proj", "linear_kv_up_proj", FC1, FC2},
    LATENT: {FC1, FC2},
    "--num-experts 2 --moe-layer-freq [0,1] --disable-bias-linear": EACH,
    "--no-fp8-wgrad": set(),
    "--fp8-gemm bf16": set(),
}


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


@pytest.fixture
def came(monkeypatch) -> list[tuple[str, bool]]:
    """Of each product the linear's name, and whether its input was a ticket."""
    found, product = [], linear.product

    def noting(x, anchor, parcel, *rest):
        ticket = not any(x.stride())
        assert ticket == (parcel.q is not None)
        found.append((parcel.call.weight.path.rpartition(".")[2], ticket))
        return product(x, anchor, parcel, *rest)

    monkeypatch.setattr(linear, "product", noting)
    return found


def build(case: str) -> torch.nn.Module:
    model = architecture.build([*FP8, *case.split()], level=True)
    architecture.fill(model)
    return model


def in_fp8(came) -> set[str]:
    return {name for name, ticket in came if ticket}


@pytest.mark.parametrize("case", PATHS)
def test_the_object_that_stock_passes_on(case, came):
    """The same on every call of a linear, so that no path is half and half; and none is left on its way."""
    found = architecture.run(build(case))
    assert in_fp8(came) == PATHS[case]
    assert not in_fp8(came) & {name for name, ticket in came if not ticket}
    assert len(came) >= 6 and all(value.isfinite().all() for value in found.values())


def adapted(layer):
    """An adapter around each linear, as LoRA's, that adds nothing yet."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.factor = base, torch.nn.Parameter(torch.zeros(()))

        def forward(self, x, *args):
            y, bias = self.base(x, *args)
            return y + self.factor * x.sum(), bias

    layer.mlp.linear_fc1, layer.mlp.linear_fc2 = Adapter(layer.mlp.linear_fc1), Adapter(layer.mlp.linear_fc2)


def replaced(layer):
    """A hook that gives the linears another input."""
    for module in (layer.mlp.linear_fc1, layer.mlp.linear_fc2):
        module.register_forward_pre_hook(lambda module, given: (given[0].clone(),))


@pytest.mark.parametrize("change", [adapted, replaced])
def test_a_module_between_two_of_ours_sees_values(change, came):
    """The linear whose input the module gives plans and casts by itself; the results are those without the module, but
    for a rounding to BF16 in between."""
    model = build("")
    plain = architecture.run(model)
    came.clear()
    for layer in model.decoder.layers:
        change(layer)
    changed = architecture.run(model)
    assert (FC2, True) not in came
    assert {name for name, ticket in came if ticket} <= {QKV, FC1}
    loss, before = changed["loss"], plain["loss"]
    assert (loss - before).abs().max() <= 0.02 * before.abs().max()
    weights = [module.owned for module in model.modules() if isinstance(module, _OwnedLinear)]
    assert weights and not any(weight.pending for weight in weights)


WALK = [  # of x from the layer to the GEMM of fc1; on a GPU the kernel is ops/triton/norm.py
    "layers/residual.py", "layers/linear.py", "layers/parcel.py", "layers/norm.py", "engine/owned_weight.py",
    "ops/by_device.py", "ops/reference_norm.py", "layers/mlp.py", "layers/linear_fp8.py", "gemm/interface.py",
]  # fmt: skip


def test_the_walk_of_an_activation():
    """The files in order, without those that are only asked for a value, and what is the CPU's. `pytest -s` prints."""
    layer = build("--swiglu --normalization RMSNorm --disable-bias-linear").decoder.layers[0]
    for weight in architecture.attach(layer):
        weight.casts.scaling = DelayedScaling([E4M3, E5M2], 4, "max", 0, "cpu")
        weight.casts.scaling.warm = True
    package = str(Path(linear.__file__).parents[1]) + "/"
    stations, calls, stops, returns = [], 0, [], 0

    def walk(frame, event, _):
        nonlocal calls, returns
        here, came_from = (
            f.f_code.co_filename.removeprefix(package) if f and f.f_code.co_filename.startswith(package) else ""
            for f in (frame, frame.f_back)
        )
        if event != "call" or here in ("", "cpu.py") or stations[-1:] == ["gemm/interface.py"]:
            return
        if came_from in ("ops/reference_norm.py", "ops/reference.py") and here != came_from:
            return
        calls += 1
        if came_from and came_from != here and came_from not in stations:
            stations.append(came_from)
        if here in ("gemm/interface.py", "ops/reference_norm.py") and here not in stations:
            stations.append(here)
        returns += here in stops[:-1] and here != stops[-1]
        stops.append(here)

    x = torch.randn(32, 2, 64, requires_grad=True)
    layer.mlp(layer.pre_mlp_layernorm(x)[0])  # the plans are made
    sys.setprofile(walk)
    try:
        layer.mlp(layer.pre_mlp_layernorm(x)[0])
    finally:
        sys.setprofile(None)
    print(f"\n{len(stations)} files, {calls} calls, {returns} returns:", *stations)
    assert stations and sorted(stations) == sorted(WALK), stations
    assert calls <= 48 and returns <= 20


def one_linear(case: str = ""):
    layer = build(case).decoder.layers[0]
    architecture.attach(layer)
    return layer.mlp.linear_fc1


def test_planning_changes_nothing():
    module = one_linear()
    before = {name: value for name, value in vars(module.owned).items() if not callable(value)}
    first, second = module.plan(), module.plan()
    assert first is second
    after = {name: value for name, value in vars(module.owned).items() if not callable(value)}
    assert before.keys() == after.keys() and all(after[name] is value for name, value in before.items())
    assert module.owned.pending == 0 and module.owned.forwards == [0, 0]
    with pytest.raises(AttributeError):
        first.wgrad = False


def test_calls_that_are_not_alike_have_plans_of_their_own():
    """Whatever may change between two calls of a linear, the shared plan is the one that is made now."""
    module = one_linear()
    weight, calls = module.owned, Calls(module.owned)

    def same(sequence_parallel=False, sum_dx=False, training=True):
        shared = calls.plan(module.tp_group, sequence_parallel, sum_dx, training)
        fresh = plan(weight, module.tp_group, sequence_parallel, sum_dx, training)
        assert vars(shared) == vars(fresh)
        return shared

    plans = [same(), same(training=False), same(sequence_parallel=True), same(sum_dx=True)]
    with torch.no_grad():
        plans.append(same())
    weight.fp8 = False
    plans.append(same())
    weight.fp8 = True
    weight.events.forward = (lambda *seen: None,)
    plans.append(same())
    weight.events.forward = ()
    assert len(set(map(id, plans))) == len(plans) and same() is plans[0]


def test_a_parcel_is_its_tensors_alone():
    """A view, a copy and a sum carry nothing; what a producer holds is no parcel."""
    x = torch.randn(8, 4)
    x._fp8_parcel = parcel = Parcel(one_linear().plan())
    assert carried(x) is parcel and arriving(x) is None  # it is on its way back: nothing is packed
    assert all(carried(other) is None for other in (x.view(4, 8), x.clone(), x + 0, x.detach()))
    y = torch.randn(8, 4)
    assert recipe_of(y) is None
    hold(y)
    assert carried(y) is None and arriving(y) is None and recipe_of(y).kept[0] is y
