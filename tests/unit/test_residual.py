"""The residual stream in whole models whose FP8 linears run, in FP32 and in BF16: the bits of stock's sums and of
autograd's, and which of them a GEMM and a norm's backward pass make."""

from types import SimpleNamespace

import architecture
import pytest
import torch
from engine_parts import OneWeight
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fp8 import gemm, ops
from megatron_fp8.engine.owned_weight import owned_weights
from megatron_fp8.layers import residual
from megatron_fp8.layers.linear import product
from megatron_fp8.layers.parcel import Parcel, plan
from megatron_fp8.layers.residual import Fork

FP8 = ["--fp8-gemm", "fp8"]
SWIGLU = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
EXPERTS = "--num-experts 2 --moe-layer-freq [0,1] --disable-bias-linear"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 "
    "--position-embedding-type rope"
)
CASES = {  # additions that two layers' norms make backwards, of four; those that FP8 GEMMs make forwards
    "": (4, 4),
    "--apply-layernorm-1p": (4, 4),
    SWIGLU: (4, 4),
    "--hidden-dropout 0.3": (4, 0),
    "--add-qkv-bias --no-bias-dropout-fusion": (4, 4),
    f"--mtp-num-layers 1 {SWIGLU}": (6, 6),
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (4, 8),
    "--recompute-granularity selective --recompute-modules layernorm core_attn": (4, 4),
    "--recompute-granularity selective --recompute-modules mlp": (2, 2),
    "--mlp-chunks-for-training 2": (2, 2),
    "--mlp-chunks-for-prefill 2": (2, 2),
    EXPERTS: (3, 3),
    LATENT: (2, 2),
    "--fp8-bf16-layers *.layers.0.*": (2, 2),
    "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0": (2, 2),
    "--fp8-gemm bf16": (0, 0),
}


@pytest.fixture(scope="module", autouse=True)
def groups():
    with architecture.started():
        yield


@pytest.fixture
def added(monkeypatch) -> list[bool]:
    """Of each backward pass of a norm in FP8, whether it added the residual's gradient."""
    calls, backward = [], ops.norm_backward

    def counting(*args, residual=None, **options):
        calls.append(residual is not None)
        return backward(*args, residual=residual, **options)

    monkeypatch.setattr(ops, "norm_backward", counting)
    return calls


@pytest.fixture
def summed(monkeypatch) -> list[bool]:
    """Of each FP8 GEMM, whether it added a residual."""
    calls, multiply = [], gemm.gemm

    def counting(a, b, epilogue, **options):
        calls.append(epilogue.residual is not None)
        return multiply(a, b, epilogue, **options)

    monkeypatch.setattr(gemm, "gemm", counting)
    return calls


def build(case: str, dtype=torch.float32) -> torch.nn.Module:
    model = architecture.build([*FP8, *case.split()], level=True).to(dtype)
    architecture.fill(model)
    return model


def forks(model) -> list[Fork]:
    return [module for module in model.modules() if isinstance(module, Fork)]


