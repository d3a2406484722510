"""cpu.py: "cuda" means the CPU while it is installed, and everything is restored afterwards."""

import re
import socket
from argparse import Namespace

import pytest
import torch
from commands import error_of
from gloo_ranks import run_ranks

from megatron_fp8 import cpu


@pytest.fixture
def installed():
    cpu.install()
    yield
    cpu.uninstall()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)], ids=repr)
def test_every_name_of_a_gpu_means_the_cpu(installed, device):
    made = torch.ones(3, device=device)
    moved = torch.arange(3).to(device)
    moved_by_name = torch.arange(3).to(device=device, dtype=torch.bfloat16)
    with torch.device(device):
        made_there = torch.ones(3)
    for tensor in (made, made_there, moved, moved_by_name, torch.zeros_like(made, device=device), made.cuda()):
        assert tensor.device.type == "cpu"
    assert moved_by_name.dtype == torch.bfloat16
    assert torch.nn.Linear(2, 2).cuda()(made[:2]).device.type == "cpu"


def test_other_devices_stay():
    """In a process that has used no such context before: torch keeps what it finds at the first."""
    torch.utils._device._device_constructors.cache_clear()
    cpu.install()
    try:
        with torch.device("meta"):
            assert torch.ones(3).is_meta and torch.nn.Linear(2, 2).weight.is_meta
    finally:
        cpu.uninstall()
    with torch.device("meta"):
        assert torch.ones(3).is_meta
    assert torch.ones(3, device="meta").is_meta


def that_take_a_device(owner) -> set[str]:
    """Names of its functions, as torch's descriptions say it: they have no signatures."""
    functions = {name: getattr(owner, name) for name in dir(owner) if not isinstance(getattr(owner, name), type)}
    return {name for name, found in functions.items() if "device (:class:`torch.device`" in str(found.__doc__)}


def test_all_that_make_a_tensor_are_known():
    """But for windows of signals, sparse forms and files."""
    left = {name for name in dir(torch) if re.fullmatch(r"\w+_window|sparse_\w+|from_file", name)}
    makers = that_take_a_device(torch) - left
    assert len(makers) > 20 and makers <= set(cpu._MAKERS)
    assert that_take_a_device(torch.Tensor) - {"cuda", "ipu", "mtia", "xpu"} <= set(cpu._NEW)


@pytest.mark.parametrize("name", cpu._NEW)
def test_a_tensors_methods_make_one_on_the_cpu(installed, name):
    given = {"new_empty_strided": ((2,), (1,)), "new_full": ((2,), 1.0), "new_tensor": ([1.0, 2.0],)}.get(name, ((2,),))
    assert getattr(torch.ones(1), name)(*given, device="cuda").device.type == "cpu"


def test_memory_is_not_pinned(installed):
    assert torch.zeros(2, pin_memory=True).pin_memory().tolist() == [0, 0]


def test_type_names_are_those_of_a_gpu(installed):
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float16).dtype == torch.float16  # with an argument it still converts


def test_random_state_is_the_cpus(installed):
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), first)


def test_a_data_loaders_seed_moves_no_gpus_generator(installed):
    """A resumed run makes its loaders after reading its checkpoint; otherwise its dropout masks would differ."""
    state = torch.cuda.get_rng_state()
    for workers in (0, 1):
        assert len(list(torch.utils.data.DataLoader([1, 2, 3], num_workers=workers))) == 3
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_autograds_callbacks_see_the_cpu_too(installed):
    """Megatron's recomputation runs a backward pass inside another, and with it a function's backward."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            seen.append(torch.ones(1, device="cuda").device.type)
            return dy * 2

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = Look.apply(x)
            torch.autograd.backward((y,), (dy,))
            return x.grad

    x = torch.ones(3, requires_grad=True)
    y = Recomputed.apply(x)
    run = torch.autograd.Variable._execution_engine.run_backward  # Megatron's schedules call it
    run((y,), (torch.ones(3),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert seen == ["cpu"] and x.grad.tolist() == [2, 2, 2]


def test_views_see_what_a_recomputation_has_made_again(installed):
    """As Megatron's extension in C++ does it: without a new version, which autograd would refuse."""
    from megatron.core.tensor_parallel import random

    output, again = torch.rand(6), torch.rand(6)
    view, version = output.view(2, 3)[1], output._version
    output.untyped_storage().resize_(0)
    random._get_share_storage()(output, again)
    assert torch.equal(view, again[3:]) and output._version == version


