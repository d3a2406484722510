"""Compares the model that a command builds at a level with the one that stock Megatron builds of the same command.

Stock's is that of its Transformer Engine layer spec, the default, which a level replaces.  Compared are the names,
shapes and marks of all parameters, their first values and the state in which the random generators are left, bit for
bit, the class of every module (but for the exchanges of layers/spec.py), the numbers and functions that modules keep as
attributes, the configuration, and what the models compute: with the same weights in FP32, the loss of each token and
the gradient of each parameter.  A level's GEMMs are those of --fp8-gemm bf16, whose operands keep their precision; its
rotary embedding is its own.
"""

import argparse
import contextlib
import dataclasses
import enum
import functools
import io
import os
import re
import zlib
from unittest import mock

import torch

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-3 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 4 "
    "--attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
).split()
LEVEL = "--fp8-level O1 --fp8-gemm bf16".split()
MARKS = {  # of a parameter, which Megatron reads, and what their absence means
    "tensor_model_parallel": False,
    "partition_dim": -1,  # of a tensor-parallel one: Transformer Engine gives others one too
    "sequence_parallel": False,
    "allreduce": True,
}
EXCHANGED = {  # stock's class under Transformer Engine: what stands in its place at a level
    "TELayerNormColumnParallelLinear": {"Fp8NormColumnParallelLinear"},
    "TEColumnParallelLinear": {"Fp8ColumnParallelLinear", "ColumnParallelLinear"},
    "TERowParallelLinear": {"Fp8RowParallelLinear", "ExpertRowLinear"},
    "TELinear": {"ReplicatedLinear"},
    "TEDotProductAttention": {"TorchAttention", "UnfusedAttention"},
    "MLP": {"Fp8Mlp"},
    "SelfAttention": {"FusedSelfAttention"},
    "MLASelfAttention": {"LatentAttention"},
    "LayerNorm": {"Norm"},
    "RMSNorm": {"Norm"},
    "IdentityOp": {"Fork"},
}
STANDS_FOR = {"ResidualSum": "get_bias_dropout_add"}  # a layer's attributes that are no modules, likewise
# In the configuration, what a level is there to change: its layers, and their rotation, which is not stock's.
NOT_COMPARED = {"transformer_impl", "apply_rope_fusion"}
# Flags that a level switches off, since another form of the same layers computes the same: only that is compared.
OTHER_FORM = {
    *("--moe-grouped-gemm", "--moe-shared-expert-overlap"),
    *("--mla-down-proj-fusion", "--use-te-activation-func"),
}
LOOSE = {"--use-te-activation-func": 1e-3}  # what a level says it computes nearly the same
RANDOM = {"--attention-dropout"}  # other random numbers: what is computed cannot be compared


@functools.cache
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_fp8.flags.config import add_fp8_arguments
    from megatron_fp8.flags.usage import one_line_usage_errors

    parser = argparse.ArgumentParser(allow_abbrev=False)
    one_line_usage_errors(parser)
    return add_fp8_arguments(add_megatron_arguments(parser))


def start() -> None:
    """One rank, with Megatron's groups and random states."""
    from megatron.core import parallel_state

    from megatron_fp8 import cpu

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo" if cpu.needed() else "nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed(1)


def seed(number: int) -> None:
    """Of all generators that initial weights and dropout are drawn from."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number, force_reset_rng=True)


@contextlib.contextmanager
def started():
    """In here models can be built and run, on the CPU too, without compiling what stock compiles."""
    from megatron.core import parallel_state

    from megatron_fp8 import cpu

    torch.compile(lambda: None)  # torch lists its functions now, before cpu.install puts one in the place of many
    if cpu.needed():
        cpu.install()
    start()
    with torch.compiler.set_stance("force_eager"):
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    cpu.uninstall()


def build(argv: list[str], level: bool) -> torch.nn.Module:
    """The model of a command, in FP32.  ValueError where a level refuses it; stock's own errors as they come."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_fp8.flags.config import adapt_stock_args, config_from_args
    from megatron_fp8.layers.model import built_with

    base = [flag for flag in BASE if flag != "--no-rope-fusion"] + LEVEL if level else BASE
    args = parser().parse_args([*base, *argv])
    args.rank, args.world_size = 0, 1
    init = GPTModel.__init__
    if level:
        fp8 = config_from_args(args)
        adapt_stock_args(args, fp8)
        init = built_with(fp8)(init)
    environment = {"NVTE_APPLY_QK_LAYER_SCALING": str(int(args.apply_query_key_layer_scaling))}
    if args.deterministic_mode:
        environment |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(GPTModel, "__init__", init),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        validate_args(args)
        args.bf16, args.params_dtype = False, torch.float32
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)
        seed(1)
        model = GPTModelBuilder(gpt_config_from_args(args)).build_model(ProcessGroupCollection.use_mpu_process_groups())
        return model.to(torch.cuda.current_device())  # learned positions are still on the CPU, as in Megatron


