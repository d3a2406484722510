"""Tune a GPT on a file of token numbers (token_files.py), with or without a level, and measure each step (rank 0).

    TASK=sft TE=none torchrun --nproc-per-node 1 benchmarks/tuned_gpt.py <the flags of pretrain_gpt_fp8.py>

TASK: sft; lora, which has adapters on a frozen base (examples/lora.py); dpo, whose flags are dpo_gpt_fp8.py's.
TE: how Megatron finds Transformer Engine (profile_gpt.py). PAD, END: tokens that fill a sample and end a document.

Prints a line `STEP {...}` for each step: milliseconds since the step before (the first: its own), GB (10^9 bytes) that
torch's allocator holds after it, and the most that it held since the step before (the first: since the start).
"""

import functools
import json
import os
import runpy
import sys
import time

from profile_gpt import check_te, prepare_te
from stamp import ROOT

SCRIPTS = {"sft": "pretrain_gpt_fp8.py", "lora": "pretrain_gpt_fp8.py", "dpo": "dpo_gpt_fp8.py"}
LORA_RANK = 16


def measure() -> None:
    """Let every step of Megatron's loop print its line."""
    import megatron.training.training as training
    import torch

    stock = training.train_step
    ended: list[float] = []

    @functools.wraps(stock)  # keeps its signature, which the hooks of some flags read
    def train_step(*args, **kwargs):
        began = ended[-1] if ended else time.perf_counter()
        result = stock(*args, **kwargs)
        torch.cuda.synchronize()
        ended.append(time.perf_counter())
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if int(os.environ.get("RANK", "0")) == 0:
            found = {"ms": round(1e3 * (ended[-1] - began), 2), "gb": held / 1e9, "gb_peak": most / 1e9}
            print("STEP", json.dumps(found), flush=True)
        return result

    training.train_step = train_step


if __name__ == "__main__":
    task = os.environ["TASK"]
    prepare_te(os.environ["TE"])
    from megatron_fp8.plugin import install

    install()
    check_te(os.environ["TE"])
    import token_files

    token_files.install(int(os.environ["PAD"]), int(os.environ["END"]))
    if task == "lora":
        sys.path.insert(0, str(ROOT / "examples"))
        import lora

        lora.install(LORA_RANK)
    measure()
    runpy.run_path(str(ROOT / SCRIPTS[task]), run_name="__main__")
