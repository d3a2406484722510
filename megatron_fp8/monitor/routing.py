"""`--fp8-log-routing N`: how the routers of a mixture of experts spread tokens, with a level or without one.

    [fp8] iteration 24: router entropy 2.07888 nats; tokens by expert: entropy 1.903 of 2.0794 nats,
    load 0.00391 to 1.76

    router entropy      mean over tokens of H(p), p: a token's scores of all E experts, added up to 1; ln E for a router
                        that knows no difference, 0 for one that is sure
    load                tokens that an expert gets, over the mean of its layer's experts
    load entropy        H of the layer's tokens by expert; ln E if all have as many

H(p) = -sum_e p_e ln p_e. The scores are those of stock's load-balancing losses: a softmax of the logits, or
normalised sigmoids, before any bias of an expert. An expert gets the tokens that are left after capacity has dropped
some, or filled some up. The entropies are means over layers, the loads the least and the most of all layers' experts.

Counted over a step's micro-batches and all ranks with other tokens, on every N-th iteration. On these each router adds
E + 2 numbers to a sum on the device, and the host waits once, after the step. On the others nothing runs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.utils import is_last_rank

from ..metrics import record
from ..ranks import gathered
from .writers import current_iteration, say, write_scalars

GROUP = "fp8-routing"  # of the viewers


class Routing:
    """Counts the steps of a run. interval: iterations from one count to the next."""

    def __init__(self, interval: int):
        self._interval = interval
        # Of the step in progress, if it is counted, each router's (E + 2,) FP64: tokens by expert, the sum of H(p) over
        # tokens, and tokens.
        self._sums: dict[TopKRouter, torch.Tensor] | None = None

    def counted(self, stock: Callable) -> Callable:
        """TopKRouter.routing."""

        @functools.wraps(stock)
        def routing(router, logits, *args, **kwargs):
            probs, chosen = stock(router, logits, *args, **kwargs)
            # Without gradients it is an evaluation, or a pass that is computed again later.
            if self._sums is not None and router.training and torch.is_grad_enabled():
                sums = _sums(router, logits.detach(), chosen)
                self._sums[router] = self._sums[router] + sums if router in self._sums else sums
            return probs, chosen

        return routing

    def around(self, step: Callable[[], Any]) -> Any:
        """Run Megatron's train_step and return its result. Log its routing, if it is counted."""
        iteration = current_iteration()
        if iteration % self._interval:
            return step()
        self._sums = {}
        try:
            result = step()
        finally:
            sums, self._sums = self._sums, None
        log(_everywhere(sums), iteration)
        return result


@torch.no_grad()
def _sums(router: TopKRouter, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """One micro-batch's (E + 2,); logits: (..., E); chosen: (T, E) bool."""
    count, experts = chosen.shape
    _, scores = compute_routing_scores_for_aux_loss(logits.view(count, experts), router.topk, router.score_function)
    tokens = torch.full((1,), count, dtype=torch.float64, device=logits.device)
    return torch.cat([chosen.sum(0).double(), torch.special.entr(scores).sum().double()[None], tokens])


def _everywhere(sums: dict[TopKRouter, torch.Tensor]) -> dict[str, list[float]]:
    """{router's name: its sums over all ranks}, of all pipeline stages. Collective; the one wait for the device."""
    mine: dict[str, list[float]] = {}
    if sums:
        routers = sorted(sums, key=_name)
        together = torch.stack([sums[router] for router in routers])
        # Ranks of tensor parallelism may have the same tokens: all are counted as often, so no ratio changes.
        dist.all_reduce(together, group=routers[0].tp_dp_cp_group)
        mine = {_name(router): row for router, row in zip(routers, together.tolist(), strict=True)}
    stages = gathered(mine, parallel_state.get_pipeline_model_parallel_group())
    return {name: row for stage in stages for name, row in stage.items()}


def _name(router: TopKRouter) -> str:
    """The path of its layer's mixture in the whole model, layers numbered from 0."""
    block = "mtp" if router.is_mtp_layer else "decoder"
    return f"{block}.layers.{router.layer_number - 1}.mlp"


def log(sums: dict[str, list[float]], iteration: int) -> None:
    """Log a step on the rank that logs, write the model's numbers, and each expert's to the run's file.

    sums: {name: (E + 2) numbers, as in Routing}.
    """
    if not is_last_rank() or not sums:
        return
    router, load = [], []
    loads: dict[str, float] = {}
    for name, (*counts, entropy, tokens) in sums.items():
        total = sum(counts)
        router.append(entropy / tokens)
        load.append(-sum(n / total * math.log(n / total) for n in counts if n))
        loads |= {f"{name}.experts.{e}_load": n * len(counts) / total for e, n in enumerate(counts)}
    found = {
        "router_entropy": sum(router) / len(router),
        "load_entropy": sum(load) / len(load),
        "load_least": min(loads.values()),
        "load_most": max(loads.values()),
    }
    say(
        iteration,
        f"router entropy {found['router_entropy']:.6g} nats; tokens by expert: entropy {found['load_entropy']:.5g} of "
        f"{math.log(len(counts)):.5g} nats, load {found['load_least']:.3g} to {found['load_most']:.3g}",
    )
    write_scalars(found, iteration, GROUP)
    record(loads, iteration)