def without_forks(model) -> None:
    """As stock's layers are."""
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            layer.self_attn_bda = layer.mlp_bda = get_bias_dropout_add
            for name in ("input_layernorm", "pre_mlp_layernorm"):
                if isinstance(getattr(layer, name), Fork):
                    setattr(layer, name, IdentityOp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_stocks_additions(case, dtype, added, summed):
    model = build(case, dtype)
    forked = architecture.run(model)
    assert (sum(added), sum(summed)) == CASES[case]
    added.clear()
    summed.clear()
    without_forks(model)
    plain = architecture.run(model)
    assert not any(added) and not any(summed)
    assert forked.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(forked[name], value) and value.isfinite().all(), name
    assert sum(value.abs().sum() > 0 for value in plain.values()) > 12


def test_a_model_has_the_same_parameters_with_forks():
    model = build("")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state, modules = list(model.state_dict()), len(list(model.modules()))
    assert len(forks(model)) == 4 and len(names) == len(set(names))
    without_forks(model)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert list(model.state_dict()) == state and len(list(model.modules())) == modules


def one_fork():
    """A layer's MLP with its fork, x (s, b, h), and both readers' results."""
    layer = build("").decoder.layers[0]
    for weight in owned_weights([layer]):
        weight.sink = architecture._Grads()
    x = torch.randn(32, 2, 64, requires_grad=True)
    given, residual = layer.pre_mlp_layernorm(x)
    layer.mlp_bda.offer(x, alone=False)
    y, _ = layer.mlp(given)
    return layer.mlp.linear_fc1, x, y, residual


@pytest.mark.parametrize("reaches", ["norm", "residual"])
def test_where_one_gradient_alone_comes(reaches, added):
    linear, x, y, residual = one_fork()
    (y if reaches == "norm" else residual).square().sum().backward()
    assert not any(added)
    if reaches == "residual":
        assert torch.equal(x.grad, 2 * x) and linear.layer_norm_weight.grad is None
    else:
        assert x.grad.abs().sum() > 0 and linear.layer_norm_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("scatter", [False, True], ids=["all rows", "own rows"])
def test_a_sum_over_ranks_takes_the_residual(scatter):
    """The linear's sum + x has the bits of stock's addition, and both their gradients; x is not written."""
    one = OneWeight(torch.randn(64, 32).bfloat16(), torch.distributed.group.WORLD)
    given = torch.randn(16, 2, 32).bfloat16(), torch.randn(16, 2, 64).bfloat16()
    dy, anchor = torch.randn(16, 2, 64).bfloat16(), torch.zeros(0, requires_grad=True)

    def run(joined: bool):
        one.bucket.begin_step(0)
        x, other = (t.clone().requires_grad_() for t in given)
        call = plan(one.weight, torch.distributed.group.WORLD, scatter, False, training=True, sum_y=True)
        y = product(x, anchor, Parcel(call), residual=other if joined else None)
        y = y if joined else other + y
        y.backward(dy)
        assert torch.equal(other, given[1])
        return y, x.grad, other.grad, one.weight.sink.place.clone()

    for joined, apart in zip(run(True), run(False), strict=True):
        assert torch.equal(joined, apart) and joined.abs().sum() > 0


@pytest.mark.parametrize("case", ["", SWIGLU])
def test_what_comes_between_a_sum_over_ranks_and_the_residual(case):
    """Its bias: stock adds both then, and without one the linear adds the residual."""
    layer = build(case).decoder.layers[0]
    layer.mlp_bda = get_bias_dropout_add
    layer.mlp.linear_fc2.tp_group = SimpleNamespace(size=lambda: 2)
    add = residual._sum(layer, "mlp_bda", "mlp", "linear_fc2", residual.Pass(layer))
    assert (add is None) == (case == "")


def test_what_is_frozen(added):
    """A frozen norm has no gradient, a frozen x neither; the rest has its own."""
    model = build("")
    trained = architecture.run(model)
    frozen = {name for name, _ in model.named_parameters() if "layer_norm" in name or "embedding" in name}
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if name in frozen:
            parameter.requires_grad_(False)
    added.clear()
    found = architecture.run(model)
    assert added == [True] * 3  # the first norm's input and parameters are frozen: it has no backward pass
    assert found.keys() == trained.keys() - {f"gradient of {name}" for name in frozen}
    assert all(torch.equal(value, trained[name]) for name, value in found.items())


def test_without_gradients_nothing_is_forked():
    layer = build("").decoder.layers[0]
    x = torch.randn(32, 2, 64)
    with torch.no_grad():
        assert layer.pre_mlp_layernorm(x) is x


class Doubled(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        output, bias = self.module(*args, **kwargs)
        return 2 * output, None if bias is None else 2 * bias


def doubled_by_hooks(layer):
    layer.mlp.register_forward_hook(lambda module, given, out: (2 * out[0], 2 * out[1]))


def doubled_in_a_wrapper(layer):
    layer.mlp = Doubled(layer.mlp)


def doubled_inside(layer):
    layer.mlp.linear_fc2 = Doubled(layer.mlp.linear_fc2)
    layer.mlp.linear_fc2.plan = layer.mlp.linear_fc2.module.plan


def with_dropout(layer):
    layer.hidden_dropout = 0.3


def seen_by_a_hook(layer, seen):
    layer.mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().clone()))


def seen_by_a_wrapper(layer, seen):
    layer.mlp = Doubled(layer.mlp)
    layer.mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().clone()))


@pytest.mark.parametrize("look", [seen_by_a_hook, seen_by_a_wrapper], ids=["hook", "wrapper"])
def test_who_looks_before_a_module_sees_the_residual_stream(look):
    """As in stock, whose linear norms it, and not the tensor without memory that a norm hands to its linear."""
    model, seen, stream = build(""), [], []
    layer = model.decoder.layers[1]
    layer.pre_mlp_layernorm.register_forward_pre_hook(lambda module, given: stream.append(given[0].detach().clone()))
    look(layer, seen)
    architecture.run(model)
    assert seen and all(torch.equal(one, other) and one.std() > 0 for one, other in zip(seen, stream, strict=True))


