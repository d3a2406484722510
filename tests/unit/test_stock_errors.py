"""Failed checks of stock Megatron become one line; other errors keep their traceback. Real checks of its validation."""

import sys
from types import SimpleNamespace

import pytest
from commands import MODEL

from megatron_fp8.flags import stock_errors
from megatron_fp8.flags.config import adapt_stock_args, config_from_args
from megatron_fp8.flags.stock_errors import remember_flags, stock_mistake, through_callback

WRONG = [  # (world size, flags, how the line begins)
    (
        1,
        "--global-batch-size 7",
        "--global-batch-size 7, --micro-batch-size 2: eval_global_batch_size (7) must be divisible",
    ),
    (
        2,
        "--num-layers 3 --pipeline-model-parallel-size 2",
        "--num-layers 3, --pipeline-model-parallel-size 2: Number of layers should be divisible by the pipeline",
    ),
    (1, "--overlap-param-gather", "--overlap-param-gather only supported with distributed optimizer"),
    (1, "--min-lr 1", "--lr 0.001, --min-lr 1.0: Megatron needs min_lr <= lr; change it"),
    (
        1,
        "--save x --save-interval 3 --save-retain-interval 4",
        "--save-retain-interval 4, --save-interval 3: Megatron needs save_retain_interval % save_interval == 0",
    ),
    (1, "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: world size (1) is not divisible by"),
    (
        2,
        "--num-attention-heads 3 --tensor-model-parallel-size 2 --hidden-size 96",
        "--num-attention-heads 3, --tensor-model-parallel-size 2: num_attention_heads (3) must be a multiple of",
    ),
    (1, "--expert-model-parallel-size 2", "--expert-model-parallel-size 2: num_experts must be non None to use"),
    (1, "--seq-length 128", "--seq-length 128, --max-position-embeddings 96: max_position_embeddings (96) must be"),
    (1, "--train-samples 100", "--train-iters 2, --train-samples 100: expected iteration-based training; remove one; "),
    (1, "--lr-decay-samples 9", "--train-iters 2, --lr-decay-samples 9: expected iteration-based learning rate decay;"),
    (1, "--recompute-granularity full", "--recompute-granularity full: Using recompute_granularity: full so"),
    (1, "--recompute-granularity selective --recompute-modules foo", "--recompute-modules foo: Invalid choices for"),
    (1, "--squared-relu --swiglu", "--squared-relu, --swiglu: Megatron needs not swiglu; change it"),
    (1, "--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction 0.1, --lr-warmup-iters 2: can only"),
    (1, "--weight-decay-incr-style linear", "--weight-decay-incr-style linear: --start-weight-decay is missing"),
    (1, "--save x", "--save x: --save-interval is missing; give it; Megatron checks it in"),
    (
        4,
        "--num-layers 9 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 2",
        "--pipeline-model-parallel-size 4, --num-layers 9, --decoder-first-pipeline-num-layers 2, "
        "--decoder-last-pipeline-num-layers 2: number of layers at middle stage: 5 must be divisible",
    ),
    (1, "--ckpt-format torch_dcp", "--ckpt-format torch_dcp is only tested with FSDP (without --use-torch-fsdp2)"),
    (1, "--data-path x", "--mock-data, --data-path x: A single data source must be provided"),
    (1, "--use-mup --mup-base-hidden-size 0", "--use-mup, --mup-base-hidden-size 0: --mup-base-hidden-size must be"),
    (
        1,
        "--num-experts 4 --moe-router-topk 2 --swiglu --moe-router-group-topk 2",
        "--moe-router-group-topk 2: When using group limited routing, moe_router_num_groups must be specified (without "
        "--moe-router-num-groups); Megatron checks",
    ),
    (
        1,
        "--num-experts 4 --moe-router-topk 2 --swiglu --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity: moe_expert_capacity_factor must be set to use "
        "moe_pad_expert_input_to_capacity (without --moe-expert-capacity-factor); Megatron",
    ),
    (1, "--num-experts 4 --moe-router-topk 2 --swiglu --moe-enable-deepep", "--moe-enable-deepep: DeepEP backend is"),
    (1, "--moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 64: moe_ffn_hidden_size is set but num_moe_experts is None"),
    (1, "--num-experts 4 --moe-router-topk 1 --swiglu", "--moe-router-topk 1: Please use --moe-router-pre-softmax"),
]


