"""A trainer of megatron.core alone: its own loop, without Megatron's parser, arguments and training loop.

    torchrun --nproc-per-node 2 examples/core_loop.py O3 exp_avg_sq=fp8

A tiny GPT learns the next number of sequences that count. Without a level it trains in BF16. On a machine without a GPU
it runs on the CPU.
"""

import functools
import os
import sys

if "RANK" not in os.environ:
    sys.exit("core_loop.py: no launcher started this; use torchrun --nproc-per-node N examples/core_loop.py LEVEL")

import megatron_fp8
from megatron_fp8 import cpu

if len(sys.argv) > 1:
    level, *flags = sys.argv[1:]
    megatron_fp8.enable(level, **dict(flag.split("=") for flag in flags))  # before the model is built
elif cpu.needed():
    cpu.install()

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH, BATCH, MICRO_BATCHES, STEPS = 64, 64, 2, 2, 10


def build() -> DistributedDataParallel:
    """The model, in BF16, whose gradients are summed over all ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, how, Float16Module(config, model.cuda()))


def batches(rank: int):
    """Endless micro-batches (tokens, labels), (b, s) each: from a random start every sequence counts up."""
    noise = torch.Generator().manual_seed(rank)
    while True:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=noise)
        counted = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        yield counted[:, :-1].cuda(), counted[:, 1:].cuda()


def forward_step(data, model):
    """One micro-batch's losses (b, s), and what makes of them (the loss, what is reported)."""
    tokens, labels = next(data)
    places = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    losses = model(tokens, places, None, labels=labels)

    def mean(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # stock divides the former in place

    return losses, mean


def main() -> None:
    torch.distributed.init_process_group("gloo" if cpu.needed() else "nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True), [model]
    )
    schedule = functools.partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=batches(torch.distributed.get_rank()),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    for step in range(1, STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(forward_only=False)
        made, norm, _ = optimizer.step()
        loss = sum(report["loss"].item() for report in reports) / len(reports)
        if torch.distributed.get_rank() == 0:
            what = "made" if made else "skipped"
            print(f"step {step}: loss {loss:.6f}, gradient norm {norm:.4f}, {what}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
