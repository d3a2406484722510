"""What the host does for a linear on a GPU, counted on the CPU: calls of ATen, by torch's profiler, and launches.

A small model waits for the host, a microsecond or more for each call. So that a GPU's path runs here, tensors say that
they are on one, kernels are not launched, and cuBLASLt's stand-in (gemm_libraries.py) computes nothing: results are
whatever the memory held. Bounds are what was counted when they were set; more needs a reason.
"""

import importlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_parts import Known, OneWeight, parts_of
from host_layer import aten_calls

from megatron_fp8.comm.reduce import DenseShard
from megatron_fp8.engine.bank import Bank
from megatron_fp8.engine.bucket import Bucket
from megatron_fp8.engine.grad_store import DenseStore
from megatron_fp8.engine.owned_weight import OwnedWeight
from megatron_fp8.gemm import cublaslt, grouped
from megatron_fp8.gemm.grouped import GroupedTensor
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.mlp import ActivationCast
from megatron_fp8.layers.norm import NormCast, NormKind
from megatron_fp8.layers.parcel import Parcel, carried, plan
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import DelayedScaling
from megatron_fp8.ops.adam import AdamHyper
from megatron_fp8.ops.groups import groups_of

triton = pytest.importorskip("triton")
launch = importlib.import_module("megatron_fp8.ops.triton.launch")

M, K, F = 32, 64, 128
HYPER = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)