@pytest.fixture
def line_of(parser, parse, monkeypatch):
    """The line for the error of parsing, adapting, validating or configuring."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import validate_args

    monkeypatch.setattr(stock_errors, "_flags", {})
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    remember_flags(parser)

    def line_of(world_size, flags, level="--fp8-level O2"):
        argv = [*MODEL, *level.split(), *flags.split()]
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        args = parse(*argv)
        args.world_size = world_size
        args._is_global_batch_size_explicitly_specified = True
        try:
            if config := config_from_args(args):
                adapt_stock_args(args, config)
            validate_args(args)
            gpt_config_from_args(args)
        except Exception as error:
            return stock_mistake(error)
        return "none raised"

    return line_of


@pytest.mark.parametrize(("world_size", "flags", "start"), WRONG, ids=[flags for _, flags, _ in WRONG])
def test_a_check_that_fails_is_one_line(world_size, flags, start, line_of):
    line = line_of(world_size, flags)
    assert line is not None and "\n" not in line
    assert line.startswith(start), line
    assert "; Megatron checks it in megatron/" in line


def test_an_operation_that_fails_keeps_its_traceback(line_of, monkeypatch):
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "warn_rank_0", None)  # a bug: Megatron calls None
    assert line_of(1, "--sequence-parallel") is None


def test_a_script_that_no_launcher_started_is_told_how(monkeypatch):
    import torch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError) as raised:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)  # as Megatron does
    line = stock_mistake(raised.value)
    assert line == "MASTER_ADDR is not set: no launcher started this; use torchrun --nproc-per-node N SCRIPT FLAGS"


def test_a_port_that_another_run_has_is_named(monkeypatch):
    import socket

    import torch

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError) as raised:
            torch.distributed.init_process_group("gloo")
    assert stock_mistake(raised.value).startswith(f"MASTER_PORT {port}: another process of this machine listens there;")


def test_so_does_what_others_raise():
    for wrong in (lambda: int("x"), lambda: [][0], lambda: (_ for _ in ()).throw(ValueError("not Megatron's"))):
        try:
            wrong()
        except Exception as error:
            assert stock_mistake(error) is None


@pytest.fixture
def module(tmp_path):
    """module(name, text, **names): the namespace of a module that is made from a file."""

    def module(name, text, **names):
        file = tmp_path / f"{name.rpartition('.')[2]}.py"
        file.write_text(text)
        namespace = {"__name__": name, **names}
        exec(compile(text, str(file), "exec"), namespace)
        return namespace

    return module


def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return error


TRAINING = """
def pretrain(last):
    iteration = 0
    iteration = train(last, 0)
    check(-1 if iteration else 0)
def train(iteration, start_iteration):
    check(iteration)
    return iteration
def check(iteration):
    assert 0 <= iteration < 4, 'too late'
"""


def test_after_the_first_step_everything_keeps_its_traceback(module):
    stock = module("megatron.training.training", TRAINING)
    assert stock_mistake(error_of(stock["train"], 4, 4)) is not None
    assert stock_mistake(error_of(stock["train"], 4, 3)) is None
    assert stock_mistake(error_of(stock["pretrain"], 3)) is None  # the error comes after the loop
    assert error_of(stock["pretrain"], 0) is None


BUILDING = """
def build(make):
    try:
        return make()
    except Exception as error:
        raise Exception("failed to build") from error
def check(count):
    if count < 1:
        raise ValueError("count is too small")
