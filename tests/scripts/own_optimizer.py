"""Train as a framework does that calls parts of Megatron by itself, as BYPASSED says.

optimizer    its optimizer is megatron.core.optimizer's, imported by its own name, as slime's and verl's
arguments    it reads arguments of its own, and builds a GPTModel of Megatron's, as Megatron Bridge
"""

import argparse
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.flags.usage import one_line_errors
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

BYPASSED = os.environ["BYPASSED"]


def with_own_optimizer(stock):
    def get_megatron_optimizer_config(*args, **kwargs):
        training.get_megatron_optimizer = get_megatron_optimizer
        return stock(*args, **kwargs)

    return get_megatron_optimizer_config


def build_by_itself() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, default=64)
    chosen, _ = parser.parse_known_args()
    config = TransformerConfig(num_layers=1, hidden_size=chosen.hidden_size, num_attention_heads=4)
    GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=64)
    print("would train in BF16", flush=True)


if BYPASSED == "arguments":
    with one_line_errors():
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        build_by_itself()
else:
    training.get_megatron_optimizer_config = with_own_optimizer(training.get_megatron_optimizer_config)
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