@pytest.fixture
def launches(served, monkeypatch):
    """The names of kernels as they would be launched, GEMMs too, from now on, when tensors are "on a GPU"."""
    if not cublaslt.bound():
        pytest.skip(f"no cuBLASLt: {cublaslt.why_not()}")
    names = []
    noted = lambda self, grid: lambda *_, **__: names.append(self.__name__)  # noqa: E731
    monkeypatch.setattr(launch.Launched, "__getitem__", noted)
    # with a Triton that launch.py does not know
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *_, **__: names.append(self.__name__))
    monkeypatch.setattr(type(served), "cublasLtMatmul", lambda *_: names.append("gemm"))
    norm = importlib.import_module("megatron_fp8.ops.triton.norm")
    monkeypatch.setattr(norm, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    yield names


class Linears:
    """Norm, fc1, SwiGLU, fc2, as a layer's MLP has them in a step that is not the first, their weights in E4M3."""

    def __init__(self, group):
        self.ones = [OneWeight(torch.randn(*shape).bfloat16(), group, storage="fp8") for shape in ((2 * F, K), (K, F))]
        scaling = DelayedScaling([E4M3, E5M2] * 2, 4, "max", 0, "cpu")
        scaling.update()
        for i, one in enumerate(self.ones):
            one.weight.casts.scaling, one.weight.casts.slots = scaling, (2 * i, 2 * i + 1)
        self.anchor = torch.zeros(0, requires_grad=True)
        self.gain = torch.ones(K, dtype=torch.bfloat16, requires_grad=True)
        self.x = torch.randn(4, M // 4, K).bfloat16().requires_grad_()

    def parcels(self):
        return [Parcel(plan(one.weight, None, False, False, training=True)) for one in self.ones]

    def mlp(self):
        parcel, after = self.parcels()
        normed, x = NormCast.apply(parcel, self.x, self.gain, None, NormKind(True, 1e-5, False))
        h = product(normed, self.anchor, parcel)
        activated = ActivationCast.apply(after, h, None, "swiglu", carried(h))
        y = product(activated, self.anchor, after)
        torch.autograd.grad((y, x), (self.x, self.gain), (torch.ones_like(y), torch.ones_like(x)))

    def linear(self):
        y = product(self.x, self.anchor, self.parcels()[0])
        torch.autograd.grad(y, self.x, torch.ones_like(y))


def test_a_linears_calls(group, launches):
    """x in, y out, and both gradients: q(x), y, q(dy), W^T, dx, dW."""
    linears = Linears(group)
    linears.linear()
    launches.clear()
    assert aten_calls(linears.linear) <= 14  # 4 of them make dy
    assert launches == ["_tile_kernel", "gemm", "_tile_kernel", "_tile_kernel", "gemm", "gemm"]


def test_an_mlps_calls(group, launches):
    linears = Linears(group)
    linears.mlp()
    launches.clear()
    assert aten_calls(linears.mlp) <= 42
    assert launches.count("gemm") == 6


def test_an_update_makes_no_views_of_what_stays(group, launches):
    """Adam's step of a weight: its kernel, and views of its gradient and of its two scales."""
    one = OneWeight(torch.randn(F, K).bfloat16(), group, storage="fp8")
    scale = torch.ones(())

    def step():
        one.bucket.step(HYPER, scale)

    def prepare():
        one.bucket.begin_step(1)
        one.weight.take_gradient(Known(torch.zeros(F, K)))
        one.bucket.launch()
        one.bucket.land()

    for _ in range(2):
        prepare()
        launches.clear()
        found = aten_calls(step)
    assert launches == ["_adam_kernel"] and found <= 3


def test_an_update_of_more_experts_is_no_more_calls(group, launches):
    """A step from one sum of the gradients to the next, as it is without and beside a graph."""
    config, counts = OneWeight(torch.randn(F, K), group, storage="fp8").weight.config, []
    for experts in (4, 32):
        weights = [OwnedWeight(torch.nn.Parameter(torch.randn(F, K).bfloat16()), config) for _ in range(experts)]
        parts = parts_of(group, config, weights)
        bucket, scale = Bucket(weights, parts), torch.ones(())

        def update(bucket=bucket, scaling=parts.weight_scaling, scale=scale):
            scaling.begin_step(0.1)
            bucket.step(HYPER, scale)
            bucket.begin_step(1)

        for _ in range(2):
            bucket._reduced = DenseShard(torch.zeros(bucket.numel))
            launches.clear()
            found = aten_calls(update, inside=True)
        counts.append((found, list(launches)))
    assert counts[0] == counts[1] and counts[0][1] == ["_adam_kernel"]


@pytest.mark.parametrize(("accumulated", "adds"), [("fp32", []), ("fp8", ["_add_kernel"])])
def test_a_pass_of_more_experts_is_no_more_calls(accumulated, adds, group, launches):
    """Of one of their linears: the products forward and back, as Triton launches them."""
    config, counts = OneWeight(torch.randn(F, K), group, storage="fp8").weight.config, []
    config.grad_accum = accumulated
    for experts in (4, 32):
        weights = [OwnedWeight(torch.nn.Parameter(torch.randn(F, K).bfloat16()), config) for _ in range(experts)]
        bucket = Bucket(weights, parts_of(group, config, weights))
        bank, groups = Bank(weights), groups_of(torch.full((experts,), 128), 128 * experts, torch.device("cpu"))
        x, dy = (
            GroupedTensor(groups, torch.ones(experts), *(torch.zeros(n, m).to(E4M3.dtype) for n, m in shapes))
            for shapes in [((groups.rows, side), (side, groups.rows)) for side in (K, F)]
        )

        def both_ways(bank=bank, x=x, dy=dy, rows=groups.rows):
            w = bank.quantized()
            grouped.rows(x, w, torch.empty(rows, F, dtype=torch.bfloat16))
            grouped.rows(dy, bank.transposed(w), torch.empty(rows, K, dtype=torch.bfloat16))
            bank.take_gradients(dy, x)

        for _ in range(2):
            bucket._changed()  # as after an update
            launches.clear()
            found = aten_calls(both_ways, inside=True)
        counts.append((found, list(launches)))
    kernels = ["_rows_kernel", "_transpose_kernel", "_rows_kernel", "_sums_kernel", *adds]
    assert counts[0] == counts[1] and counts[0][1] == kernels


def test_gradients_are_added_where_they_lie_without_views(group, launches):
    one = OneWeight(torch.randn(F, K).bfloat16(), group)
    assert isinstance(one.bucket.grads, DenseStore)
    given = Known(torch.ones(F, K))
    one.weight.take_gradient(given)
    assert aten_calls(lambda: one.weight.take_gradient(given)) == 2  # the stand-in's: to, add_
    assert (one.bucket.grads.dense()[: F * K] == 2).all()


class Driver:
    """A GPU for Triton, whose launches are noted."""

    def __init__(self):
        self.launched = []
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 7
        self.get_current_target = lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32)


class Run:
    """In place of Triton's CudaLauncher."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, driver):
        self._driver = driver

    def launch(self, x, y, z, stream, function, cooperative, pdl, scratch, profile_scratch, metadata, *rest):
        assert (cooperative, pdl, scratch, profile_scratch, rest[:3]) == (False, False, None, None, (None,) * 3)
        self._driver.launched.append(((x, y, z), stream, function, metadata, rest[3:]))

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        self._driver.launched.append(((x, y, z), stream, function, metadata, args))


@pytest.fixture
def driver(monkeypatch):
    """Triton compiles nothing: what it "compiles" is named by the key that it compiled for."""
    driver = Driver()

    def compiled(self, key, signature, device, constexprs, options, attrs, warmup):
        made = SimpleNamespace(
            run=Run(driver), function=key, packed_metadata=str(options), launch_metadata=lambda *_: None
        )
        self.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_stream", lambda device: 7)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver._active = before


def anew(kernel) -> "launch.Launched":
    """The kernel with nothing compiled: what a stand-in compiles must not be launched later."""
    if not isinstance(kernel, launch.Launched):
        pytest.skip(f"Triton {triton.__version__} launches itself")
    of = kernel._kernel
    how = {"do_not_specialize": of.do_not_specialize}
    how["do_not_specialize_on_alignment"] = of.do_not_specialize_on_alignment
    return launch.Launched(triton.JITFunction(of.fn, **how))


def launched_by_both(driver, kernel, args, how) -> None:
    """Launch it by Triton, and by our launcher: the same kernel, with the same arguments."""
    kernel._kernel[(3, 2)](*args, **how)
    kernel[(3, 2)](*args, **how)
    theirs, ours = driver.launched[-2:]
    assert ours[:4] == theirs[:4]
    assert len(ours[4]) == len(theirs[4])
    for mine, his in zip(ours[4], theirs[4], strict=True):
        assert mine is his or mine == (his.data_ptr() if isinstance(his, torch.Tensor) else his)


def test_a_kernel_launched_again_is_the_one_that_triton_would_launch(driver):
    """For every type, alignment, divisibility, constant and option, in any order; and with the same arguments."""
    kernel = anew(importlib.import_module("megatron_fp8.ops.triton.cast")._flat_kernel)
    memory, out = torch.zeros(65), torch.zeros(64, dtype=torch.uint8)
    tensors = [memory[:64], memory[1:], memory[:64].bfloat16(), torch.zeros(64, dtype=torch.float16)]
    cases = [
        ((x, n, scale, out, None, 0), {"E4M3": e4m3, "BLOCK": 64, **options})
        for x, n, scale, e4m3, options in itertools.product(
            tensors, (1, 15, 16, 64), (None, memory[:1], 2.0, 1), (True, False), ({}, {"num_warps": 8})
        )
    ]
    for _ in range(2):
        for args, how in cases:
            launched_by_both(driver, kernel, args, how)
    assert len(driver.launched) == 4 * len(cases)
    assert len({launched[2] for launched in driver.launched}) == 4 * 3 * 4 * 2 * 2


KERNELS = sorted(
    f"{path.stem}.{name}"
    for path in Path(launch.__file__).parent.glob("*.py")
    if path.stem != "__init__"
    for name, value in vars(importlib.import_module(f"megatron_fp8.ops.triton.{path.stem}")).items()
    if name.endswith("_kernel") and hasattr(value, "fn") and value.fn.__module__.endswith(path.stem)
)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_the_one_that_triton_would_launch(driver, name):
    """Every kernel of the package, each argument in turn of every kind: a change that Triton looks at is seen."""
    file, kernel = name.split(".")
    kernel = anew(getattr(importlib.import_module(f"megatron_fp8.ops.triton.{file}"), kernel))
    memory = [torch.zeros(33, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8)]
    pointers = [None, *(x[at:] for x in memory for at in (0, 1)), torch.nn.Parameter(memory[0])]
    numbers = [0, 1, 2, 16, 17, -16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, 1 << 63, 0.5, True]
    options = {"num_warps": (None, 4, 8), "maxnreg": (None, 64), "enable_fp_fusion": (None, False)}
    kinds = {
        p.name: (1, 4, "swiglu") if p.is_constexpr else pointers if p.name.endswith("_ptr") else numbers
        for p in kernel._kernel.params
    } | options
    given = {name: random.choice(values) for name, values in kinds.items()}
    for name, values in kinds.items():
        for value in random.sample(values, len(values)):
            given[name] = value
            how = {name: given[name] for name in options if given[name] is not None}
            for _ in range(2):
                launched_by_both(driver, kernel, [given[name] for name in kinds if name not in options], how)


def test_a_kernel_takes_nothing_that_has_no_key(driver):
    kernel = anew(importlib.import_module("megatron_fp8.ops.triton.cast")._flat_kernel)
    with pytest.raises(TypeError, match="takes tensors, numbers and None, and not 'x'"):
        kernel[(1,)]("x", 64, None, None, None, 0, E4M3=True, BLOCK=64)


def test_tritons_own_launcher_can_be_asked_for(monkeypatch):
    kernel = anew(importlib.import_module("megatron_fp8.ops.triton.cast")._flat_kernel)._kernel
    monkeypatch.setenv("MEGATRON_FP8_LAUNCH", "triton")
    assert launch.launched(kernel) is kernel
    monkeypatch.delenv("MEGATRON_FP8_LAUNCH")
    assert isinstance(launch.launched(kernel), launch.Launched)


def test_hooks_see_every_launch(driver):
    kernel = anew(importlib.import_module("megatron_fp8.ops.triton.cast")._flat_kernel)
    x = torch.zeros(64)
    run = triton.JITFunction.run
    through_triton = []

    def noted(self, *args, **how):
        through_triton.append(self)
        return run(self, *args, **how)

    def again():
        kernel[(1,)](x, 64, None, None, None, 0, E4M3=True, BLOCK=64)

    again()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", noted)
        again()
        assert not through_triton
        hook = lambda metadata: None  # noqa: E731
        triton.knobs.runtime.launch_enter_hook.add(hook)
        again()
        triton.knobs.runtime.launch_enter_hook.remove(hook)
        assert len(through_triton) == 1
        patch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)  # in place of the chain
        again()
        assert len(through_triton) == 2
        patch.setattr(triton.knobs.runtime, "launch_exit_hook", None)
        again()
        assert len(through_triton) == 2
