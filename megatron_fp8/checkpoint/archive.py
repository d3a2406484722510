"""Builds the state dicts of the engine's optimizer and of the optimizer chain, and loads them.

state.py, compact.py and stock_state.py build the parts.
"""

import torch
from megatron.training.global_vars import get_args

from ..engine.chain import Fp8ChainedOptimizer
from ..engine.optimizer import EngineOptimizer
from ..flags.numeric_checks import largest_batch
from ..numerics.formats import Format
from .compact import load_compact_state, sharded_compact_state
from .state import (
    CONTENTS,
    load_engine_state,
    load_mu_state,
    load_scaling_state,
    load_weight_scales,
    sharded_engine_state,
    sharded_mu_state,
    sharded_scaling_state,
    sharded_weight_scales,
)
from .stock_state import adopt, ask_for_masters, step_of, take_schedule


class Archive:
    """Makes the state dicts of EngineOptimizer and Fp8ChainedOptimizer, in the form that the metadata names.

    grad_format: the format of activation gradients.
    """

    def __init__(self, grad_format: Format):
        self._grad_format = grad_format

    def engine_state(self, engine: EngineOptimizer, model: dict, is_loading: bool, metadata: dict | None) -> dict:
        """The engine's state dict, in the form for every layout and level, or in the compact form (state.py)."""
        found = (metadata or {}).get(CONTENTS)
        frozen = [weight for owned in engine.sets for weight in owned.frozen if weight.expert is not None]
        if found is None:  # a stock checkpoint: the same names, without our other entries
            return {"state": sharded_engine_state(engine.buckets, model, is_loading, frozen)}
        if found["compact"]:
            state: dict = {"state": sharded_compact_state(engine.buckets, any(owned.frozen for owned in engine.sets))}
        else:
            state = {"state": sharded_engine_state(engine.buckets, model, is_loading, frozen)}
        weights = [weight for owned in engine.sets for weight in owned.weights]
        # If no step was made since loading, the scales are still the earlier run's; leave `scaled_for` empty.
        warm = all(owned.scaling is None or owned.scaling.warm for owned in engine.sets)
        state["step"], state["scaled_for"] = engine.steps, self._scaled_for() if warm else ""
        # Save mu always, so that a later run may change to --fp8-grad-reduce shared. 0 means that there is no mu.
        mu = [owned.reduction.mu(len(owned.weights), engine.device) for owned in engine.sets]
        state["mu"] = sharded_mu_state(torch.cat(mu), weights)
        if found["weight_scale"]:
            state["weight_scale"] = sharded_weight_scales(engine.buckets, is_loading)
        if found["scaling"]:
            linears = [weight for owned in engine.sets for weight in owned.linears]
            state["scaling"] = sharded_scaling_state(linears, is_loading)
        if engine.watch is not None:
            state["watch"] = engine.watch.state_dict()
        return state

    def load_engine(self, engine: EngineOptimizer, state: dict) -> None:
        """Load what `engine_state` asked for."""
        if "weight_scale" in state:
            load_weight_scales(engine.buckets, state["weight_scale"])
        held = state.get("state", {})  # a rank without a linear of ours finds none
        load = load_compact_state if "compact" in held else load_engine_state
        load(engine.buckets, held)
        engine.weights_changed()  # each rank rounded the weights that it owns from their masters
        engine.steps = state["step"]
        same = state.get("scaled_for", self._scaled_for()) == self._scaled_for()
        for owned in engine.sets:
            if owned.reduction.adapts and same and "mu" in state:
                owned.reduction.load_mu(load_mu_state(owned.weights, state["mu"], engine.device))
            if owned.scaling is not None and "scaling" in state:
                load_scaling_state(owned.scaling, owned.linears, state["scaling"], warm=same and engine.steps > 0)
        if engine.watch is not None and "watch" in state:
            engine.watch.load_state_dict(state["watch"])

    def chain_state(self, chain: Fp8ChainedOptimizer, state: dict, metadata: dict | None) -> dict:
        """The state dict to load, in the form of the saved checkpoint. state: what the chain's parts ask for."""
        saved = metadata or {}
        ours = len(chain.chained_optimizers) - 1
        ask_for_masters({i: part for i, part in state.items() if i < ours or CONTENTS not in saved}, saved)
        return state

    def chain_parts(self, chain: Fp8ChainedOptimizer, state: dict) -> dict:
        """{index of a part of the chain: its loaded state}."""
        last = len(chain.chained_optimizers) - 1
        take_schedule(chain.chained_optimizers, state)
        stock, ours = [state[i] for i in range(last)], state.get(last, {})
        for part in (part for i, part in state.items() if isinstance(i, int)):  # ours may have had another index
            ours.update({key: part[key] for key in ("step", "scaled_for", "watch") if key in part})
        ours.setdefault("step", step_of(state))
        stock = [adopt(part, found, state) for part, found in zip(chain.chained_optimizers, stock, strict=False)]
        return dict(enumerate([*stock, ours]))

    def _scaled_for(self) -> str:
        """The gradients that the delayed scales and mu fit, as text: format, size, number of ranks that sum them.

        If a loading run's text differs, it starts new scales. A token's gradient is divided by the tokens of its rank:
        with twice the ranks, each has half of a step's tokens, and gradients are twice as large, for any micro-batch
        size. With --calculate-per-token-loss it is not divided. With --step-batch-size-schedule the largest step
        counts: a change of batch size within a run is no reason to scale anew.
        """
        args = get_args()
        ranks = args.data_parallel_size * args.context_parallel_size
        tokens = 1 if args.calculate_per_token_loss else largest_batch(args) * args.seq_length / ranks
        return f"{self._grad_format.name}, 1 / {tokens}, {args.data_parallel_size} ranks"
