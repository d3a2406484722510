"""Train, and after each checkpoint write what a rollout engine gets to FOLDER: a safetensors file a pipeline stage."""

import functools
import os
import runpy
import sys
from pathlib import Path

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.plugin import install

install()
import megatron.training.training as training
from megatron.core import mpu
from safetensors.torch import save_file

from megatron_fp8.tuning import rollout


def saved(stock):
    @functools.wraps(stock)
    def save(iteration, model, *args, **kwargs):
        stock(iteration, model, *args, **kwargs)
        found = {}
        for name, tensor, scale in rollout.weights(model, vocab_size=255):
            assert name not in found
            found[name] = tensor.clone().contiguous()
            if scale is not None:
                found[f"{name}_scale"] = scale.clone()
        stage = mpu.get_pipeline_model_parallel_rank()
        rank = mpu.get_tensor_model_parallel_rank()
        save_file(found, Path(os.environ["FOLDER"]) / f"{stage}-{rank}.safetensors")

    return save


training.save_checkpoint = saved(training.save_checkpoint)
runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
