"""Routed experts as a level builds them: stock's in BF16, or with --fp8-experts the engine's, one MLP an expert.

    rows (R, h), sorted by expert ──split──► x_e (m_e, h) ──pad──► fc1, activation x probability, fc2 ──cut──► (R, h)

With --moe-grouped-gemm the rows stay together (grouped_experts.py), in each pass in which that computes the same: all
experts are in FP8 and trained, with delayed scales, and neither observers nor hooks nor adapters sit at a single one.

An expert's two weights are owned like any linear's, in a set of their own (engine/weight_groups.py): the ranks of
expert data parallelism have the same ones, and the other ranks have other experts.

**Padding.** The weight gradient dW_e = dy^T x sums over the rows, and an FP8 GEMM needs a multiple of 16 of them. Rows
of zeros are added to it, with the probability zero, and cut off the result: they add zero to dW_e and to the amax.
An expert without a token gets padding alone, in BF16 one row. So each expert takes a gradient in each micro-batch, this
one exactly zero, and its bucket goes out on all ranks at the same place of the backward pass.

With --fp8-dispatch the rows come in FP8 (dispatch.py), if the pass may be grouped as far as all ranks know.

One after the other, the host waits for the number of tokens of each expert, as in stock.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.experts import SequentialMLP

from ..engine.bank import Bank
from ..flags.numeric_checks import GEMM_MULTIPLE
from .grouped_experts import box_on, experts_together
from .linear import hooked

type Banks = tuple[Bank, Bank]  # of fc1 and of fc2


class ExpertRowLinear(RowParallelLinear):
    """Stock's, for experts: Megatron adds an expert's bias in place, which autograd forbids to what a function of its
    own has returned as it came, without tensor and expert parallelism."""

    def forward(self, input_):
        output, bias = super().forward(input_)
        return output if bias is None or self.explicit_expert_comm else output.clone(), bias


class Fp8Experts(SequentialMLP):
    """Stock's experts with the engine's linears; see the top of the file."""

    def __init__(self, num_local_experts: int, config, **kwargs):
        super().__init__(num_local_experts, config, **kwargs)
        first = self.ep_group.rank() * num_local_experts
        for number, expert in enumerate(self.local_experts, first):
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.owned.belong_to_expert(number)
        self._linears = [(expert.linear_fc1, expert.linear_fc2) for expert in self.local_experts]
        self._banks: Banks | None = None
        if self.local_experts[0].linear_fc1.owned.config.draws_grouped:
            fc1, fc2 = zip(*self._linears, strict=True)
            self._banks = Bank([linear.owned for linear in fc1]), Bank([linear.owned for linear in fc2])

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """(rows (R, h), the number of each local expert's, probabilities (R,)) -> (rows (R, h), None)."""
        rows, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            rows, probs = (probs.unsqueeze(-1) * rows).to(rows.dtype), torch.ones_like(probs)
        if self._banks and rows.shape[0] and (box_on(rows) is not None or self._together()):
            fc1, fc2 = self._banks
            counts = tokens_per_expert
            if self.num_local_experts == 1:
                counts = torch.full((1,), rows.shape[0], device=counts.device)
            return experts_together(self.local_experts[0], fc1, fc2, rows, counts, probs, self.training), None
        counts = [rows.shape[0]] if self.num_local_experts == 1 else tokens_per_expert.tolist()
        in_fp8 = [any(linear.owned.fp8 for linear in pair) for pair in self._linears]
        each = zip(self.local_experts, in_fp8, rows.split(counts), probs.split(counts), strict=True)
        return torch.cat([_padded(*one) for one in each]), None

    @property
    def grouped(self) -> bool:
        """Whether they may run together."""
        return self._banks is not None

    def may_get_codes(self) -> Banks | None:
        """(fc1's bank, fc2's) if rows may be sent in FP8 in the pass that begins: the same on all ranks that have
        experts of the layer, which `check_dispatch` has seen to (dispatch.py). Else None."""
        return self._banks if self._ready() and all(bank.scaled for bank in self._banks or ()) else None

    def takes_tickets(self) -> bool:
        """Whether a ticket may stand for the rows of the pass that begins, if there are any.

        It asks all experts' weights and modules, of which a rank may have hundreds; so it is asked once a pass.
        """
        return self._together() and not hooked(self)

    def _ready(self) -> bool:
        return self._banks is not None and all(bank.ready for bank in self._banks)

    def _together(self) -> bool:
        """Whether the pass that begins may be grouped; see the top of the file."""
        return self._ready() and all(
            expert.linear_fc1 is fc1 and expert.linear_fc2 is fc2 and not hooked(fc1) and not hooked(fc2)
            for expert, (fc1, fc2) in zip(self.local_experts, self._linears, strict=True)
        )


def _padded(expert, in_fp8: bool, x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """One expert's result (m, h) for x (m, h) with the probabilities (m,). in_fp8: whether a GEMM of it is."""
    multiple, count = GEMM_MULTIPLE if in_fp8 else 1, x.shape[0]
    missing = max(-count % multiple, multiple if count == 0 else 0)
    if missing:
        x, probs = F.pad(x, (0, 0, 0, missing)), F.pad(probs, (0, missing))
    y, _ = expert(x, probs)
    return y[:count]


def drawn_as_grouped(num_local_experts: int, config, build=SequentialMLP, **kwargs) -> SequentialMLP:
    """Experts, which `build` makes, whose weights start as those of --moe-grouped-gemm.

    There the first linears of all experts are drawn before the second ones, and here expert by expert.
    --use-cpu-initialization is left alone: the weights start as those of a run without --moe-grouped-gemm.
    """
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    experts = build(num_local_experts, config, **kwargs)
    if config.perform_initialization and not config.use_cpu_initialization:
        tracker.set_states(before)
        for name, draw in ("linear_fc1", config.init_method), ("linear_fc2", config.output_layer_init_method):
            for expert in experts.local_experts:
                with tracker.fork(get_expert_parallel_rng_tracker_name()):
                    draw(getattr(expert, name).weight.data)
    return experts
