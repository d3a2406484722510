"""Our part of Megatron's optimizer chain, and the chain.

Megatron trains with a ChainedOptimizer of parts that share one gradient norm, one clip and one step.  The
plugin appends `EngineOptimizer`: one fused pass of Adam(W) over the shards of the weight engine (ops/adam.py).  To the
chain it looks like any part: weight decay, learning-rate rules and schedules are stock code on our param groups.  Our
gradients never exist in FP32; the norm and the count of zeros are taken from the reduced buckets themselves
(comm/reduce.py), and the pass clips by the norm as it reads.

One rule is added (`Fp8ChainedOptimizer`): a non-finite norm skips the step, on every rank, with nothing
changed.  The norm is the same number everywhere (it is all-reduced) and the host has it already, so this
costs no further synchronisation.  NaN and infinity reach it from any rank: no cast of ours hides one.  In the same
way `--fp8-on-spike skip` skips a spike (monitor/watch.py).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.training.global_vars import get_args

from ..checkpoint.compact import load_compact_state, sharded_compact_state
from ..checkpoint.state import (
    CONTENTS,
    STATES,
    load_engine_state,
    load_mu_state,
    load_scaling_state,
    load_weight_scales,
    sharded_engine_state,
    sharded_mu_state,
    sharded_scaling_state,
    sharded_weight_scales,
)
from ..checkpoint.stock_state import adopt, ask_for_masters, step_of
from ..comm.shared import SharedScale
from ..comm.wire import sent_bytes
from ..errors import UserError
from ..layers.linear import Fp8Weight
from ..numerics.scaling import WeightScaling, adam_growth
from ..ops.adam import AdamHyper
from .gather import ChunkGather
from .overlap import ChunkReducer
from .weights import Bucket


class EngineOptimizer(MegatronOptimizer):
    """Adam(W) over the buckets, in the form of one part of a ChainedOptimizer.

    Args:
        reducers, gathers: of each model chunk.
        options: (Megatron's param-group options: weight-decay and learning-rate multipliers, ..., their buckets), at
            least one, some without a bucket.
        config: the OptimizerConfig of the whole chain.
        model_chunks: the wrapped model chunks.
        device: of the state.
        stats_group: process group over which gradient statistics are summed: that of the chain.
        scaling, amax_group: delayed-scaling state and the group that agrees on its amax; None, None.
        weight_scaling: the scales of E4M3 weights, else None.
        shared_scale: the state of `--fp8-grad-reduce shared`, else None.
        grad_scale: factor from the sum over data-parallel ranks to the gradient.
    """

    is_stub_optimizer = False

    def __init__(
        self,
        reducers: list[ChunkReducer],
        gathers: list[ChunkGather],
        options: list[tuple[dict, list[Bucket]]],
        config,
        model_chunks,
        device,
        stats_group,
        scaling,
        amax_group,
        weight_scaling: WeightScaling | None,
        shared_scale: SharedScale | None,
        grad_scale: float,
    ):
        self.reducers, self.gathers = reducers, gathers
        self.buckets = [bucket for reducer in reducers for bucket in reducer.buckets]
        # Holds the groups whose lr and weight_decay Megatron's scheduler writes; its parameters are empty.
        groups = [{**option, "params": [torch.nn.Parameter(torch.empty(0))]} for option, _ in options]
        inner = torch.optim.Optimizer(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._groups = list(zip(inner.param_groups, (buckets for _, buckets in options), strict=True))
        super().__init__(inner, config)
        self.max_norm, self.clip = config.clip_grad, 1.0
        self.model_chunks = model_chunks
        self.grad_stats_parallel_group = stats_group
        self.scaling, self.amax_group = scaling, amax_group
        self.weight_scaling, self.shared_scale = weight_scaling, shared_scale
        self.device = device
        self._one = torch.ones(1, device=device)
        self._mean = torch.full((), grad_scale, device=device)
        self.grad_scale = self._mean  # 0-d FP32: from the reduced sum to the gradient
        self.steps = 0  # updates made; skipped steps do not count
        self.update = 1  # the number of the update that is under way, or was made last
        self.monitor: Any = None  # of a run that logs statistics (monitor/collect.py): told of begin and end of a step
        self.watch: Any = None  # of a run with --fp8-on-spike (monitor/watch.py): judges each step before it is made
        self.step_bucket: Callable[[Bucket, AdamHyper, torch.Tensor], None] = Bucket.step  # see monitor/update_norm.py

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step."""
        sent_bytes.clear()
        self.update = self.steps + 1
        for reducer in self.reducers:
            reducer.begin_step(self.steps)
        if self.scaling is not None:
            self.scaling.amax.zero_()  # of a step that was skipped
        if self.shared_scale is not None:
            self.shared_scale.forget_step()
        if self.monitor is not None:
            self.monitor.begin()
        if self.watch is not None:
            self.watch.begin()

    def finalize_grads(self, num_tokens: torch.Tensor | None) -> None:
        """Reduce the gradients; `num_tokens` (global, on the device) divides them if given."""
        for reducer in self.reducers:
            reducer.launch_rest()
        for reducer in self.reducers:
            reducer.land()
        self.grad_scale = self._mean if num_tokens is None else 1.0 / num_tokens.clamp(min=1).float()

    def prepare_grads(self) -> bool:
        return False  # non-finite gradients show in the norm, see the top of the file

    def set_norm(self, norm: float) -> None:
        """Clip this step's gradients to the norm `--clip-grad`, the global norm being `norm`."""
        self.clip = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm > 0.0 else 1.0

    def power_sum(self, p: float) -> torch.Tensor:
        """Sum of |g|^p over this rank's gradients, or max |g| for p infinite, as 0-d FP32."""
        if not self.buckets:
            return self._one.new_zeros(())
        if p == 2.0:
            return torch.stack([b.reduced.square_sum() for b in self.buckets]).sum() * self.grad_scale**2
        norms = torch.stack([torch.linalg.vector_norm(b.reduced.look(), p) for b in self.buckets]) * self.grad_scale
        return norms.max() if p == math.inf else norms.pow(p).sum()

    def zeros(self) -> torch.Tensor:
        """How many of this rank's gradients are zero, 0-d int64."""
        counts = [self._one.new_zeros((), dtype=torch.int64)]
        for bucket in self.buckets:
            gradient = bucket.reduced.look()
            counts += [(gradient[lo:hi] == 0).sum() for _, lo, hi in bucket.pieces()]
        return torch.stack(counts).sum()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        return []  # `power_sum` has them: they never exist in FP32 all at once

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        self._finish_gathers()  # of weights that no forward pass used
        self.steps += 1
        if self.weight_scaling is not None:
            lr = max(group["lr"] for group, buckets in self._groups if buckets)
            self.weight_scaling.begin_step(adam_growth(lr, *self._betas, self.steps))
        scale = self.grad_scale * self.clip
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
                self.step_bucket(bucket, hyper, scale)
        for gather in self.gathers:
            gather.begin()
        if self.weight_scaling is not None:
            self.weight_scaling.end_step()
        if self.scaling is not None:
            self.scaling.update(self.amax_group)
        if self.shared_scale is not None:
            self.shared_scale.end_step(self.steps)
        return True

    @property
    def _betas(self) -> tuple[float, float]:
        return self.config.adam_beta1, self.config.adam_beta2

    def step(self):
        raise RuntimeError("EngineOptimizer is stepped by the chain it is part of")

    def _weights(self) -> list[Fp8Weight]:
        return [weight for bucket in self.buckets for weight in bucket.weights]

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, metadata=None) -> dict:
        """Optimizer state, in the form for every layout and level or in the compact one (checkpoint.py)."""
        found = (metadata or {}).get(CONTENTS)
        self._finish_gathers()
        if found is None:  # stock Megatron's: the same names, and nothing else of ours
            return {"state": sharded_engine_state(self.buckets, model_sharded_state_dict, is_loading)}
        if found["compact"]:
            state: dict = {"state": sharded_compact_state(self.buckets)}
        else:
            state = {"state": sharded_engine_state(self.buckets, model_sharded_state_dict, is_loading)}
        state["step"], state["gradient_share"] = self.steps, _gradient_share()
        # Always, so that a run may change to --fp8-grad-reduce shared: 0 is no mu.
        mu = self._one.new_zeros(len(self._weights())) if self.shared_scale is None else self.shared_scale.mu.clone()
        state["mu"] = sharded_mu_state(mu, self._weights())
        if found["weight_scale"]:
            state["weight_scale"] = sharded_weight_scales(self.buckets, is_loading)
        if found["scaling"]:
            state["scaling"] = sharded_scaling_state(self.scaling, self._weights(), is_loading)
        if self.watch is not None:
            state["watch"] = self.watch.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        if "weight_scale" in state_dict:
            load_weight_scales(self.buckets, state_dict["weight_scale"])
        if STATES[0] in state_dict["state"]:
            load_engine_state(self.buckets, state_dict["state"])
        else:
            load_compact_state(self.buckets, state_dict["state"])
        for gather in self.gathers:  # what the owners rounded from their masters
            gather.begin()
        self._finish_gathers()
        self.steps = state_dict["step"]
        if self.shared_scale is not None and "mu" in state_dict:
            mu = load_mu_state(self._weights(), state_dict["mu"], self.device)
            self.shared_scale.mu = torch.where(mu > 0, mu, self.shared_scale.mu)
        if self.scaling is not None and "scaling" in state_dict:
            same = state_dict.get("gradient_share", _gradient_share()) == _gradient_share()
            load_scaling_state(self.scaling, self._weights(), state_dict["scaling"], warm=same and self.steps > 0)
        if self.watch is not None and "watch" in state_dict:
            self.watch.load_state_dict(state_dict["watch"])

    def prepare_model_params_for_param_sync(self) -> None:
        """Have all weights: stock is about to read some (evaluation, checkpoints, hashes of replicas)."""
        self._finish_gathers()

    def _finish_gathers(self) -> None:
        for gather in self.gathers:
            gather.finish()

    def state_dict(self):
        raise UserError("--ckpt-format torch cannot hold FP8 optimizer state: use --ckpt-format torch_dist")

    def get_loss_scale(self) -> torch.Tensor:
        return self._one

    def reload_model_params(self, state_dict=None) -> None:
        for bucket in self.buckets:
            bucket.reload_masters()


