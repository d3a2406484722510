"""Parts of the engine for tests without a model: a set of weights over one group, gradients that are known."""

import torch

from megatron_fp8.engine.sets import WeightSet


def one_set(group) -> WeightSet:
    """All weights, everything over `group`."""
    return WeightSet("", lambda weight: True, group, group, group, group, 1.0, 0)


class Known:
    """In place of an ops.Product: `values`, in FP32, as a GEMM would hand them over."""

    def __init__(self, values: torch.Tensor):
        self.values = values

    def compute(self, dtype=torch.bfloat16, into=None, accumulate=False) -> torch.Tensor:
        if into is None:
            return self.values.to(dtype)
        product = self.values.to(into.dtype)
        return into.add_(product) if accumulate else into.copy_(product)