def test_streams_and_optimizers_work(installed):
    event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(event)
        event.record()
    torch.cuda.synchronize()
    assert event.query()
    assert event.elapsed_time(event) == 0
    torch.cuda.Stream().record_event().synchronize()  # as in Megatron's experts' all-to-all
    assert torch.cuda.Stream().record_event(event) is event

    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert (weight < 1).all()


def test_torchs_names_for_any_accelerator_need_no_driver(installed):
    """From torch 2.15 on, torch.optim calls the first before every step."""
    assert torch.accelerator.current_stream().is_capturing() is False
    torch.accelerator.set_stream(torch.accelerator.current_stream(0))
    torch.accelerator.synchronize()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


def test_torchs_compiler_finds_one_rule_for_every_name(installed):
    """The compiler raises "Duplicate torch object" if one function has two names with different rules."""
    from torch._dynamo import trace_rules

    rules: dict[int, set] = {}
    for names in trace_rules.torch_name_rule_map:
        for name, rule in names.items():
            if name.startswith(("torch.cuda.", "torch.accelerator.")):
                rules.setdefault(id(trace_rules.load_object(name)), set()).add((rule, name))
    twice = [found for found in rules.values() if len({rule for rule, _ in found}) > 1]
    assert len(rules) > 50 and not twice, twice


@pytest.fixture
def in_fp32(monkeypatch):
    """The products of a processor without BF16 instructions, on any: (the undo, the dtypes of all that were made)."""
    made, maker = [], cpu._in_fp32

    def noting(product):
        multiply = maker(product)
        return lambda first, *others, **scalars: made.append(first.dtype) or multiply(first, *others, **scalars)

    monkeypatch.setattr(cpu, "_in_fp32", noting)
    undo = cpu._multiply_in_fp32()
    yield undo, made
    undo()


PRODUCTS = {  # of a (40, 300), b (300, 50) and c (40, 50)
    "mm": lambda a, b, c: a @ b,
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b.t()),
    "bmm": lambda a, b, c: torch.bmm(a.view(40, 2, 150).transpose(0, 1), b.view(2, 150, 50)),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
    "linear with a bias": lambda a, b, c: torch.nn.functional.linear(a, b.t(), c[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None], beta=0.5, alpha=2.0),
    "no sum to add to": lambda a, b, c: torch.baddbmm(c[None] / 0, a[None], b[None], beta=0, alpha=2.0),
}


def with_gradients(product, *operands):
    """The result, and its gradients with respect to a and b."""
    operands = [x.detach().requires_grad_() for x in operands]
    result = product(*operands)
    return [result, *torch.autograd.grad(result, operands[:2], torch.ones_like(result))]


@pytest.mark.usefixtures("fresh_random_data")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_bf16_is_that_in_fp32_rounded_once(in_fp32, name):
    operands = [torch.randn(shape).bfloat16() for shape in ((40, 300), (300, 50), (40, 50))]
    found = with_gradients(PRODUCTS[name], *operands)
    assert in_fp32[1] == [torch.bfloat16] * 3  # the gradients' too
    expected = with_gradients(PRODUCTS[name], *(x.float() for x in operands))
    exact = with_gradients(PRODUCTS[name], *(x.double() for x in operands))
    for ours, plain, true in zip(found, expected, exact, strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, plain.bfloat16())
        assert ((ours - true).abs() <= 2**-8 * true.abs() + 1e-4).all()


@pytest.mark.usefixtures("fresh_random_data")
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_other_products_stay(in_fp32, name, dtype):
    operands = [torch.randn(shape).to(dtype) for shape in ((40, 300), (300, 50), (40, 50))]
    here = with_gradients(PRODUCTS[name], *operands)
    in_fp32[0]()
    stock = with_gradients(PRODUCTS[name], *operands)
    for ours, torchs in zip(here, stock, strict=True):
        assert ours.dtype == dtype and ours.stride() == torchs.stride() and torch.equal(ours, torchs)


def test_a_processor_with_bf16_instructions_multiplies_by_itself(monkeypatch):
    """And one without is not left to torch's loops."""
    replaced = []
    monkeypatch.setattr(cpu, "_multiply_in_fp32", lambda: replaced.append("put") or (lambda: replaced.append("undone")))
    for built, supported in ((True, True), (True, False), (False, None)):
        replaced.clear()
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda answer=built: answer)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=supported: answer)
        cpu.install()
        cpu.uninstall()
        assert replaced == ([] if supported else ["put", "undone"])


def test_uninstall_restores_everything():
    places = [(owner, name) for owner, substitutes in cpu._substitutes() for name in substitutes]
    before = [getattr(owner, name) for owner, name in places]
    cpu.install()
    cpu.install()  # a second call does nothing
    assert torch.cuda.is_available()
    assert cpu.needed() is not before[places.index((torch.cuda, "is_available"))]()  # right even while installed
    cpu.uninstall()
    cpu.uninstall()
    assert [getattr(owner, name) for owner, name in places] == before
    assert torch.ones(1).type() == "torch.FloatTensor"
    if cpu.needed():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(1, device="cuda")