"""


def test_of_errors_that_follow_from_another_the_first_is_judged(module):
    stock = module("megatron.core.datasets.builder", BUILDING)
    assert stock_mistake(error_of(stock["build"], lambda: {"a": 1}["b"])) is None
    assert stock_mistake(error_of(stock["build"], lambda: stock["check"](0))).startswith("count is too small; Megatron")


def test_a_callback_that_asks_for_what_megatron_refuses_is_seen(module):
    stock = module("megatron.core.datasets.builder", BUILDING)
    text = "def provide():\n    stock['check'](0)\n"
    script, ours, plugin = (
        module(name, text, stock=stock) for name in ("__main__", "megatron_fp8.layers.norm", "megatron_fp8.plugin")
    )
    layers = module("megatron_fp8.layers.spec", text, stock=stock)  # asks Megatron how many layers the flags give
    for where, seen in ((script, True), (ours, True), (plugin, False), (layers, False)):
        error = error_of(stock["build"], where["provide"])
        assert stock_mistake(error) is not None and through_callback(error) is seen
    # Ours that wraps Megatron's function only passes its call on.
    wrapper = "def wrapped(stock):\n    def init():\n        return stock(0)\n    return init\n"
    init = module("megatron_fp8.layers.model", wrapper)["wrapped"](stock["check"])
    assert not through_callback(error_of(stock["build"], init))
    assert not through_callback(error_of(script["provide"]))  # it is not a callback
    assert not through_callback(error_of(stock["check"], 0))


def test_a_message_that_names_no_flag_gets_them():
    from megatron.core.transformer.moe import token_dispatcher

    class Dispatcher(token_dispatcher.MoEFlexTokenDispatcher):
        tp_size = ep_size = 1

    config = SimpleNamespace(moe_flex_dispatcher_backend="deepep", num_moe_experts=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            token_dispatcher.MoETokenDispatcher, "__init__", lambda self, **kwargs: setattr(self, "config", config)
        )
        line = stock_mistake(error_of(lambda: Dispatcher(4, [0, 1, 2, 3], config, None)))
    assert "DeepEP dispatcher requires TPxEP > 1; that is --expert-tensor-parallel-size times" in line


def test_what_stock_needs_without_transformer_engine_is_named(line_of):
    """Two checks end a BF16 run of Megatron's defaults; neither message says which flags start it."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    rope = line_of(1, "--position-embedding-type rope", level="")
    config = SimpleNamespace(persist_layer_norm=True, layernorm_zero_centered_gamma=False, normalization="LayerNorm")
    norm = stock_mistake(error_of(lambda: WrappedTorchNorm(config, 64)))
    for line, said in ((rope, "apply_rope_fusion is not available"), (norm, "persist_layer_norm not supported")):
        assert said in line and "--transformer-impl local" in line and "--no-persist-layer-norm" in line
        assert "--no-rope-fusion" in line


def test_a_class_that_is_missing_is_named(line_of):
    from megatron.core.models.gpt import gpt_layer_specs

    if gpt_layer_specs.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    try:
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    except TypeError as error:
        line = stock_mistake(error)
    assert line.startswith("Megatron has no TESpecProvider here: Transformer Engine is not installed; install Trans")


def test_a_package_that_megatron_needs_is_named(monkeypatch):
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)  # not installed
    line = stock_mistake(error_of(get_async_strategy, "nvrx"))  # --async-save --use-persistent-ckpt-worker
    assert "`nvidia-resiliency-ext` installation is required" in line and "\n" not in line


LOADING = """
def load_checkpoint(args, optimizer):
    optimizer.state_dict(args)
"""
STATES = """
class Optimizer:
    optimizer = None
    def state_dict(self, args):
        steps = [s["step"] for s in self.optimizer or ()]
        assert len(steps) == 1
    def of_layout(self, args):
        assert len(args.pipeline_model_parallel_layout) % args.pipeline_model_parallel_size == 1
"""


def test_only_flags_that_were_given_are_named(module, parser, monkeypatch):
    """For example stock's distributed optimizer with torch's Adam, whose state is empty when it resumes."""
    monkeypatch.setattr(stock_errors, "_flags", {})
    remember_flags(parser)
    optimizer = module("megatron.core.optimizer.distrib_optimizer", STATES)["Optimizer"]()
    load = module("megatron.training.checkpointing", LOADING)["load_checkpoint"]
    args = parser.parse_args([*MODEL, "--load", "there"])
    monkeypatch.setattr(sys, "argv", ["train.py", *MODEL, "--load", "there"])
    line = stock_mistake(error_of(load, args, optimizer))
    said = "--load there: Megatron needs len(steps) == 1, and the checkpoint does not have it; add --no-load-optim to "
    assert line.startswith(said) and "--optimizer" not in line
    args.pipeline_model_parallel_layout = ["E", "t"]
    line = stock_mistake(error_of(optimizer.of_layout, args))
    assert line.startswith("Megatron needs len(pipeline_model_parallel_layout) % pipeline_model"), line
    monkeypatch.setattr(sys, "argv", ["train.py", "--pipeline-model-parallel-size", "1"])
    assert stock_mistake(error_of(optimizer.of_layout, args)).startswith("--pipeline-model-parallel-size 1: Megatron")
