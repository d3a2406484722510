"""A small GPT in this process: its weights can be planted, its losses and casts looked at, at any level.

Megatron's GPTModel, DDP, optimizer and schedule, as examples/core_loop.py uses them; `megatron_fp8.enable` gives them a
level. Text is the Python standard library's source, a byte a token, so nothing has to be prepared. Without a GPU "cuda"
means the CPU, and everything is smaller (`size`).
"""

import contextlib
import functools
import logging
import math
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import cpu, plugin
from ...packages import installed
from .recipes import BF16, TE_CURRENT, TE_DELAYED, Arm

VOCABULARY = 256  # bytes
HELD_OUT = 0.1  # of the text, at its end
_TEXT = 4 << 20  # bytes of source that are read


@dataclass(frozen=True)
class Size:
    """A model's shape and its batches.

    Attributes:
        layers, hidden, heads, ffn: of the model; length: bytes of a sequence; batch: sequences of a micro-batch.
        steps: how long a state is trained from which stresses begin.
        elements: of the vectors of stresses without a model.
        products: (M, N) of single GEMMs.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    length: int
    batch: int
    steps: int
    elements: int
    products: int


TOY = Size(layers=2, hidden=64, heads=4, ffn=128, length=64, batch=8, steps=120, elements=1 << 14, products=64)
REAL = Size(layers=4, hidden=256, heads=4, ffn=704, length=256, batch=32, steps=400, elements=1 << 20, products=1024)


def size() -> Size:
    """What this machine can do in minutes."""
    return TOY if cpu.needed() else REAL


def device() -> torch.device:
    """The GPU, or the CPU without one."""
    return torch.device("cpu" if cpu.needed() else "cuda")


def device_name() -> str:
    """For the store: the GPU's name, or the CPU's."""
    return "CPU, toy size" if cpu.needed() else torch.cuda.get_device_name()


@functools.cache
def text() -> torch.Tensor:
    """(n,) uint8: the standard library's source, in the order of its files' names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts and len(found) < _TEXT:
            found += path.read_bytes()
    return torch.frombuffer(found, dtype=torch.uint8)


type Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, (b, s) each


def batches(seed: int, how_many: int, held_out: bool = False) -> list[Batch]:
    """Batches of random places of the text; every arm of a seed gets the same."""
    shape, every = size(), text()
    cut = int(len(every) * (1 - HELD_OUT))
    part = every[cut:] if held_out else every[:cut]
    noise = torch.Generator().manual_seed(2 * seed + held_out)
    starts = torch.randint(len(part) - shape.length - 1, (how_many, shape.batch, 1), generator=noise)
    return [as_batch(part[start + torch.arange(shape.length + 1)]) for start in starts]


def as_batch(sequences: torch.Tensor) -> Batch:
    """Tokens and labels of sequences (b, s + 1)."""
    sequences = sequences.long()
    return sequences[:, :-1].cuda(), sequences[:, 1:].cuda()