def _gradient_share() -> float:
    """The share of a step's gradient that one micro-batch has: scales of gradients that are predicted go with it."""
    args = get_args()
    return args.micro_batch_size * args.data_parallel_size / args.global_batch_size


class Fp8ChainedOptimizer(ChainedOptimizer):
    """Megatron's chain, with our part last, that skips a step whose gradient norm is not finite.

    `after_first_step` is called once, when all state is allocated.
    """

    def __init__(self, stock: list[MegatronOptimizer], engine: EngineOptimizer):
        super().__init__([*stock, engine])
        self.engine = engine
        for part in stock:
            _let_load_without_step(part)
        # Stock's clip would be two more passes over our gradients; EngineOptimizer clips as it steps.
        engine.config = dataclasses.replace(engine.config, clip_grad=0.0)
        self.after_first_step: Callable[[], None] | None = None
        # Stock skips a step over this norm before it asks its parts, and a rank that has no parameter does not skip.
        self._largest_norm = engine.config.grad_norm_skip_threshold
        if math.isfinite(self._largest_norm):
            for part in self.chained_optimizers:
                part.config = dataclasses.replace(part.config, grad_norm_skip_threshold=math.inf)
        self._norm = 0.0
        self._zero = torch.zeros((), device=engine.device)

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, **kwargs):
        if not is_loading:
            return super().sharded_state_dict(model_sharded_state_dict, **kwargs)
        for part in self.chained_optimizers:
            _allocate_state(part.optimizer)
        state = super().sharded_state_dict(model_sharded_state_dict, True, **kwargs)
        saved = kwargs.get("metadata") or {}
        ours = len(self.chained_optimizers) - 1
        ask_for_masters({i: part for i, part in state.items() if i < ours or CONTENTS not in saved}, saved)
        return state

    def load_state_dict(self, state_dict) -> None:
        *stock, ours = (state_dict[i] for i in range(len(self.chained_optimizers)))
        for part in (part for i, part in state_dict.items() if isinstance(i, int)):  # it may have had another place
            ours.update({key: part[key] for key in ("step", "gradient_share", "watch") if key in part})
        ours.setdefault("step", step_of(state_dict))
        stock = [adopt(part, state, state_dict) for part, state in zip(self.chained_optimizers, stock, strict=False)]
        super().load_state_dict(dict(enumerate([*stock, ours])))
        for part in self.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.Adam):
                # Stock's DistributedOptimizer loses the step of torch's Adam, and shares one tensor among all.
                for state in part.optimizer.state.values():
                    state["step"] = torch.full_like(state["step"], self.engine.steps)

    @torch.no_grad()
    def get_grad_norm(self, p: float = 2.0) -> float:
        """The global p-norm, 2 as in stock, up to infinity; the host is asked once.

        Parts whose gradients are summed over one group (all of them, but for experts without the distributed
        optimizer) are summed together. Stock's own, without Transformer Engine or apex, asks once a parameter.
        """
        parts_of: dict[Any, list[MegatronOptimizer]] = {}
        for part in self.chained_optimizers:
            parts_of.setdefault(part.get_grad_stats_parallel_group(), []).append(part)
        totals = []
        for group, parts in parts_of.items():
            total = self._power_sum(parts, p)
            # A maximum may drop a NaN, but no infinity.
            operation = torch.distributed.ReduceOp.MAX if p == math.inf else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(total, op=operation, group=group)
            totals.append(total)
        total = torch.stack(totals).max() if p == math.inf else torch.stack(totals).sum()
        watch = self.engine.watch if p == 2.0 else None
        found = total.item() if watch is None else watch.see(total)
        self._norm = found if p == math.inf else found ** (1.0 / p)
        self.engine.set_norm(self._norm)
        return self._norm

    def _power_sum(self, parts: list[MegatronOptimizer], p: float) -> torch.Tensor:
        """Sum of |g|^p over this rank's gradients of some parts, or max |g| for p infinite, as 0-d FP32."""
        grads = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
        # None on a rank all of whose stock parameters are another's duplicates, or that has no parameter.
        norms = torch.stack([self._zero, *(torch._foreach_norm(grads, p) if grads else [])])
        ours = self.engine.power_sum(p) if self.engine in parts else self._zero
        if p == math.inf:
            return torch.maximum(norms.max(), ours).nan_to_num(nan=math.inf, posinf=math.inf)
        return norms.pow(p).sum() + ours

    @torch.no_grad()
    def count_zeros(self) -> float:
        zeros = self.engine.zeros()
        torch.distributed.all_reduce(zeros, group=self.engine.get_grad_stats_parallel_group())
        return super().count_zeros() + zeros.item()  # stock's count passes ours by: no master has its gradient yet

    def step_with_ready_grads(self) -> bool:
        applied = self.engine.watch is None or self.engine.watch.judge()
        applied &= not self._norm > self._largest_norm
        success = applied and math.isfinite(self._norm) and super().step_with_ready_grads()
        if success and self.after_first_step is not None:
            self.engine.prepare_model_params_for_param_sync()  # so that all of the step's gathers are counted
            self.after_first_step()
            self.after_first_step = None
        if self.engine.monitor is not None:
            self.engine.monitor.end()
        return success


def _allocate_state(adam) -> None:
    """Create the state of one of torch's Adams before its first step, to load into.

    Stock's DistributedOptimizer asserts that it is there: megatron-core 0.19.2 by itself cannot resume with
    torch's AdamW, which it uses where neither Transformer Engine nor apex is installed.
    """
    if not isinstance(adam, torch.optim.Adam):  # AdamW is one too; TE's FusedAdam is not
        return
    for options, param in ((group, p) for group in adam.param_groups for p in group["params"]):
        if not adam.state[param]:
            adam.state[param] = {
                "step": torch.zeros((), device=param.device if options["fused"] or options["capturable"] else "cpu"),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }


def _let_load_without_step(part: MegatronOptimizer) -> None:
    """Let a DistributedOptimizer over torch's Adam load --dist-ckpt-optim-fully-reshardable.

    megatron-core 0.19.2 looks there for a step of each parameter, which that form does not have.
    """
    if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
        stock = part._set_main_param_and_optimizer_states
        part._set_main_param_and_optimizer_states = lambda param, tensors: stock(param, {"step": None, **tensors})
