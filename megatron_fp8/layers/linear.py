"""Megatron's tensor-parallel linears, their product exchanged for ours and their weight owned by the engine.

    stock's forward ──► _forward_impl ──► product ──► Fp8Product (linear_fp8.py) or Bf16Product (linear_bf16.py)
                                                         │ the weight, casts, gradients: OwnedWeight (engine/)

Everything else stays the stock class's: initialisation, bias, tensor and sequence parallelism around the product, state
dict and sharding.

The input may arrive in FP8: its producer plans the call, casts as the linear would, and sends both in a parcel that the
input carries (parcel.py). Norm and linear are one module here, as Transformer Engine's, and do so. If the input carries
no parcel, the linear plans and casts by itself.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch.nn.modules.module import _has_any_global_hook

from ..engine.frozen import refuse_replaced
from ..engine.owned_weight import OwnedWeight
from ..errors import UserError
from ..flags.config import Fp8Config
from ..numerics.blocks import BLOCK
from .linear_bf16 import Bf16Product
from .linear_fp8 import Fp8Product
from .main_grad import let_add
from .norm import Norm, NormCast
from .parcel import Call, Calls, Parcel, arriving, carry


def hooked(module: torch.nn.Module) -> bool:
    """Whether hooks may read or change what comes in or goes out: then all of it is in BF16, and in memory.

    Megatron's own, which wait for weights, do not look.
    """
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or _has_any_global_hook():
        return True
    for hook in module._forward_pre_hooks.values():
        if not getattr(hook, "__module__", "").startswith("megatron.core."):
            return True
    return False


def product(
    x: torch.Tensor,
    anchor: torch.Tensor,
    parcel: Parcel,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias (+ residual, in FP8) (..., N): the call that the parcel's plan describes is made.

    x (..., K): BF16, or the ticket of what the parcel has in FP8. y carries the parcel if its gradient may be posted to
    it: the gradient of a bias is summed from dy as it is, that of a residual is dy, and dy of a sum over the ranks is
    every rank's.
    """
    call = parcel.call
    if call.wgrad:
        call.weight.await_gradient()
    visit = anchor if call.wgrad and not x.requires_grad else None
    if not call.fp8:
        assert residual is None  # stock's kernel adds bias and residual in one
        y = Bf16Product.apply(x, visit, call)
        return y if bias is None else y + bias
    y = Fp8Product.apply(x, visit, parcel, bias, residual)
    if call.takes_dy and bias is None and residual is None:
        carry(y, parcel)
    return y


class _OwnedLinear:
    """What our two linears add to stock's: the weight is `owned`, and the product ours."""

    weight: torch.nn.Parameter
    tp_group: torch.distributed.ProcessGroup
    sequence_parallel: bool
    explicit_expert_comm: bool
    training: bool
    owned: OwnedWeight

    def _take_over(self, config: Fp8Config) -> None:
        n, k = self.weight.shape
        if (config.gemm == "fp8" and (n % 16 or k % 16)) or n * k % BLOCK:
            needs = "multiples of 16" if config.gemm == "fp8" else f"a multiple of {BLOCK} elements in all"
            raise UserError(
                f"--fp8-level {config.level} --fp8-gemm {config.gemm}: a linear of {n} x {k} elements on each tensor-"
                f"parallel rank needs {needs}: change --hidden-size, --ffn-hidden-size or --tensor-model-parallel-size"
            )
        self.owned = OwnedWeight(self.weight, config)
        self._calls = Calls(self.owned)
        self._anchor = torch.zeros(0, requires_grad=True)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Values, not codes: what E4M3 holds of a weight means nothing without its scale.

        keep_vars: asks for parameters themselves, as sharded_state_dict does, a wrapper's too.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.owned.export() if keep_vars else self.owned.dense().detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        values = state_dict.get(f"{prefix}weight")
        if isinstance(values, torch.Tensor) and values.dtype.itemsize == 1:
            raise UserError(
                f"{prefix}weight: {str(values.dtype).removeprefix('torch.')} codes without their scale; load values in "
                "BF16 or FP32 (state_dict() of a model at a level gives BF16)"
            )
        if self.owned.stored is not None and values is not None and values.shape == self.weight.shape:
            self.owned.load(values)
            state_dict = {**state_dict, f"{prefix}weight": self.weight.data}  # which it is copied from, to itself
        super()._load_from_state_dict(state_dict, prefix, *args)

    def plan(self) -> Call:
        """How a forward pass that began now would be computed."""
        alone = self.explicit_expert_comm or self.tp_group.size() == 1  # the layer gathers, or there is no need
        sequence_parallel = self.sequence_parallel and not alone
        if isinstance(self, ColumnParallelLinear):
            sum_dx, sum_y = self.allreduce_dgrad and not alone, False
        else:
            sum_dx, sum_y = False, not alone
        return self._calls.plan(self.tp_group, sequence_parallel, sum_dx, self.training, sum_y)

    def _forward_impl(
        self, input, weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, residual=None, **stock
    ):
        if stock.get("gtp_remat_size", 1) > 1 or stock.get("grad_output_buffer") is not None:
            raise UserError(
                "a level knows neither Megatron's generalized tensor parallelism nor deferred weight gradients: switch "
                "both off in the script, or use --fp8-level O0"
            )
        if weight is not self.owned.param:
            refuse_replaced(self.owned.config.level, self.owned.name)
        parcel = arriving(input) or Parcel(self.plan())
        call = parcel.call
        assert call.weight is self.owned
        stock_has = allreduce_dgrad, sequence_parallel
        assert (bool(call.sum_dx) and not call.scatter, call.gather is not None) == stock_has
        return product(input, self._anchor, parcel, bias, residual)


