"""grouped_experts.py, which says also what its rank sent to experts and back in step 3: bytes by type.

    dispatched_experts.py [FLAGS]      FP8_TEST_HOOK=0  rank 0 has a hook on an expert
                                       FP8_TEST_LOOK=0  rank 0 has one on all experts of a layer together, and says the
                                                        smallest of their gradients' largest magnitudes
"""

import atexit
import os
import runpy
import sys
from collections import Counter

import torch
from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron.core.tensor_parallel import mappings

from megatron_fp8.engine.optimizer import EngineOptimizer
from megatron_fp8.layers import experts

build, stock, sent = EngineOptimizer.__init__, torch.distributed.all_to_all_single, Counter()
looked: list[float] = []
steps: list[EngineOptimizer] = []


def counted(output, data, *args, **kwargs):
    rows = data.dim() == 2 and sys._getframe(1).f_globals is vars(mappings)  # not their probabilities
    if rows and steps and steps[0].steps == 2:  # the third
        sent[str(data.dtype).removeprefix("torch.")] += data.nbytes
    return stock(output, data, *args, **kwargs)


def look(experts, given, made):
    if made[0].requires_grad:
        made[0].register_hook(lambda gradient: looked.append(gradient.abs().max().item()))


def built(self, *args):
    build(self, *args)
    steps.append(self)
    if os.environ.get("FP8_TEST_LOOK") == str(torch.distributed.get_rank()):
        for chunk in self.model_chunks:
            for module in chunk.modules():
                if isinstance(module, experts.Fp8Experts):
                    module.register_forward_hook(look)
        atexit.register(lambda: print(f"looked {min(looked)}", flush=True))
    if os.environ.get("FP8_TEST_HOOK") == str(torch.distributed.get_rank()):
        for chunk in self.model_chunks:
            for module in chunk.modules():
                if isinstance(module, experts.Fp8Experts):
                    module.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)


torch.distributed.all_to_all_single, EngineOptimizer.__init__ = counted, built
atexit.register(lambda: print(f"sent {dict(sorted(sent.items()))}\n", end="", flush=True))
runpy.run_path(str(ROOT / "tests/scripts/grouped_experts.py"), run_name="__main__")
