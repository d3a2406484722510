"""Train where the script freezes a linear, as HOW says; each step prints how far the first layer's linears moved.

attribute, method, module   before the model is wrapped: weight.requires_grad = False, requires_grad_, the module's
chunk                       the whole model's
lora                        the same, under a wrapper that adds an adapter of its own
replaced                    another parameter takes the weight's place
late                        weight.requires_grad = False after the optimizer is built
late-replaced               another parameter, after the optimizer is built
thawed, late-thawed         frozen as above, and set back before the next forward pass
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
LATE = HOW.startswith("late")
built: list[GPTModel] = []


class Lora(torch.nn.Module):
    """A linear of rank 2 beside a frozen one."""

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        base.weight.requires_grad = False
        (n, k), dtype = base.weight.shape, torch.bfloat16
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(2, k, device=base.weight.device).to(dtype) * 0.02)
        self.b = torch.nn.Parameter(torch.zeros(n, 2, device=base.weight.device, dtype=dtype))

    def forward(self, x):
        y, bias = self.base(x)
        return y + (x @ self.a.T) @ self.b.T, bias


def change(model: GPTModel) -> None:
    attention = model.decoder.layers[0].self_attention
    linear = attention.linear_proj
    if HOW in ("attribute", "late", "thawed", "late-thawed"):
        linear.weight.requires_grad = False
    elif HOW == "method":
        linear.weight.requires_grad_(False)
    elif HOW == "module":
        linear.requires_grad_(False)
    elif HOW == "chunk":
        model.requires_grad_(False)
        model.embedding.requires_grad_(True)  # stock's optimizer wants a parameter
    elif HOW == "lora":
        attention.linear_proj = Lora(linear)
    elif HOW in ("replaced", "late-replaced"):
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    if HOW.endswith("thawed"):
        linear.weight.requires_grad_(True)


def init(stock):
    @functools.wraps(stock)
    def wrap(self, config, ddp_config, module, *args, **kwargs):
        built.append(unwrap_model(module))
        if not LATE:
            change(built[-1])
        stock(self, config, ddp_config, module, *args, **kwargs)

    return wrap


def train_step(stock):
    @functools.wraps(stock)
    def step(*args, **kwargs):
        model = built[0]
        if LATE and HOW not in done:
            done.append(HOW)
            change(model)
        linear = model.decoder.layers[0].self_attention.linear_proj
        weight = (linear.base if isinstance(linear, Lora) else linear).weight
        before = weight.detach().view(torch.uint8).clone()
        result = stock(*args, **kwargs)
        changed = int((weight.detach().view(torch.uint8) != before).sum())
        print(f"bytes of the first layer's linear_proj that changed: {changed}", flush=True)
        return result

    return step


done: list[str] = []
DistributedDataParallel.__init__ = init(DistributedDataParallel.__init__)
training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
