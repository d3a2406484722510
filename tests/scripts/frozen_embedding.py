"""Train with the embedding frozen: the first FP8 linear's input then needs no gradient, its weight still does."""

import functools
import runpy
import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_fp8.engine.optimizer import EngineOptimizer

wrap, finalize = DistributedDataParallel.__init__, EngineOptimizer.finalize_grads


@functools.wraps(wrap)
def wrap_frozen(self, config, ddp_config, module, *args, **kwargs):
    model = unwrap_model(module)
    model.embedding.requires_grad_(False)
    model.decoder.layers[0].self_attention.linear_qkv.layer_norm_weight.requires_grad_(False)
    wrap(self, config, ddp_config, module, *args, **kwargs)


def finalize_checked(self, num_tokens):
    finalize(self, num_tokens)
    norms = {}
    for weight in (w for bucket in self.buckets for w in bucket.weights if w.layer_number == 1):
        sink = weight.sink
        norms[weight.path] = sink.store.dense()[sink.start :][: sink.shape.numel()].norm().item()
    assert len(norms) == 4 and min(norms.values()) > 0, f"a weight got no gradient: {norms}"
    print(f"smallest gradient norm {min(norms.values()):.3e}", flush=True)


DistributedDataParallel.__init__, EngineOptimizer.finalize_grads = wrap_frozen, finalize_checked
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
