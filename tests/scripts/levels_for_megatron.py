"""A pytest plugin that runs Megatron-LM's own tests at a level, on the CPU: models, optimizers and checkpoints.

    cd MEGATRON-LM
    export FP8_LEVEL=O1 FP8_FLAGS="--fp8-gemm bf16" PYTHONPATH=HERE:HERE/tests:HERE/tests/scripts
    python -m pytest -p levels_for_megatron -o addopts= --timeout 240 TESTS

MEGATRON-LM is a checkout of the release that is installed, without its folder `megatron`: the wheel's is tested, which
has its compiled helpers. HERE is this repository; TESTS is one file of tests/unit_tests: many leave gloo groups behind,
with their threads, so a process for each. Without FP8_LEVEL stock runs on the same CPU, to compare with. FP8_FLAGS:
further flags of ours. The tests' models are narrow, of width 12: a level refuses linears that have no multiple of 128
elements, and in FP8 widths that are no multiples of 16. So with a level all widths are rounded up to such; tests that
know a width, or count parameters, fail then.

Those tests build most models by hand, and call no parser. So what a run's flags hook is hooked once, here: a GPTModel
gets the level's layers, from any script; megatron.core.optimizer.get_megatron_optimizer appends the engine; a
parser's arguments get the level. A model without an optimizer, whose training a level refuses, is given what adds up
its gradients. What is not a GPTModel, and its optimizer, is stock's.
"""

import functools
import os
import sys
import tempfile
import unittest.mock
from types import SimpleNamespace

import stand_in_te
import torch

stand_in_te.install()  # many of the tests import Transformer Engine, and build its layers
sys.modules["transformer_engine.pytorch.fp8"].check_fp8_support = lambda: (False, "no GPU")  # type: ignore

from megatron.core import utils
from packaging.version import Version

from megatron_fp8 import cpu, plugin
from megatron_fp8.flags.config import adapt_stock_args
from megatron_fp8.run import Run, say

LEVEL = os.environ.get("FP8_LEVEL", "")
# A run's flags, as far as a level reads them: the tests' models are of all kinds.
FLAGS = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 1 --train-iters 10 --lr 1e-3 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
--eval-interval 10 --transformer-impl local --fp8-level {LEVEL} {os.environ.get("FP8_FLAGS", "")}"""
WIDTHS = "ffn_hidden_size kv_channels q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim".split()


def _without_nccl() -> None:
    """Groups are made by the tests themselves, and named by their backend."""
    for name in ("init_process_group", "new_group", "split_group"):
        stock = getattr(torch.distributed, name)

        @functools.wraps(stock)
        def made(*args, stock=stock, **kwargs):
            if kwargs.get("backend") in ("nccl", "cpu:gloo,cuda:nccl"):
                kwargs["backend"] = "gloo"
            return stock(*args, **{k: v for k, v in kwargs.items() if k not in ("device_id", "pg_options")})

        setattr(torch.distributed, name, made)


def _leave_no_groups() -> None:
    """Megatron forgets its groups and destroys none: of gloo each keeps threads, thousands of them by the end."""
    from megatron.core import parallel_state

    forget = parallel_state.destroy_model_parallel

    @functools.wraps(forget)
    def destroy_model_parallel():
        forget()
        if torch.distributed.is_initialized():
            for group in list(torch.distributed.distributed_c10d._world.pg_map):
                if group is not torch.distributed.group.WORLD:
                    torch.distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def _widen() -> None:
    """Round the widths of every configuration up, so that each linear's is a multiple of 16 whatever its heads."""
    from megatron.core.transformer import transformer_config

    def up(size, unit: int):
        return -(-size // unit) * unit if size else size

    stock = transformer_config.TransformerConfig.__post_init__

    @functools.wraps(stock)
    def __post_init__(self):
        self.hidden_size = up(self.hidden_size, 16 * (self.num_attention_heads or 1))
        for name in WIDTHS:
            if hasattr(self, name):
                setattr(self, name, up(getattr(self, name), 16))
        stock(self)

    transformer_config.TransformerConfig.__post_init__ = __post_init__


def _train_without_optimizer() -> None:
    from architecture import attach
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_fp8.engine.owned_weight import owned_weights

    stock = GPTModel.forward

    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        if any(weight.sink is None for weight in owned_weights([self])):
            attach(self)
        return stock(self, *args, **kwargs)

    GPTModel.forward = forward


def _hook_level() -> None:
    """What a Run of FLAGS hooks, for good; later parsers only read the level."""
    import megatron.core.optimizer as optimizer
    import megatron.training.arguments as arguments
    from megatron.training import global_vars, training

    from megatron_fp8.checkpoint import archive, loads, saves, stock_state
    from megatron_fp8.engine.owned_weight import owned_weights

    ours = arguments.parse_args
    flags_read, Run.flags_read = Run.flags_read, lambda self: say(adapt_stock_args(self.args, self.fp8))
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *FLAGS.split()]
    args = ours()
    sys.argv = before
    stock_optimizer = optimizer.get_megatron_optimizer
    args.save = tempfile.mkdtemp(prefix="level")
    args.world_size, args.rank = 1, 0
    of_session, plugin._installed.run = plugin._installed.run, None  # parsers end the run before theirs
    flags_read(of_session)
    args.save = None
    assert of_session.hooked
    with_engine = training.get_megatron_optimizer

    @functools.wraps(stock_optimizer)
    def get_megatron_optimizer(config, model_chunks, *more, **named):
        if not owned_weights(model_chunks):
            return stock_optimizer(config, model_chunks, *more, **named)
        kept, global_vars._GLOBAL_ARGS = global_vars._GLOBAL_ARGS, global_vars._GLOBAL_ARGS or args
        try:
            return with_engine(config, model_chunks, *more, **named)
        finally:
            global_vars._GLOBAL_ARGS = kept

    def parse_args(*given, **named):
        before, sys.argv = sys.argv, [*sys.argv, *FLAGS[FLAGS.index("--fp8-level") :].split()]
        try:
            return ours(*given, **named)
        finally:
            sys.argv = before

    for module in archive, loads, saves, stock_state:  # a run has parsed its arguments; most of these tests have none
        module.get_args = lambda: global_vars._GLOBAL_ARGS or args
    training.get_megatron_optimizer = optimizer.get_megatron_optimizer = get_megatron_optimizer
    arguments.parse_args = parse_args


plugin.install()
sys.modules.setdefault("mock", unittest.mock)  # what the tests call so
# The tests' data are a download of gigabytes, which these tests do not read.
sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = SimpleNamespace(  # type: ignore
    download_and_extract_asset=lambda **_: None
)
if cpu.needed():
    _without_nccl()
    _leave_no_groups()
    utils.get_fa_version = lambda: Version("0")  # asked where tests are collected
if LEVEL:
    _widen()
    _train_without_optimizer()
    _hook_level()