class Fp8ColumnParallelLinear(_OwnedLinear, ColumnParallelLinear):
    """Stock ColumnParallelLinear with FP8 GEMMs; W (N/tp, K)."""

    def __init__(self, *args, fp8_config: Fp8Config, **kwargs):
        super().__init__(*args, **kwargs)
        self._take_over(fp8_config)
        if self.tp_group.size() == 1:  # spares an autograd function that sums a gradient over one rank
            self.disable_grad_reduce = True


class Fp8RowParallelLinear(_OwnedLinear, RowParallelLinear):
    """Stock RowParallelLinear with FP8 GEMMs; W (N, K/tp).  The product sums over the ranks, which stock does after it.

    The bias that it returns to be added later is a view, not the parameter itself.  Megatron recomputes an MLP
    (--recompute-modules mlp) in an autograd function, which returns that bias too: of a parameter, a leaf, it would
    become the origin, so that its backward pass would call itself without end.  Stock's linears do, and hang.

    take_residual: gives what the next result, with its bias, is added to, or None (residual.py).
    """

    take_residual: Callable[[], torch.Tensor | None] | None = None

    def __init__(self, *args, fp8_config: Fp8Config, **kwargs):
        super().__init__(*args, **kwargs)
        self._take_over(fp8_config)

    def forward(self, input_):
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        residual = None if self.take_residual is None else self.take_residual()
        if residual is not None:
            return self._forward_impl(input_, self.weight, self.bias, residual=residual), None
        output, bias = self._forward_impl(input_, self.weight), self.bias  # summed over the ranks
        if bias is None or self.skip_bias_add:
            return output, None if bias is None else bias.view_as(bias)
        return output + bias, None


class Fp8NormColumnParallelLinear(Fp8ColumnParallelLinear):
    """Norm, then column-parallel linear, with the parameter names of Transformer Engine's fused module:
    `layer_norm_weight`, `layer_norm_bias`, `weight`, `bias`.  Checkpoints of the TE spec therefore match.

    The norm's output goes to the linear in FP8 if the linear takes it so: nothing keeps it in BF16.

    return_layernorm_output: as Transformer Engine's: the result is ((y, the norm's output), bias). An adapter reads it
    beside W, so it is made once, in BF16.
    """

    return_layernorm_output = False

    def __init__(self, input_size, output_size, *, config, fp8_config: Fp8Config, **kwargs):
        super().__init__(input_size, output_size, config=config, fp8_config=fp8_config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
        self._norm = norm.kind
        if config.gradient_accumulation_fusion:
            for parameter in norm.parameters():
                let_add(parameter)

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Make the norm of x (..., K) ahead of the forward pass: (what that is to be given, x for its other reader).

        (None, x) if the norm's result would not be in FP8: the forward pass makes it then.
        """
        call = self.plan()
        if not call.takes_x:
            return None, x
        # Megatron's hooks, by which a module waits for its weights, the norm's too (--overlap-param-gather).
        for wait in self._forward_pre_hooks.values():
            wait(self, (x,))
        return self._cast_norm(call, x)

    def _cast_norm(self, call: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return NormCast.apply(Parcel(call), x, self.layer_norm_weight, self.layer_norm_bias, self._norm)

    def forward(self, input_, *args, **kwargs):
        if self.return_layernorm_output:
            normed = self._norm(input_, self.layer_norm_weight, self.layer_norm_bias)
            y, bias = super().forward(normed, *args, **kwargs)
            return (y, normed), bias
        if arriving(input_) is None:
            call = self.plan()
            if call.takes_x:
                input_, _ = self._cast_norm(call, input_)
            else:
                input_ = self._norm(input_, self.layer_norm_weight, self.layer_norm_bias)
        return super().forward(input_, *args, **kwargs)


def ask_for_its_norm(wrapper: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Torch's hook of a module that becomes a part of another: if a wrapper of Megatron Bridge's adapters takes one
    that holds its norm, it returns the norm's output too. Bridge asks only Transformer Engine's class for that."""
    if isinstance(module, Fp8NormColumnParallelLinear) and hasattr(wrapper, "base_linear_forward"):
        module.return_layernorm_output = True
