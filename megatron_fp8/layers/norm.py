"""LayerNorm and RMSNorm on torch's kernels, without Transformer Engine or apex, ready for sequence parallelism.

    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * g + b        over the last dimension
    RMSNorm    y = x / sqrt(mean(x^2) + eps) * g

Under sequence parallelism each tensor-parallel rank sees its own tokens, so the gradients of g and b must be
summed over the tensor-parallel group.  Megatron's finalize_model_grads does it for every parameter that
is marked `sequence_parallel`; that mark is all that stock's torch norm lacks (it refuses instead).
`--apply-layernorm-1p` stores g - 1 (closer to zero, so weight decay pulls towards the identity).
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import ops
from ..errors import UserError
from ..numerics.formats import E4M3
from ..ops import source
from ..ops.source import Payloads
from .function import Function
from .main_grad import added, adds
from .parcel import Parcel, Recipe


@dataclass(frozen=True)
class NormKind:
    """Which norm: RMSNorm or LayerNorm, its epsilon, and whether the gain is 1 + weight."""

    rms: bool
    eps: float
    zero_centered: bool

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (..., K) -> the same, on torch's kernels."""
        dtype = x.dtype
        if self.zero_centered:  # in FP32: a BF16 1 + g forgets a g below 2^-9
            x, weight, bias = x.float(), 1 + weight.float(), None if bias is None else bias.float()
        if self.rms:
            return F.rms_norm(x, weight.shape, weight, self.eps).to(dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps).to(dtype)


class Normed:
    """A norm's output as a Source; x (M, K). mean, rstd (M,): of its rows, once something was made; and so kept, if it
    is given, what ops.norm keeps."""

    def __init__(self, x, weight, bias: torch.Tensor | None, kind: NormKind, kept: torch.Tensor | None):
        self._x, self._weight, self._bias, self._kind, self._kept = x, weight, bias, kind, kept
        self.mean: torch.Tensor | None = None
        self.rstd: torch.Tensor | None = None

    def cast(self, fmt, scale, *, rows, columns, amax_out) -> Payloads:
        kind = self._kind
        payload, payload_t, self.mean, self.rstd = ops.norm_quantize(
            self._x, self._weight, self._bias, kind.eps, fmt, scale, rms=kind.rms, zero_centered=kind.zero_centered,
            rows=rows, columns=columns, amax_out=amax_out, kept=self._kept,
        )  # fmt: skip
        return payload, payload_t

    def values(self) -> torch.Tensor:
        kind = self._kind
        y, self.mean, self.rstd = ops.norm(
            self._x, self._weight, self._bias, kind.eps, rms=kind.rms, zero_centered=kind.zero_centered,
            kept=self._kept,
        )  # fmt: skip
        return y


def _again(kind: NormKind, fmt, scale: torch.Tensor, n, weight, bias, *, rows: bool, columns: bool) -> Payloads:
    """A norm's output in FP8 once more, of what was kept of it."""
    how = {"zero_centered": kind.zero_centered, "rows": rows, "columns": columns}
    return ops.norm_requantize(n, weight, bias, fmt, scale, **how)


class NormCast(Function):
    """A norm of x (..., K), made in FP8 for the linear that follows; and x, for its other reader (residual.py), whose
    gradient is added to the norm's in one kernel. With --fp8-activations it keeps the normalised x in FP8, of which the
    linear makes its columns too."""

    @staticmethod
    def forward(ctx, parcel: Parcel, x, weight, bias, kind: NormKind):
        flat = source.rows(x)
        kept = torch.empty_like(flat, dtype=E4M3.dtype) if parcel.call.recasts else None
        normed = Normed(flat, weight, bias, kind, kept)
        recipe = None if kept is None else Recipe(functools.partial(_again, kind), (kept, weight, bias))
        ticket = parcel.pack(normed, x, recipe)
        ctx.kind, ctx.shape, ctx.parameters = kind, x.shape, (weight, bias)
        if kept is None:
            ctx.save_for_backward(x, weight, normed.mean, normed.rstd)
        else:
            ctx.save_for_backward(kept, weight, None, normed.rstd)
        ctx.set_materialize_grads(False)
        return ticket, x

    @staticmethod
    def backward(ctx, dy, residual):
        if dy is None:  # what was made of the norm does not reach the loss
            return None, residual, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        kind, parameters = ctx.kind, [p for p in ctx.parameters if p is not None]
        alone = all(map(adds, parameters)) and all(ctx.needs_input_grad[2 : 2 + len(parameters)])
        dx, dweight, dbias = ops.norm_backward(
            source.rows(dy), source.rows(x), weight, mean, rstd, rms=kind.rms, zero_centered=kind.zero_centered,
            residual=None if residual is None else source.rows(residual),
            into=tuple(None if p is None else p.main_grad for p in ctx.parameters) if alone else None,
        )  # fmt: skip
        if alone:
            dweight, dbias = (None if p is None else added(p) for p in ctx.parameters)
        return None, dx.view(ctx.shape), dweight, dbias, None


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm as `config.normalization` says; (..., hidden_size) in, the same out.

    Raises UserError for another normalization.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise UserError(
                f"--normalization {config.normalization} is not available under an FP8 level: use LayerNorm or RMSNorm"
            )
        rms, zero_centered = config.normalization == "RMSNorm", bool(config.layernorm_zero_centered_gamma)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(value: float) -> torch.nn.Parameter:
            p = torch.nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype, device=device))
            p.sequence_parallel = config.sequence_parallel
            return p

        self.weight = parameter(0.0 if zero_centered else 1.0)
        self.bias = None if rms else parameter(0.0)
        self.kind = NormKind(rms, eps, zero_centered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kind(x, self.weight, self.bias)
