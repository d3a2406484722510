"""LayerNorm and RMSNorm on torch's kernels, without Transformer Engine or apex, ready for sequence parallelism.

    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * g + b        over the last dimension
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * g

Under sequence parallelism each tensor-parallel rank sees its own tokens, so the gradients of g and b must be
summed over the tensor-parallel group.  Megatron's finalize_model_grads does it for every parameter that
is marked `sequence_parallel`; that mark is all that stock's torch norm lacks (it refuses instead).
`--apply-layernorm-1p` stores g - 1 (closer to zero, so weight decay pulls towards the identity).
"""

import functools

import torch
import torch.nn.functional as F

from ..errors import UserError


def _layer_norm(x, weight, bias, eps, zero_centered):
    if zero_centered:  # in FP32: a BF16 1 + g forgets a g below 2^-9
        return F.layer_norm(x.float(), weight.shape, 1 + weight.float(), bias.float(), eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _rms_norm(x, weight, bias, eps, zero_centered):
    if zero_centered:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm as `config.normalization` says; (..., hidden_size) in, the same out.

    Raises UserError for another normalization.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        kinds = {"LayerNorm": _layer_norm, "RMSNorm": _rms_norm}
        if config.normalization not in kinds:
            raise UserError(
                f"--normalization {config.normalization} is not available under an FP8 level: use LayerNorm or RMSNorm"
            )
        zero_centered = bool(config.layernorm_zero_centered_gamma)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(value: float) -> torch.nn.Parameter:
            p = torch.nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype, device=device))
            p.sequence_parallel = config.sequence_parallel
            return p

        self.weight = parameter(0.0 if zero_centered else 1.0)
        self.bias = parameter(0.0) if config.normalization == "LayerNorm" else None
        self.function = functools.partial(kinds[config.normalization], eps=eps, zero_centered=zero_centered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight, self.bias)
