"""Train with stand-ins for TensorBoard and W&B, and count what the monitor does.

TensorBoard's writer appends {"name", "value", "step"} to LOGDIR/tensorboard.jsonl, W&B's to wandb.jsonl.  Every rank
prints how often it counted, added, reduced and wrote, and where it logs, says what its own part of each weight is like:
a line "weight NAME {elements, underflows, amax}".  LOGDIR comes from the environment.
"""

import atexit
import json
import os
import runpy
import sys
import types
from collections import Counter
from pathlib import Path

from launch import ROOT

sys.path.insert(0, str(ROOT))
LOGDIR = Path(os.environ["LOGDIR"])


def append(file, name, value, step):
    with (LOGDIR / file).open("a") as log:
        log.write(json.dumps({"name": name, "value": float(value), "step": step}) + "\n")


class SummaryWriter:
    def __init__(self, **kwargs):
        pass

    def add_scalar(self, name, value, step):
        append("tensorboard.jsonl", name, value, step)

    def add_text(self, *args, **kwargs):
        pass

    flush = add_text


def log(values, step):
    for name, value in values.items():
        append("wandb.jsonl", name, value, step)


tensorboard, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
tensorboard.SummaryWriter = SummaryWriter
wandb.init = wandb.finish = lambda **kwargs: None
wandb.log, wandb.config = log, types.SimpleNamespace(update=lambda values: None)
sys.modules.update({"torch.utils.tensorboard": tensorboard, "wandb": wandb})

from megatron_fp8.plugin import install

install()
from megatron_fp8.monitor import collect

calls: Counter[str] = Counter()


def counted(owner, name):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


for owner, name in (
    *((collect, n) for n in ("count_cast", "write")),
    *((collect.Counts, n) for n in ("gradient", "reducing")),
):
    counted(owner, name)
begin = collect.Monitor.begin_step


def begin_and_say(self):
    begin(self)
    for weight in self.counts._weights if self.counts else ():
        param, payload = weight.param.detach(), weight.quantized().payload
        values = {
            "elements": param.numel(),
            "underflows": int((param != 0).sum() - (payload.float() != 0).sum()),
            "amax": float(param.abs().max()),
        }
        print(f"weight {weight.name} {json.dumps(values)}", flush=True)


collect.Monitor.begin_step = begin_and_say
atexit.register(lambda: print(f"monitor calls: {json.dumps(calls)}", flush=True))
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
