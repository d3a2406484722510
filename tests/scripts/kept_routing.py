"""Train, and keep each router's logits and choice of every training pass: $KEPT/{step}_{layer}.pt."""

import os
import runpy
import sys

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.global_vars import get_args

passes: dict[tuple[int, int], list] = {}
stock = TopKRouter.routing


def routing(self, logits, *args, **kwargs):
    probs, chosen = stock(self, logits, *args, **kwargs)
    if self.training and torch.is_grad_enabled():
        key = get_args().curr_iteration + 1, self.layer_number
        passes.setdefault(key, []).append((logits.detach().float().clone(), chosen.clone()))
        torch.save(passes[key], f"{os.environ['KEPT']}/{key[0]}_{key[1]}.pt")
    return probs, chosen


TopKRouter.routing = routing
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