def test_warm_up_draws_no_random_numbers(installed):
    import megatron.training.initialize as initialize

    state = torch.get_rng_state()
    initialize._warmup_jit_function(tp_size=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_dataset_helpers_are_built_only_if_there_is_a_makefile(monkeypatch, tmp_path):
    import megatron.core.datasets.utils as utils

    original = utils.compile_helpers
    (tmp_path / "Makefile").touch()
    with monkeypatch.context() as patch:
        patch.setattr(utils, "__file__", str(tmp_path / "utils.py"))  # as in a Megatron-LM checkout
        cpu.skip_dataset_compile()
        assert utils.compile_helpers is original
    cpu.skip_dataset_compile()
    cpu.skip_dataset_compile()
    assert utils.compile_helpers is not original
    assert utils.compile_helpers() is None  # the original exits the process here: the wheel has no Makefile
    cpu.uninstall()
    assert utils.compile_helpers is original


@pytest.mark.skipif(not cpu.needed(), reason="this machine has a GPU")
def test_communication_goes_through_gloo():
    args = Namespace(distributed_backend="nccl")
    (line,) = cpu.adapt_args(args)
    assert args.distributed_backend == "gloo"
    assert "nccl -> gloo" in line
    assert cpu.adapt_args(args) == []


@pytest.mark.skipif(not cpu.needed(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("given", "visible", "backend", "ends"),
    [
        ("8", None, "nccl", True),
        ("8", "0,1", "nccl", True),
        ("8", "", "nccl", False),  # hidden on purpose
        ("8", None, "gloo", False),
        ("0", None, "nccl", False),
        (None, None, "nccl", False),
    ],
)
def test_a_node_whose_gpus_torch_does_not_find_ends_the_job(monkeypatch, given, visible, backend, ends):
    for name, value in (("SLURM_GPUS_ON_NODE", given), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    line = error_of(cpu.check_node, Namespace(distributed_backend=backend)) if ends else ""
    assert line.startswith(f"node {socket.gethostname()}: torch finds no GPU, and Slurm has given the job 8") == ends
    if not ends:
        cpu.check_node(Namespace(distributed_backend=backend))


SIZES = [3, 0, 5, 2]


def gather_and_scatter(rank: int, ranks: int) -> list[list[float]]:
    """The results of Megatron's collectives with unequal sizes, if "cuda" means the CPU."""
    cpu.install()
    mine = torch.full((SIZES[rank], 2), rank + 1.0, dtype=torch.bfloat16)
    whole = torch.zeros(sum(SIZES), 2, dtype=torch.bfloat16)
    assert torch.distributed.all_gather(list(whole.split(SIZES)), mine) is None  # as experts' tokens: parts of a whole
    later = torch.zeros_like(whole)
    handle = torch.distributed.all_gather(list(later.split(SIZES)), mine, async_op=True)
    handle.wait()
    assert handle.is_completed()
    summed = torch.zeros(SIZES[rank], 2)
    torch.distributed.reduce_scatter(summed, list(torch.arange(1.0, 1 + 2 * sum(SIZES)).view(-1, 2).split(SIZES)))
    sent, received = torch.arange(2.0 * sum(SIZES)).view(-1, 2), torch.zeros(ranks * SIZES[rank], 2)
    torch.distributed.all_to_all_single(received, sent, [SIZES[rank]] * ranks, SIZES)
    pair = torch.distributed.new_group([1, 2])
    if rank in (1, 2):
        parts = [torch.zeros(SIZES[other], 2) for other in (1, 2)]
        torch.distributed.all_gather(parts, mine.float(), group=pair)
        assert [part.flatten().tolist() for part in parts] == [[], [3.0] * 10]
    return [part.flatten().tolist() for part in (whole, later, summed, received)]


def test_collectives_of_unequal_sizes(tmp_path):
    """A rank without tokens for its experts sends nothing, but takes part."""
    expected = [rank + 1.0 for rank, size in enumerate(SIZES) for _ in range(2 * size)]
    for rank, (whole, later, summed, received) in enumerate(run_ranks(gather_and_scatter, 4, tmp_path)):
        first = 2 * sum(SIZES[:rank])
        own = list(range(first, first + 2 * SIZES[rank]))
        assert whole == later == expected
        assert summed == [4.0 * (1 + number) for number in own] and received == [*map(float, own)] * 4
