"""Train adapters beside a frozen base: of each linear of ours, or of one.

BASE     all         the whole model is frozen, and each linear has an adapter
         part        the first layer's linear_proj and linear_fc1 are frozen and have adapters; the rest is trained
         bare        the whole model is frozen but its embedding and head, without adapters
         expert      each rank's first expert is frozen, without adapters
         first-rank  rank 0's first expert is
         beside      each expert's linear has an adapter that does not begin as 0, and nothing is frozen

ADAPTED  another script than pretrain_gpt_fp8.py

Each step prints how many bytes of the frozen weights changed, and how many weight gradients of ours were computed;
of a whole frozen base, how many bytes its linears, their FP8 copies, W^T's scratch and all other parameters hold.
Each forward pass of the second layer prints the bytes of the larger BF16 tensors that autograd keeps in it.
The adapters are those of examples/lora.py.
"""

import functools
import os
import runpy
import sys

import torch
from launch import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from lora import Lora
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.models import dist_utils

from megatron_fp8 import gemm
from megatron_fp8.engine.owned_weight import owned_weights, owners

BASE, RANK = os.environ.get("BASE", "all"), 4
OURS = ".base.weight", ".lora_a", ".lora_b"  # the linears' weights and the adapters
built: list[GPTModel] = []


def freeze(model: GPTModel) -> None:
    names = [(name, module) for name, module in owners(model)]
    if BASE in ("expert", "first-rank"):
        here = BASE == "expert" or torch.distributed.get_rank() == 0
        for module in (module for name, module in names if here and ".local_experts.0." in name):
            module.weight.requires_grad = False
        return
    if BASE == "part":
        wanted = "decoder.layers.0.self_attention.linear_proj", "decoder.layers.0.mlp.linear_fc1"
        names = [(name, module) for name, module in names if name in wanted]
        for _, module in names:
            module.weight.requires_grad = False
    elif BASE == "beside":
        names = [(name, module) for name, module in names if ".local_experts." in name]
    else:
        model.requires_grad_(False)
    if BASE == "bare":
        for module in (m for m in (getattr(model, "embedding", None), getattr(model, "output_layer", None)) if m):
            module.requires_grad_(True)
        return
    for name, module in names:
        parent, _, last = name.rpartition(".")
        number = module.owned.layer_number  # the same whatever the pipeline
        adapter = Lora(module, f"{number} {module.owned.path}", RANK)
        if BASE == "beside":
            torch.nn.init.ones_(adapter.lora_b)
        setattr(model.get_submodule(parent), last, adapter)


def say_what_is_kept(layer) -> None:
    stock = layer.forward

    def forward(hidden_states, *args, **kwargs):
        kept: dict[int, torch.UntypedStorage] = {}

        def see(t: torch.Tensor) -> torch.Tensor:
            if t.dtype == torch.bfloat16 and not isinstance(t, torch.nn.Parameter):
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
            result = stock(hidden_states, *args, **kwargs)
        sizes = sorted(memory.nbytes() for memory in kept.values())
        print("kept:", *(size for size in sizes if 2 * size >= hidden_states.nbytes), flush=True)
        return result

    layer.forward = forward


def prepare(stock):
    @functools.wraps(stock)
    def wrap(model_list, *args, **kwargs):
        for model in model_list:
            built.append(model)
            freeze(model)
            if BASE == "all" and len(model.decoder.layers) > 1:
                say_what_is_kept(model.decoder.layers[1])
        return stock(model_list, *args, **kwargs)

    return wrap


products = []
make = gemm.Product.__init__


@functools.wraps(make)
def counted(self, *args, **kwargs):
    products.append(1)
    make(self, *args, **kwargs)


def train_step(stock):
    @functools.wraps(stock)
    def step(*args, **kwargs):
        frozen = [w for w in owned_weights(built) if not w.trained]
        before = [w.param.detach().clone() for w in frozen]
        products.clear()
        result = stock(*args, **kwargs)
        changed = sum(
            int((w.param.view(torch.uint8) != b.view(torch.uint8)).sum()) for w, b in zip(frozen, before, strict=True)
        )
        held = sum(w.param.untyped_storage().nbytes() for w in frozen) / max(1, sum(w.param.numel() for w in frozen))
        stated = sum(w.sink is not None for w in frozen)
        print(
            f"frozen: {len(frozen)}, bytes changed: {changed}, bytes a weight: {held:g}, sinks: {stated}; "
            f"weight gradients: {len(products)}",
            flush=True,
        )
        if BASE == "all":
            memory = frozen[0].scratch.memory  # None with BF16 GEMMs
            scratch = 0 if memory is None else memory.nbytes
            copies = sum(t.nbytes for w in frozen for t in w.cached_tensors())
            others = [p for model in built for name, p in model.named_parameters() if not name.endswith(OURS)]
            sizes = (
                sum(w.param.untyped_storage().nbytes() for w in frozen), copies, scratch,
                sum(p.nbytes for p in others),
            )  # fmt: skip
            print("base's bytes:", *sizes, flush=True)
        return result

    return step


WRAP = "prepare_existing_model_chunks_for_distributed_training"
setattr(dist_utils, WRAP, prepare(getattr(dist_utils, WRAP)))
gemm.Product.__init__ = counted
training.train_step = train_step(training.train_step)
runpy.run_path(str(ROOT / os.environ.get("ADAPTED", "pretrain_gpt_fp8.py")), run_name="__main__")
