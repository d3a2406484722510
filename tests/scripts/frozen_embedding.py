"""Train with the embedding frozen: the first FP8 linear's input then needs no gradient, its weight still does."""

import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_fp8.engine.optimizer import EngineOptimizer

stock_init, finalize = GPTModel.__init__, EngineOptimizer.finalize_grads


def init(self, *args, **kwargs):
    hooked(self, *args, **kwargs)
    self.embedding.requires_grad_(False)
    for module in self.decoder.layers[0].modules():
        if hasattr(module, "layer_norm_weight"):
            module.layer_norm_weight.requires_grad_(False)


def checked(self, num_tokens):
    finalize(self, num_tokens)
    first = self.groups[0].weights[0]
    assert first.path == "decoder.self_attention.linear_qkv" or first.path.startswith("decoder")
    norms = [w.main_grad.norm().item() for w in self.groups[0].weights]
    assert min(norms) > 0, f"a weight got no gradient: {norms}"
    print(f"smallest gradient norm {min(norms):.3e}", flush=True)


EngineOptimizer.finalize_grads = checked
import megatron_fp8.plugin as plugin

wrap = plugin._gpt_model_init


def freezing(fp8):
    make = wrap(fp8)

    def remake(stock):
        global hooked
        hooked = make(stock)
        return init

    return remake


plugin._gpt_model_init = freezing
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