@pytest.mark.parametrize("part", ["self_attention", "mlp"])
def test_no_residual_is_left_by_a_pass_that_an_error_ends(part):
    """A part that a script calls later, by itself, gives what the part alone computes."""
    layer = build("").decoder.layers[0]
    architecture.attach(layer)
    x, other = torch.randn(2, 32, 2, 64)
    called = {
        "mlp": lambda: layer.mlp(other)[0],
        "self_attention": lambda: layer.self_attention(other, attention_mask=None)[0],
    }[part]
    with torch.no_grad():
        expected = called()
        norm = {"mlp": layer.pre_mlp_layernorm, "self_attention": layer.input_layernorm}[part]
        reader = getattr(layer, part)

        def fail(*args, **kwargs):
            raise ZeroDivisionError

        reader.forward = fail
        with pytest.raises(ZeroDivisionError):
            layer(x, attention_mask=None)
        del reader.forward
        assert torch.equal(called(), expected)
        norm(x)  # by itself, as a script may call it
        assert torch.equal(called(), expected)


@pytest.mark.parametrize(
    ("change", "left"),
    [(doubled_by_hooks, 2), (doubled_in_a_wrapper, 2), (doubled_inside, 2), (with_dropout, 0)],
    ids=["hooks", "wrapper", "linear's wrapper", "dropout"],
)
def test_no_residual_is_left_where_nobody_may_add_it(change, left, summed):
    """Not between a module and what somebody has put after it, when the model was built; nor is what one pass has not
    taken added by the next."""
    model = build("")
    for layer in model.decoder.layers:
        change(layer)
        layer.self_attn_bda._offered = torch.full((32, 2, 64), torch.nan)
    changed = architecture.run(model)
    assert sum(summed) == left
    assert all(value.isfinite().all() for value in changed.values())
    without_forks(model)
    again = architecture.run(model)
    assert changed.keys() == again.keys() and all(torch.equal(value, changed[name]) for name, value in again.items())


@pytest.mark.parametrize("place", ["input_layernorm", "pre_mlp_layernorm"])
def test_a_hook_on_the_norms_place_sees_the_residual_stream(place):
    """As in stock, whose IdentityOp gives one tensor."""
    model, seen = build(""), []
    plain = architecture.run(model)
    for layer in model.decoder.layers:
        getattr(layer, place).register_forward_hook(lambda module, given, result: seen.append((given[0], result)))
    hooked = architecture.run(model)
    assert len(seen) == 2 and all(result is given for (given, result) in seen)
    for name, value in plain.items():
        assert (hooked[name] - value).norm() <= 0.1 * value.norm(), name


def test_hooks_of_all_modules_see_what_the_linear_makes(summed):
    model = build("")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *seen: None)
    try:
        architecture.run(model)
    finally:
        hook.remove()
    assert not any(summed)


def test_a_linear_whose_input_carries_no_parcel_norms_it_itself():
    """What a Fork has made of another input is no business of this call."""
    torch.manual_seed(0)
    layer = build("").decoder.layers[0]
    architecture.attach(layer)
    linear, x = layer.mlp.linear_fc1, torch.randn(32, 2, 64, requires_grad=True)
    expected, _ = linear(x)
    given, _ = layer.pre_mlp_layernorm(torch.randn(32, 2, 64, requires_grad=True))
    assert torch.equal(linear(x)[0], expected)
    assert linear.owned.pending == 2  # what was planned and not called is not waited for
    linear(given)
    assert linear.owned.pending == 3


def test_a_ticket_is_read_by_its_linear_alone():
    """Another tensor of it is refused; a computation with it shows at once."""
    layer = build("").decoder.layers[0]
    architecture.attach(layer)
    for change in (torch.Tensor.view_as, torch.Tensor.expand_as):
        given, _ = layer.pre_mlp_layernorm(torch.randn(32, 2, 64, requires_grad=True))
        with pytest.raises(RuntimeError, match="another input than its norm's result"):
            layer.mlp.linear_fc1(change(given, given))
    given, _ = layer.pre_mlp_layernorm(torch.randn(32, 2, 64, requires_grad=True))
    assert given.isnan().all() and (given + 1).isnan().all()


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_the_linears_see_values_in_memory(hook):
    """What somebody's hooks get is never a ticket; and what is computed is the same, but for where it was rounded."""
    seen = []

    def look(module, *groups):
        for tensor in (t for group in groups for t in (group if isinstance(group, tuple) else (group,))):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                assert any(tensor.stride()) and tensor.isfinite().all()
                seen.append(tensor)

    model = build("--swiglu --normalization RMSNorm --disable-bias-linear")
    plain = architecture.run(model)
    for name, module in model.named_modules():
        if name.endswith(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")):
            getattr(module, f"register_{hook}_hook")(look)
    with_hooks = architecture.run(model)
    assert len(seen) >= 8 and with_hooks.keys() == plain.keys()
    for name, value in plain.items():
        assert (with_hooks[name] - value).norm() <= 0.1 * value.norm(), name