@dataclasses.dataclass
class Description:
    """Everything of a model that is compared, by name."""

    parameters: dict[str, tuple]
    initial: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    modules: dict[str, str]
    attributes: dict[str, dict]
    configuration: dict
    computed: dict[str, torch.Tensor]


def describe(model: torch.nn.Module) -> Description:
    """Of a model that `build` has just built."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    marks = {
        name: (tuple(p.shape), *(f"{mark} {getattr(p, mark, usual)}" for mark, usual in MARKS.items()
                                 if mark != "partition_dim" or getattr(p, "tensor_model_parallel", False)))
        for name, p in model.named_parameters()
    }  # fmt: skip
    initial, generators = {}, {}
    drawn = "weight", "bias"  # Transformer Engine leaves a sink of the softmax as its memory was
    if model.config.perform_initialization:
        initial = {_apart(name): p.detach().clone() for name, p in model.named_parameters()}
        initial = {name: values for name, values in initial.items() if name.endswith(drawn)}
        for name in [name for name in initial if name.endswith("linear_qkv_down_proj.weight")]:
            rows = model.config.q_lora_rank, model.config.kv_lora_rank + model.config.qk_pos_emb_head_dim
            parts = initial.pop(name).split(rows)
            initial |= {name.replace("_qkv_", kind): part for kind, part in zip(("_q_", "_kv_"), parts, strict=True)}
        generators = {"default": torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    attributes = {name: _attributes(module) for name, module in model.named_modules()}
    configuration = {f.name: _plain(getattr(model.config, f.name)) for f in dataclasses.fields(model.config)}
    fill(model)
    return Description(marks, initial, generators, modules, attributes, configuration, run(model))


def _attributes(module: torch.nn.Module) -> dict:
    return {k: _plain(v) for k, v in vars(module).items() if not k.startswith("_") and k not in ("config", "training")}


def _plain(value):
    """What can be compared of an attribute, or None."""
    if isinstance(value, bool | int | float | str | enum.Enum | torch.dtype | type):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, functools.partial):
        return _plain(value.func), [_plain(item) for item in value.args], _plain(value.keywords)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if callable(value) and not isinstance(value, torch.nn.Module):
        return getattr(value, "__qualname__", STANDS_FOR.get(type(value).__name__))
    return None


def _apart(name: str) -> str:
    """The name of a grouped expert's parameter where experts are modules of their own."""
    return re.sub(r"experts\.(linear_fc\d)\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2", name)


def _values(name: str, shape: torch.Size, config) -> torch.Tensor:
    """Numbers that depend on a parameter's name and shape alone, whichever form its layer has."""
    if "linear_qkv_down_proj.layer_norm_" in name:
        name = name.replace("self_attention.linear_qkv_down_proj.layer_norm_", "input_layernorm.")
    if name.endswith("linear_qkv_down_proj.weight"):
        rows = {"q": config.q_lora_rank, "kv": config.kv_lora_rank + config.qk_pos_emb_head_dim}
        parts = [_values(name.replace("_qkv_", f"_{k}_"), torch.Size((n, shape[1])), config) for k, n in rows.items()]
        return torch.cat(parts)
    name = _apart(name)
    is_gain = name.endswith(("norm.weight", "layer_norm_weight"))
    near = 1.0 if is_gain and not config.layernorm_zero_centered_gamma else 0.0
    return near + 0.15 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def fill(model: torch.nn.Module) -> None:
    """Give every parameter, and bias of a router, its values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not name.endswith(("inv_freq", "cos_cached", "sin_cached")):
            tensor.data.copy_(_values(name, tensor.shape, model.config))


class _Grads:
    """Takes the gradients of an FP8 weight, where an engine would."""

    def __init__(self):
        self.sum = 0

    def take(self, product):
        self.sum = self.sum + product.compute(dtype=torch.float32)


def attach(model: torch.nn.Module) -> list:
    """A model's owned weights, whose gradients are added up without an engine."""
    from megatron_fp8.engine.owned_weight import owned_weights

    weights = owned_weights([model])
    for weight in weights:
        weight.sink = _Grads()
    return weights


