"""Stock's experts, which stay in BF16, as a level builds them."""

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.experts import SequentialMLP


class ExpertRowLinear(RowParallelLinear):
    """Stock's, for experts: Megatron adds an expert's bias in place, which autograd forbids to what a function of its
    own has returned as it came, without tensor and expert parallelism."""

    def forward(self, input_):
        output, bias = super().forward(input_)
        return output if bias is None or self.explicit_expert_comm else output.clone(), bias


def drawn_as_grouped(num_local_experts: int, config, **kwargs) -> SequentialMLP:
    """Experts whose weights start as those of --moe-grouped-gemm.

    There the first linears of all experts are drawn before the second ones, and here expert by expert.
    """
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    experts = SequentialMLP(num_local_experts, config, **kwargs)
    if config.perform_initialization and not config.use_cpu_initialization:
        tracker.set_states(before)
        for name, draw in ("linear_fc1", config.init_method), ("linear_fc2", config.output_layer_init_method):
            for expert in experts.local_experts:
                with tracker.fork(get_expert_parallel_rng_tracker_name()):
                    draw(getattr(expert, name).weight.data)
    return experts
