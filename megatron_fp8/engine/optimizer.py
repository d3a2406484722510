"""Our part of Megatron's optimizer chain.

Megatron trains with a ChainedOptimizer of parts that share one gradient norm, one clip and one step (chain.py).  The
plugin appends `EngineOptimizer`: one fused pass of Adam(W) over the shards of the weight engine (ops/adam.py). The
chain treats it like any other part: weight decay, learning-rate rules and schedules are stock code on our param groups.
Our gradients never exist in FP32. The norm and the count of zeros are computed from the reduced buckets
(comm/reduce.py), and the pass clips by the norm as it reads.
"""

from typing import Any, Protocol

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from ..comm.wire import sent_bytes
from ..errors import UserError
from ..numerics.scaling import adam_growth
from ..ops.adam import AdamHyper
from .borrowed import borrowed
from .bucket import Bucket
from .weight_set import WeightSet

_DRAWN = (
    "the weights came without optimizer state: each master is drawn among the numbers that round to its weight "
    "(--fp8-masters-as-loaded: it is the weight)"
)


class Archive(Protocol):
    """Makes and loads what checkpoints hold of the engine and of the chain (checkpoint/archive.py)."""

    def engine_state(self, engine: "EngineOptimizer", model: dict, is_loading: bool, metadata: dict | None) -> dict: ...

    def load_engine(self, engine: "EngineOptimizer", state: dict) -> None: ...

    def chain_state(self, chain, state: dict, metadata: dict | None) -> dict: ...

    def chain_parts(self, chain, state: dict) -> dict: ...


class EngineOptimizer(MegatronOptimizer):
    """Adam(W) over the buckets, in the form of one part of a ChainedOptimizer.

    Args:
        sets: of the weights, with their buckets; at least one.
        options: (Megatron's param-group options: weight-decay and learning-rate multipliers, ..., their buckets), at
            least one, some without a bucket.
        config: the OptimizerConfig of the whole chain.
        model_chunks: the wrapped model chunks.
        stats_group: process group over which gradient statistics are summed: that of the chain.
        archive: makes state dicts.

    Attributes:
        events, device: of all sets.
        steps: updates made; skipped steps do not count.
        update: the number of the update that is under way, or was made last.
        borrowed(chunk, state): other weights for a while (borrowed.py).
        watch: with --fp8-on-spike it judges each step before it is made (monitor/watch.py); else None.
    """

    is_stub_optimizer = False
    borrowed = borrowed

    def __init__(
        self,
        sets: list[WeightSet],
        options: list[tuple[dict, list[Bucket]]],
        config,
        model_chunks,
        stats_group,
        archive: Archive,
    ):
        self.sets, self.archive = sets, archive
        self.events, self.device = sets[0].parts.events, sets[0].parts.device
        self.buckets = [bucket for owned in sets for bucket in owned.buckets]
        # Megatron's scheduler writes lr and weight_decay into its groups; its parameters are empty.
        groups = [{**option, "params": [torch.nn.Parameter(torch.empty(0))]} for option, _ in options]
        inner = torch.optim.Optimizer(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._groups = list(zip(inner.param_groups, (buckets for _, buckets in options), strict=True))
        super().__init__(inner, config)
        self.max_norm, self.clip = config.clip_grad, 1.0
        self.model_chunks = model_chunks
        self.grad_stats_parallel_group = stats_group
        self._one = torch.ones(1, device=self.device)
        self.steps, self.update = 0, 1
        self.watch: Any = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step."""
        sent_bytes.clear()
        self.update = self.steps + 1
        for owned in self.sets:
            owned.begin_step(self.steps)
        for look in self.events.begin_step:
            look()

    def finalize_grads(self, num_tokens: torch.Tensor | None) -> None:
        """Reduce the gradients; `num_tokens` (global, on the device) divides them if given."""
        for owned in self.sets:
            owned.sum_gradients(num_tokens)

    def prepare_grads(self) -> bool:
        return False  # non-finite gradients show in the norm, see chain.py

    def set_norm(self, norm: float) -> None:
        """Clip this step's gradients to the norm `--clip-grad`, the global norm being `norm`."""
        self.clip = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm > 0.0 else 1.0

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        return []  # `WeightSet.power_sum` reads them: they never exist in FP32 all at once

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        self._finish_gathers()  # of weights that no forward pass used
        self.steps += 1
        for owned in self.sets:
            if owned.weight_scaling is not None:
                lr = max(group["lr"] for group, buckets in self._groups for b in buckets if b.of is owned.of)
                owned.weight_scaling.begin_step(adam_growth(lr, *self._betas, self.steps))
        scales = {owned.of: owned.grad_scale * self.clip for owned in self.sets}
        for group, buckets in self._groups:
            hyper = AdamHyper(
                group["lr"],
                *self._betas,
                group.get("eps", self.config.adam_eps),  # a group's own with --use-mup
                group["weight_decay"],
                self.steps,
                self.config.decoupled_weight_decay,
            )
            for bucket in buckets:
                for look in self.events.updating:
                    look(bucket)
                bucket.step(hyper, scales[bucket.of])
                for look in self.events.updated:
                    look(bucket)
        for owned in self.sets:
            owned.end_update(self.steps)
        return True

    @property
    def _betas(self) -> tuple[float, float]:
        return self.config.adam_beta1, self.config.adam_beta2

    def step(self):
        raise RuntimeError("EngineOptimizer is stepped by the chain it is part of")

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata=None) -> dict:
        self._finish_gathers()
        return self.archive.engine_state(self, model_sharded_state_dict, is_loading, metadata)

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        self.archive.load_engine(self, state_dict)

    def weights_changed(self) -> None:
        """This rank's shards were written: get the other ranks'."""
        for owned in self.sets:
            for gather in owned.gathers:
                gather.begin()
        self._finish_gathers()

    def prepare_model_params_for_param_sync(self) -> None:
        """Get all weights: stock is about to read some (evaluation, checkpoints, hashes of replicas)."""
        self._finish_gathers()

    def _finish_gathers(self) -> None:
        for owned in self.sets:
            owned.finish_gathers()

    def state_dict(self):
        raise UserError("--ckpt-format torch cannot hold FP8 optimizer state: use --ckpt-format torch_dist")

    def get_loss_scale(self) -> torch.Tensor:
        return self._one

    def reload_model_params(self, state_dict=None) -> None:
        """A checkpoint without optimizer state, or a trainer, has set the weights: make masters of them."""
        self._finish_gathers()
        drawn = any(weight.config.draws_masters for bucket in self.buckets for weight in bucket.weights)
        if drawn and torch.distributed.get_rank() == 0:
            print(f"[fp8] {_DRAWN}", flush=True)
        for bucket in self.buckets:
            bucket.reload_masters()
