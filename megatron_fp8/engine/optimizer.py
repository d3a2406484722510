"""Our part of Megatron's optimizer chain, and the chain.

Megatron trains with a ChainedOptimizer of parts that share one gradient norm, one clip and one step.  The
plugin appends `EngineOptimizer`: AdamW over the flat FP32 master shards of the weight engine.  To the
chain it looks like any part: parameters with `.grad`, so counting of zeros, weight decay, learning-rate rules and
schedules are stock code on our tensors.  The norm is stock's sum, taken with one read by the host; our part
clips by it inside its own step, stock's parts as ever.

One rule is added (`Fp8ChainedOptimizer`): a non-finite norm skips the step, on every rank, with nothing
changed.  The norm is the same number everywhere (it is all-reduced) and the host has it already, so this
costs no further synchronisation.  NaN and infinity reach it from any rank: no cast of ours hides one.
"""

import dataclasses
import math

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.utils import get_model_config

from ..comm.reduce import sent_bytes
from ..layers.linear import Fp8Weight
from .checkpoint import (
    load_engine_state,
    load_scaling_state,
    sharded_engine_state,
    sharded_scaling_state,
)
from .weights import WeightGroup


class EngineOptimizer(MegatronOptimizer):
    """Adam(W) over the weight groups, in the form of one part of a ChainedOptimizer.

    Args:
        groups: the weight groups, one for each entry of `options`.
        options: Megatron's param-group options (weight-decay and learning-rate multipliers, ...).
        config: the OptimizerConfig of the whole chain.
        model_chunks: the wrapped model chunks.
        stats_group: process group over which gradient statistics are summed: that of the chain.
        scaling, amax_group: delayed-scaling state and the group that agrees on its amax; None, None.
        grad_scale: factor from the sum over data-parallel ranks to the gradient.
    """

    is_stub_optimizer = False

    def __init__(
        self, groups: list[WeightGroup], options, config, model_chunks, stats_group, scaling, amax_group, grad_scale
    ):
        adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        self.fused = groups[0].weight.is_cuda
        inner = adam(
            [{**o, "params": [g.master]} for g, o in zip(groups, options, strict=True)],
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=self.fused or None,
        )
        super().__init__(inner, config)
        self.max_norm, self.clip = config.clip_grad, 1.0
        self.groups, self.model_chunks = groups, model_chunks
        self.grad_stats_parallel_group = stats_group
        self.scaling, self.amax_group, self.grad_scale = scaling, amax_group, grad_scale
        self._one = torch.ones(1, device=groups[0].weight.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step."""
        sent_bytes.clear()
        for group in self.groups:
            group.begin_step()
        if self.scaling is not None:
            self.scaling.amax.zero_()  # of a step that was skipped

    def finalize_grads(self, num_tokens: torch.Tensor | None) -> None:
        """Reduce the gradients; `num_tokens` (global, on the device) divides them if given."""
        scale = self.grad_scale if num_tokens is None else 1.0 / num_tokens.clamp(min=1)
        for group in self.groups:
            group.reduce(scale)

    def prepare_grads(self) -> bool:
        return False  # non-finite gradients show in the norm, see the top of the file

    def set_norm(self, norm: float) -> None:
        """Clip this step's gradients to the norm `--clip-grad`, the global norm being `norm`."""
        self.clip = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm > 0.0 else 1.0

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        if self.fused:  # divides the gradients as it reads them
            self.optimizer.grad_scale = torch.full((), 1.0 / self.clip, device=self.groups[0].grad.device)
        elif self.clip < 1.0:
            torch._foreach_mul_([group.master.grad for group in self.groups], self.clip)
        self.optimizer.step()
        for group in self.groups:
            group.publish()
        if self.scaling is not None:
            self.scaling.update(self.amax_group)
        return True

    def step(self):
        raise RuntimeError("EngineOptimizer is stepped by the chain it is part of")

    def _weights(self) -> list[Fp8Weight]:
        return [weight for group in self.groups for weight in group.weights]

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata=None) -> dict:
        """Optimizer state in a form that every parallel layout can load (see checkpoint.py)."""
        state: dict = {
            "state": sharded_engine_state(self.groups, self.optimizer, model_sharded_state_dict, is_loading)
        }
        state["step"] = int(self.optimizer.state[self.groups[0].master]["step"])
        if self.scaling is not None:
            config = get_model_config(self.model_chunks[0])
            state["scaling"] = sharded_scaling_state(self.scaling, self._weights(), config)
            state["scaling_warm"] = self.scaling.warm
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        load_engine_state(self.groups, self.optimizer, state_dict["state"])
        for group in self.groups:
            self.optimizer.state[group.master]["step"].fill_(state_dict["step"])
        if self.scaling is not None:
            load_scaling_state(
                self.scaling, self._weights(), state_dict["scaling"], state_dict.get("scaling_warm", False)
            )

    def state_dict(self):
        raise ValueError("--ckpt-format torch cannot hold FP8 optimizer state: use --ckpt-format torch_dist")

    def get_loss_scale(self) -> torch.Tensor:
        return self._one

    def reload_model_params(self, state_dict=None) -> None:
        for group in self.groups:
            group.reload_master()


class Fp8ChainedOptimizer(ChainedOptimizer):
    """Megatron's chain, with our part last, that skips a step whose gradient norm is not finite.

    `after_first_step` is called once, when all state is allocated.
    """

    def __init__(self, stock: list[MegatronOptimizer], engine: EngineOptimizer):
        super().__init__([*stock, engine])
        self.engine = engine
        # Stock's clip would be two more passes over our gradients; EngineOptimizer clips as it steps.
        engine.config = dataclasses.replace(engine.config, clip_grad=0.0)
        self.after_first_step = lambda: None
        self._norm = 0.0

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, **kwargs):
        if is_loading:
            for part in self.chained_optimizers:
                _allocate_state(part.optimizer)
        return super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(state_dict)
        step = self.engine.optimizer.state[self.engine.groups[0].master]["step"]
        for part in self.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.Adam):
                # Stock's DistributedOptimizer loses the step of torch's Adam, and shares one tensor among all.
                for state in part.optimizer.state.values():
                    state["step"] = step.clone()

    def get_grad_norm(self) -> float:
        """Stock's global L2 norm, asking the host once.

        Without Transformer Engine or apex, stock's own asks once a parameter.
        """
        if self.grads_states_parallel_group_is_shared():
            grads = [g for part in self.chained_optimizers for g in part.get_grads_for_grad_norm()]
            square = torch.stack(torch._foreach_norm(grads)).square().sum().view(1)
            torch.distributed.all_reduce(square, group=self.get_grad_stats_parallel_group())
            self._norm = square.item() ** 0.5
        else:
            self._norm = float(super().get_grad_norm())
        self.engine.set_norm(self._norm)
        return self._norm

    def step_with_ready_grads(self) -> bool:
        if not math.isfinite(self._norm):
            return False
        success = super().step_with_ready_grads()
        self.after_first_step()
        self.after_first_step = lambda: None
        return success


def _allocate_state(adam) -> None:
    """Create the state of one of torch's Adams before its first step, to load into.

    Stock's DistributedOptimizer asserts that it is there: megatron-core 0.19.2 by itself cannot resume with
    torch's AdamW, which it uses where neither Transformer Engine nor apex is installed.
    """
    if not isinstance(adam, torch.optim.Adam):  # AdamW is one too; TE's FusedAdam is not
        return
    for param in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[param]:
            adam.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