@dataclass(frozen=True)
class Training:
    """How a network trains: Adam's numbers, and the model's switches beside its size."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    beta2: float = 0.95
    micro_batches: int = 1
    qk_norm: bool = False


class Network:
    """A model and its optimizer at an arm, from given weights or from the seed's.

    weights: {name: BF16}, as `weights()` returns them.
    """

    def __init__(self, arm: Arm, seed: int, training: Training, weights: dict[str, torch.Tensor] | None = None):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.training = training
        _seeded(seed)
        made = _model(arm, training)
        if weights is not None:
            missing = made.load_state_dict(weights, strict=False).missing_keys
            assert not [name for name in missing if "_extra_state" not in name], missing
        how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(made.config, how, Float16Module(made.config, made.cuda()))
        adam = OptimizerConfig(
            optimizer="adam", lr=training.lr, min_lr=training.lr, bf16=True, use_distributed_optimizer=True,
            weight_decay=training.weight_decay, adam_beta2=training.beta2, clip_grad=1.0,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(adam, [self.model])

    @property
    def engine(self) -> Any:
        """Ours, with its events."""
        return self.optimizer.engine

    @property
    def embedding(self) -> torch.nn.Parameter:
        """The table of the vocabulary, (V, H) BF16; its gradient in FP32 is `main_grad` after a step."""
        return self.model.module.module.embedding.word_embeddings.weight

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the model's weights, BF16 also where they are stored in E4M3."""
        state = self.model.module.module.state_dict()
        return {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}

    def set_lr(self, lr: float) -> None:
        """Train with this learning rate from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def gradients(self, data: Sequence[Batch]) -> Iterator[torch.Tensor]:
        """The embedding's gradient, flat FP64, of each batch: it has passed dgrad of every layer. Weights stay as they
        are, and delayed scales follow the batches."""
        self.set_lr(0.0)
        for batch in data:
            self._backward([batch])
            yield self.embedding.main_grad.double().flatten()
            self.optimizer.step()

    def step(self, data: Sequence[Batch]) -> float:
        """One step over the micro-batches; returns their mean loss in nats."""
        loss = self._backward(data)
        self.optimizer.step()
        return loss

    def _backward(self, data: Sequence[Batch]) -> float:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        schedule = get_forward_backward_func()
        reports = schedule(
            forward_step_func=_forward, data_iterator=iter(data), model=[self.model], num_microbatches=len(data),
            seq_length=size().length, micro_batch_size=size().batch, forward_only=False,
        )  # fmt: skip
        return sum(report["loss"].item() for report in reports) / len(reports)

    def loss(self, data: Sequence[Batch]) -> float:
        """The mean loss, nats a byte, without training: scales are read and not changed."""
        self.model.eval()
        with torch.no_grad():
            found = torch.stack([_losses(batch, self.model).float().mean() for batch in data])
        return found.mean().item()

    def train(self, data: Sequence[Batch], warm_up: int = 0) -> list[float]:
        """A step for each `micro_batches` of the batches; the loss of each. Rates rise over `warm_up` steps, then fall
        to a tenth by a cosine if there is a warm-up."""
        many, losses = self.training.micro_batches, []
        steps = len(data) // many
        for step in range(steps):
            if warm_up:
                self.set_lr(self.training.lr * _share(step, steps, warm_up))
            losses.append(self.step(data[step * many : (step + 1) * many]))
        return losses


def with_te(*arms: Arm) -> list[Arm]:
    """The arms, and those of Transformer Engine's two recipes that train here."""
    return [*arms, *(arm for arm in (TE_DELAYED, TE_CURRENT) if installed("transformer_engine") and _trains(arm))]


@functools.cache
def _trains(arm: Arm) -> bool:
    """Whether a step with it works on this machine; if not, the reason is printed."""
    try:
        with network(arm, 1) as net:
            return math.isfinite(net.step(batches(1, 1)))
    except Exception as error:  # another package's, whose version we do not know
        print(f"{arm.name}: left out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False


@functools.cache
def trained(seed: int) -> dict[str, torch.Tensor]:
    """Weights after `size().steps` steps in BF16: what most stresses plant their trouble in."""
    with network(BF16, seed) as net:
        net.train(batches(seed, size().steps), warm_up=size().steps // 10)
        return net.weights()


def _share(step: int, steps: int, warm_up: int) -> float:
    """Of the learning rate at a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def _losses(batch: Batch, model) -> torch.Tensor:
    tokens, labels = batch
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, places, None, labels=labels)


def _forward(data: Iterator[Batch], model):
    losses = _losses(next(data), model)

    def mean(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # stock divides the former in place

    return losses, mean


def _model(arm: Arm, training: Training):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = size()
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, finalize_model_grads_func=finalize_model_grads,
        qk_layernorm=training.qk_norm, **(arm.flags if arm.level is None else {}),
    )  # fmt: skip
    if arm.level is None:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=training.qk_norm)
    else:
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=training.qk_norm)
    return GPTModel(
        config, spec, VOCABULARY, shape.length, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def _seeded(seed: int) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This process as the only rank of a job, for all networks inside."""
    if cpu.needed():
        cpu.install()
    from megatron.core import parallel_state

    said = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Megatron's, once a model
    if not cpu.needed():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "gloo" if cpu.needed() else "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        logging.disable(said)
        cpu.uninstall()


@contextlib.contextmanager
def network(
    arm: Arm, seed: int, training: Training | None = None, weights: dict[str, torch.Tensor] | None = None
) -> Iterator[Network]:
    """A Network while the plugin is there for it."""
    if arm.level is not None:
        plugin.enable(arm.level, **arm.flags)
    try:
        yield Network(arm, seed, training or Training(), weights)
    finally:
        plugin.uninstall()
        if cpu.needed():
            cpu.install()