def run(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The loss of each token, and gradients by the parameters' names; of this run alone."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    generator = torch.Generator().manual_seed(5)
    device = next(model.parameters()).device
    tokens = torch.randint(100, (2, 33), generator=generator).to(device)
    positions = torch.arange(32, device=device).expand(2, 32)
    if model.position_embedding_type == "mrope":
        positions = positions.expand(3, 2, 32) // torch.tensor([[[1]], [[2]], [[3]]], device=device)
    mask = torch.triu(torch.ones(32, 32, dtype=torch.bool, device=device), 1).expand(2, 1, 32, 32)
    ours = {id(weight.param): weight for weight in attach(model)}
    model.train()
    model.zero_grad(set_to_none=True)
    MTPLossLoggingHelper.tracker.clear()
    seed(7)
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:], loss_mask=torch.ones(2, 32, device=device))
    torch.autograd.backward((losses,), grad_tensors=(torch.ones_like(losses),))  # as Megatron's schedules call it
    found = {"loss": losses.detach()}
    for name, parameter in model.named_parameters():
        grad = ours[id(parameter)].sink.sum if id(parameter) in ours else parameter.grad
        if isinstance(grad, torch.Tensor):
            found[f"gradient of {name}"] = grad
    return found


def differences(stock: Description, ours: Description, bound: float, adapted=frozenset()) -> list[str]:
    """What tells a model at a level from stock's, in words.

    Args:
        bound: of the largest value, how far what is computed may be apart.
        adapted: flags that the level has switched off or changed.
    """
    found = []
    settings = NOT_COMPARED | {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in adapted}
    if not adapted & OTHER_FORM:
        found += _unlike("parameter", stock.parameters, ours.parameters)
        exchanged = [name for name, kind in ours.modules.items() if kind in EXCHANGED.get(stock.modules.get(name), ())]
        inside = tuple(f"{name}." for name in exchanged if ours.modules[name] != "LatentAttention")
        apart = {k: v for k, v in stock.modules.items() if k not in exchanged and not k.startswith(inside)}
        own = {k: v for k, v in ours.modules.items() if k not in exchanged and not k.startswith(inside)}
        found += _unlike("module", apart, own)
        for name in stock.modules.keys() & ours.modules.keys():
            a, b = stock.attributes[name], ours.attributes[name]
            if name in exchanged:  # what both know; "causal" is an enum's member to one of them
                common = (a.keys() & b.keys()) - {"attn_mask_type"}
                a, b = ({key: side[key] for key in common} for side in (a, b))
            found += _unlike(f"attribute of {name}", *({k: side[k] for k in side.keys() - settings} for side in (a, b)))
    found += _unequal("first values of", stock.initial, ours.initial)
    found += _unequal("generator", stock.generators, ours.generators)
    a, b = ({k: side.configuration[k] for k in side.configuration.keys() - settings} for side in (stock, ours))
    found += _unlike("configuration", a, b)
    if not adapted & RANDOM:
        found += computed_apart(stock.computed, ours.computed, max([bound, *(LOOSE.get(flag, 0) for flag in adapted)]))
    return found


def _unlike(what: str, stock: dict, ours: dict) -> list[str]:
    names = sorted(stock.keys() | ours.keys())
    return [f"{what} {n}: {ours.get(n)}, stock {stock.get(n)}" for n in names if stock.get(n) != ours.get(n)]


def _unequal(what: str, stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(stock.keys() & ours.keys())
    assert names or not stock
    return [f"{what} {n}" for n in names if not torch.equal(stock[n], ours[n])]


def computed_apart(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], bound: float) -> list[str]:
    """What two models compute differently.  A gradient far below the largest is a sum of nothing: that of
    a bias on every key, which no softmax sees, is rounding alone, and differs between CPUs."""
    largest = max(float(value.abs().max()) for name, value in stock.items() if name != "loss")
    found = []
    for name in sorted(stock.keys() & ours.keys()):
        a, b = stock[name], ours[name]
        error = float((a - b).abs().max() / a.abs().max().clamp(min=1e-2 * largest)) if a.shape == b.shape else 0.0
        if not error < bound:
            found.append(f"{name}: {error:.1e} away from stock's")
    return found
