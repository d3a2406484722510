"""Megatron's optimizer chain with our part in it.

One rule is added: if the gradient norm is not finite, every rank skips the step and changes nothing.  The norm is the
same number on all ranks (it is all-reduced) and the host has it already, so this costs no further synchronisation.  A
NaN or an infinity of any rank reaches the norm: no cast of ours hides one.  `--fp8-on-spike skip` skips a spike in the
same way (monitor/watch.py).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from ..errors import PassingError, UserError
from ..flags.skips import MAX_SKIPPED
from ..ranks import gathered
from ..rebind import Hook, When
from .optimizer import EngineOptimizer

_DAMAGED = (
    "the last step wrote weights or moments that are not finite, although its gradients were: a state of the optimizer "
    "was damaged, in memory or in the checkpoint that it came from; it is not saved: go on from an earlier checkpoint"
)


_SET_STATES = Hook(
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    "_set_main_param_and_optimizer_states",
    *("engine.chain", "self model_param tensors", When("when the engine is built, over torch's Adam")),
    "Loads --dist-ckpt-optim-fully-reshardable, which has no step of each parameter; stock looks for one.",
    of_object=True,
)
_FULLY_RESHARDABLE = Hook(
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    "sharded_param_state_fully_reshardable",
    *("engine.chain", "self model_sharded_state_dict is_loading metadata", When("when the engine is built")),
    "Saves each parameter's own states, if a bucket before it ends in padding; stock saves what lies beside them.",
    of_object=True,
)
HOOKS = (_SET_STATES, _FULLY_RESHARDABLE)


class Fp8ChainedOptimizer(ChainedOptimizer):
    """Megatron's chain with our part last. It skips a step if the gradient norm is not finite.

    `before_first_line` is called once, in the first step, made or skipped, before Megatron logs it. `after_first_step`
    is called once, after the first step that is made, when all state is allocated.
    """

    def __init__(self, stock: list[MegatronOptimizer], engine: EngineOptimizer):
        super().__init__([*stock, engine])
        self.engine = engine
        for part in stock:
            _save_without_padding(part)
            _let_load_without_step(part)
            _step_in_one_kernel(part)
        # Stock's clip would be two more passes over our gradients; EngineOptimizer clips as it steps.
        engine.config = dataclasses.replace(engine.config, clip_grad=0.0)
        self.before_first_line: Callable[[], None] | None = None
        self.after_first_step: Callable[[], None] | None = None
        # Stock skips a step over this norm before it asks its parts. A rank that has no parameter would not skip.
        self._largest_norm = engine.config.grad_norm_skip_threshold
        if math.isfinite(self._largest_norm):
            for part in self.chained_optimizers:
                part.config = dataclasses.replace(part.config, grad_norm_skip_threshold=math.inf)
        self._norm, self._damaged = 0.0, False
        self.max_skipped, self._skipped = 0, 0  # in a row; 0: no limit
        self._zero = torch.zeros((), device=engine.device)
        self._loss_scale = torch.ones(())

    def get_loss_scale(self) -> torch.Tensor:
        """1, on the host. Stock's is on the GPU, and the host waits for it after every step."""
        return self._loss_scale

    def sharded_state_dict(self, model_sharded_state_dict, is_loading: bool = False, **kwargs):
        for part in self.chained_optimizers:  # also to save: all steps so far may have been skipped
            _allocate_state(part.optimizer)
        if not is_loading:
            return super().sharded_state_dict(model_sharded_state_dict, **kwargs)
        state = super().sharded_state_dict(model_sharded_state_dict, True, **kwargs)
        return self.engine.archive.chain_state(self, state, kwargs.get("metadata"))

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(self.engine.archive.chain_parts(self, state_dict))
        for part in self.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.Adam):
                # Stock's DistributedOptimizer loses the step of torch's Adam, and shares one tensor among all.
                for state in part.optimizer.state.values():
                    state["step"] = torch.full_like(state["step"], self.engine.steps)

    @torch.no_grad()
    def get_grad_norm(self, p: float = 2.0) -> float:
        """The global p-norm, p from 2 (stock's) to infinity; the host waits for the GPU once.

        Parts whose gradients are summed over one group (all parts, except experts without the distributed optimizer)
        are summed together. Without Transformer Engine or apex, stock waits once a parameter.
        """
        totals = []
        for group, sums in self._power_sums(p):
            total = torch.stack(sums)  # (parts, 2)
            # A maximum may drop a NaN, but no infinity.
            total = total.amax(0).nan_to_num(nan=math.inf, posinf=math.inf) if p == math.inf else total.sum(0)
            operation = torch.distributed.ReduceOp.MAX if p == math.inf else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(total, op=operation, group=group)
            totals.append(total)
        total = torch.stack(totals).amax(0) if p == math.inf else torch.stack(totals).sum(0)
        watch = self.engine.watch if p == 2.0 else None
        found, damage = total.tolist() if watch is None else watch.see(total)
        self._damaged = damage != 0.0
        self._norm = found if p == math.inf else found ** (1.0 / p)
        self.engine.set_norm(self._norm)
        return self._norm

    def _power_sums(self, p: float) -> list[tuple[Any, list[torch.Tensor]]]:
        """(a group, the tensors that are summed over it). Each tensor has 2 numbers, of one part of this rank: the sum
        of |g|^p over its gradients, or max |g| if p is infinite; and `damage` of what the last step wrote."""
        grads: dict[Any, list[torch.Tensor]] = {}
        for part in self.chained_optimizers:
            grads.setdefault(part.get_grad_stats_parallel_group(), []).extend(part.get_grads_for_grad_norm())
        sums: dict[Any, list[torch.Tensor]] = {}
        for group, found in grads.items():
            # None on a rank that has no parameter, or only duplicates of other ranks' stock parameters.
            norms = torch.stack([self._zero, *(torch._foreach_norm(found, p) if found else [])])
            total = norms.max() if p == math.inf else norms.pow(p).sum()
            sums[group] = [torch.stack([total, self._zero])]
        for owned in self.engine.sets:
            sums.setdefault(owned.of.norm, []).append(torch.stack([owned.power_sum(p), owned.damage()]))
        return list(sums.items())

    @torch.no_grad()
    def count_zeros(self) -> float:
        ours = 0
        for owned in self.engine.sets:
            zeros = owned.zeros()
            torch.distributed.all_reduce(zeros, group=owned.of.norm)
            ours += zeros.item()
        return super().count_zeros() + ours  # stock's count passes ours by: no master has its gradient yet

    def step_with_ready_grads(self) -> bool:
        if self._damaged:
            raise PassingError(_DAMAGED)
        if self.before_first_line is not None:
            self.before_first_line()
            self.before_first_line = None
        applied = self.engine.watch is None or self.engine.watch.judge()
        applied &= not self._norm > self._largest_norm
        success = applied and math.isfinite(self._norm) and super().step_with_ready_grads()
        if success and self.after_first_step is not None:
            self.engine.prepare_model_params_for_param_sync()  # so that all of the step's gathers are counted
            self.after_first_step()
            self.after_first_step = None
        for look in self.engine.events.end_step:
            look()
        self._skipped = 0 if success else self._skipped + 1
        if self._skipped == self.max_skipped > 0:
            raise UserError(
                f"{MAX_SKIPPED.name} {self.max_skipped}: as many steps in a row were skipped (gradient norm "
                f"{self._norm:g}), so the weights do not change; go on from the last checkpoint with a lower --lr or "
                "other data, or set the flag higher (0: no limit)"
            )
        return success

    @torch.no_grad()
    def refuse_damage(self) -> None:
        """Before a checkpoint is saved, all ranks together: raise PassingError if a weight is not finite."""
        damage = [owned.damage() for owned in self.engine.sets]
        stocks = [p.detach() for chunk in self.model_chunks for p in chunk.parameters() if p.requires_grad]
        norms = torch._foreach_norm(stocks, math.inf) if stocks else []
        found = torch.stack([self._zero, *damage, *(norm.float() * 0.0 for norm in norms)]).sum()
        if any(gathered(found.item() != 0.0)):
            raise PassingError(_DAMAGED)


