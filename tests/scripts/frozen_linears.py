"""Train where the script does to a linear what HOW says, before the model is wrapped, or after the optimizer is built.

replaced         another parameter takes the weight's place
norms            the layer's norms are frozen, and nothing is said of its linears
late             weight.requires_grad = False after the optimizer is built
late-replaced    another parameter, after that
unfrozen-late    frozen before it, and thawed after it
thawed           frozen before it, and thawed before it
late-thawed      frozen after it, and set back before the next forward pass
"""

import functools
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import unwrap_model

HOW = os.environ["HOW"]
built: list[GPTModel] = []
steps: list[int] = []


def change(model: GPTModel, late: bool) -> None:
    layer = model.decoder.layers[0]
    linear = layer.self_attention.linear_proj
    if HOW in (("late-replaced",) if late else ("replaced",)):
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    elif HOW == "norms" and not late:
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.requires_grad = False
    elif HOW in (("late", "late-thawed") if late else ("thawed", "unfrozen-late")):
        linear.weight.requires_grad = False
    if HOW in (("late-thawed", "unfrozen-late") if late else ("thawed",)):
        linear.weight.requires_grad_(True)


def init(stock):
    @functools.wraps(stock)
    def wrap(self, config, ddp_config, module, *args, **kwargs):
        built.append(unwrap_model(module))
        change(built[-1], late=False)
        stock(self, config, ddp_config, module, *args, **kwargs)

    return wrap


def train_step(stock):
    @functools.wraps(stock)
    def step(*args, **kwargs):
        if not steps:
            change(built[0], late=True)
        steps.append(1)
        return stock(*args, **kwargs)

    return step


DistributedDataParallel.__init__ = init(DistributedDataParallel.__init__)
training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
