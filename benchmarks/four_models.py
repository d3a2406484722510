"""The four models of PPO in the memory of one GPU: policy and critic with their states, reference and reward frozen.

    torchrun --nproc-per-node 1 benchmarks/four_models.py O3 --layers 32

The reference is a frozen copy of the policy, the reward model one of the critic (tuning/reference.py): at O3 a byte a
weight of their linears. The critic and the reward model have the policy's head, of a whole vocabulary, in place of a
head with one output: 0.2 B of 7 B parameters too many.

After the four are built, frozen models make a forward pass each, and policy and critic a training step, on one short
sequence: no experience is generated, and activations are few. It prints a line `MODELS {...}` after each stage, in GB
(10^9 bytes): what torch's allocator holds, and the most that it held; and by kind what the tensors of each model hold:
weights (with FP8 copies of them), gradients, masters, both moments. O0 is stock's BF16.
"""

import argparse
import gc
import json
import sys
from collections import Counter

import stamp  # noqa: F401  this checkout's package

# isort: split
import megatron_fp8
from megatron_fp8 import cpu

if (level := "".join(sys.argv[1:2])) in ("O1", "O2", "O3"):  # before Megatron is imported
    megatron_fp8.enable(level, grad_accum="fp8" if "--fp8-gradients" in sys.argv else "bf16")
elif cpu.needed():
    cpu.install()

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fp8.engine.owned_weight import owned_weights
from megatron_fp8.engine.report import measure
from megatron_fp8.tuning.reference import make_reference


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("level", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--num-attention-heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--seq", type=int, default=2048, help="the longest sequence that the models know")
    parser.add_argument("--tokens", type=int, default=128, help="of the one sequence of a step")
    parser.add_argument("--fp8-gradients", action="store_true", help="as in a step of one micro-batch")
    return parser.parse_args()


def build(args) -> Float16Module:
    """A GPT in BF16 on the device, at a level with its linears."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        use_cpu_initialization=False,
    )
    words = -(-args.vocabulary // 128) * 128
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, spec, words, args.seq, position_embedding_type="rope")
    return Float16Module(config, model.cuda())


def trained(args):
    """A model with gradients and states."""
    model = build(args)
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(model.config, how, model)
    how = OptimizerConfig(optimizer="adam", lr=1e-6, bf16=True, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(how, [model])


def frozen(args, twin) -> Float16Module:
    """A frozen copy of a trained model."""
    model = build(args)
    make_reference([model], [twin])
    return model


def held_by(model, optimizer=None) -> dict[str, float]:
    """GB by kind of what a model's tensors hold."""
    if optimizer is not None:
        numbers = sum(parameter.numel() for parameter in model.parameters())
        kinds = Counter({kind: size * numbers for kind, size in measure([model], optimizer)["bytes_per_param"].items()})
        kinds["weight"] += kinds.pop("weight fp8 copy", 0)
    else:
        copies = sum(tensor.nbytes for weight in owned_weights([model]) for tensor in weight.cached_tensors())
        kinds = Counter(weight=copies + sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()))
    return {kind: round(size / 1e9, 6) for kind, size in kinds.items()}


def losses(model, args) -> torch.Tensor:
    """(1, t) of one random sequence."""
    tokens = torch.randint(args.vocabulary, (1, args.tokens + 1), device="cuda")
    places = torch.arange(args.tokens, device="cuda")[None]
    hidden = torch.ones(args.tokens, args.tokens, dtype=torch.bool, device="cuda").triu(1)[None, None]
    return model(tokens[:, :-1], places, hidden, labels=tokens[:, 1:])


def say(stage: str, models: dict) -> None:
    gc.collect()
    held, most = torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9
    kinds = {name: held_by(*parts) for name, parts in models.items()}
    print("MODELS", json.dumps({"stage": stage, "gb": round(held, 2), "gb_peak": round(most, 2), **kinds}), flush=True)


def main() -> None:
    args = arguments()
    torch.distributed.init_process_group("gloo" if cpu.needed() else "nccl")
    torch.cuda.set_device(0)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    models: dict[str, tuple] = {}
    for name, copy in (("policy", "reference"), ("critic", "reward")):
        models[name] = trained(args)
        say(f"{name} is built", models)
        models[copy] = (frozen(args, models[name][0]),)
        say(f"{copy} is built", models)
    torch.cuda.reset_peak_memory_stats()
    for name in ("reference", "reward"):
        with torch.no_grad():
            losses(models[name][0], args)
    for name in ("policy", "critic"):
        model, optimizer = models[name]
        for _ in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses(model, args).float().mean().backward()
            model.config.finalize_model_grads_func([model])
            made, norm, _ = optimizer.step()
            assert made and norm > 0
    say("all have stepped", models)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