class WaitsForWeights:
    """Wraps the two functions that take off and put back the hooks by which Megatron's modules wait for their weights
    (--overlap-param-gather), for an evaluation for example.

    There are no such hooks until a step is made. Stock does not expect that, because it aborts if a level would skip:
    an evaluation after a skipped first step ended with a KeyError.
    """

    def __init__(self) -> None:
        self._none = False

    def disable(self, stock: Callable) -> Callable:
        def disable_forward_pre_hook(model_chunks, *rest, **kwargs):
            self._none = not any(chunk.remove_forward_pre_hook_handles for chunk in model_chunks)
            if not self._none:
                stock(model_chunks, *rest, **kwargs)

        return disable_forward_pre_hook

    def enable(self, stock: Callable) -> Callable:
        def enable_forward_pre_hook(model_chunks):
            there, self._none = not self._none, False
            if there:
                stock(model_chunks)

        return enable_forward_pre_hook


def _allocate_state(adam) -> None:
    """Create the state of one of torch's Adams before its first step, so that a checkpoint can be loaded or saved.

    Stock's DistributedOptimizer asserts that the state is there. So megatron-core 0.19.2 alone cannot resume with
    torch's AdamW, which it uses if neither Transformer Engine nor apex is installed.
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


def _step_in_one_kernel(part: MegatronOptimizer) -> None:
    """Let torch's Adam, which steps stock's embeddings and norms, run in one pass on CUDA, as TE's and apex' FusedAdam.

    It is set at every step, because a checkpoint brings its own options and a step count on the host.
    """

    def fuse(adam, args, kwargs) -> None:
        for options in adam.param_groups:
            params = options["params"]
            if options["capturable"] or not all(p.is_cuda and p.is_floating_point() for p in params):
                continue
            options["fused"], options["foreach"] = True, False
            for param in params:
                state = adam.state.get(param)
                if state and not state["step"].is_cuda:
                    state["step"] = state["step"].to(param.device, torch.float32)

    if isinstance(getattr(part, "optimizer", None), torch.optim.Adam):
        part.optimizer.register_step_pre_hook(fuse)


def _save_without_padding(part: MegatronOptimizer) -> None:
    """Let a DistributedOptimizer save --dist-ckpt-optim-fully-reshardable if its buckets end in padding.

    megatron-core 0.19.2 gathers the buckets' states without their padding, and then looks for each parameter at its
    place with padding. Buckets are padded to a multiple of the data-parallel size: with 3 ranks nearly all are.
    """
    if not isinstance(part, DistributedOptimizer):
        return
    stock = part.sharded_param_state_fully_reshardable

    def sharded_param_state_fully_reshardable(*args, **kwargs):
        places = [buffer.param_index_map for buffer in part.buffers]
        try:
            for buffer in part.buffers:
                buffer.param_index_map = _places_without_padding(buffer)
            return stock(*args, **kwargs)
        finally:
            for buffer, found in zip(part.buffers, places, strict=True):
                buffer.param_index_map = found

    _FULLY_RESHARDABLE.on(part, sharded_param_state_fully_reshardable)


def refuse_padding_alone(parts: list[MegatronOptimizer]) -> None:
    """With --fp8-ckpt-compact, before the first step: raise UserError if stock could not save. Collective.

    megatron-core 0.19.2 asserts, at the first save in its form for one layout, that each rank's part of each bucket has
    a parameter. At a level its buckets are small, on many pipeline stages norms alone, and the last parts are padding.
    """
    stocks = [part for part in parts if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer]
    held = [held for part in stocks for ranges in part.gbuf_ranges for each in ranges.values() for held in each]
    if any(gathered(any(not bucket["param_map"] for bucket in held))):
        raise UserError(
            "--fp8-ckpt-compact: a data-parallel rank's part of a bucket of stock's own parameters is all padding, and "
            "Megatron cannot save it in its form for one layout; remove --fp8-ckpt-compact"
        )


def _places_without_padding(buffer) -> dict:
    """{parameter: (start, stop, number of its bucket)} in one of stock's buffers, as if no bucket ended in padding."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(itertools.accumulate(padding, initial=0))
    found = buffer.param_index_map.items()
    return {param: (start - before[i], stop - before[i], i) for param, (start, stop, i) in found}


def _let_load_without_step(part: MegatronOptimizer) -> None:
    """Let a DistributedOptimizer over torch's Adam load --dist-ckpt-optim-fully-reshardable.

    megatron-core 0.19.2 looks for a step of each parameter in it, and that form has none.
    """
    if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
        stock = part._set_main_param_and_optimizer_states
        _SET_STATES.on(part, lambda param, tensors: stock(param, {"step": None, **tensors}))
