"""A stand-in for Transformer Engine in plain torch: stock Megatron's own TE layer spec can be built on any machine.

`install()`, before Megatron is imported, puts a module `transformer_engine` in place.  Megatron's side is the real one:
its spec functions, and the wrappers that turn its configuration into TE's arguments (core/extensions).  What is stood
in for is what those wrap: linears, norms and attention as TE documents them, without FP8 or fused kernels, with the
names, shapes and marks of TE's parameters.  tests/gpu/test_architecture_te.py compares with the real one.
"""

import contextlib
import importlib.machinery
import math
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

VERSION = "2.10.0"  # below 2.19, from which on Megatron imports TE's own kernels


def install() -> None:
    """Make `import transformer_engine` find the stand-in."""
    contents = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {"DelayedScaling": _Recipe, "Format": types.SimpleNamespace(E4M3=0, HYBRID=1)},
        "pytorch": {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "LayerNorm": LayerNorm,
            "RMSNorm": RMSNorm,
            "DotProductAttention": DotProductAttention,
            "GroupedLinear": GroupedLinear,
        },
        "pytorch.fp8": {
            "FP8GlobalStateManager": _NoFp8,
            "fp8_autocast": _nothing,
            "fp8_model_init": _nothing,
        },
        "pytorch.distributed": {
            "CudaRNGStatesTracker": _RngTracker,
            "activation_recompute_forward": _nothing,
            "is_fp8_activation_recompute_enabled": lambda: False,
            "in_fp8_activation_recompute_phase": lambda: False,
            "checkpoint": _checkpoint,
        },
        "pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
        ),
        "pytorch.ops": {"SwiGLU": _Swiglu, "GEGLU": _Geglu, "GELU": _Gelu, "ReLU": nn.ReLU},
        "pytorch.tensor": {"QuantizedTensor": _Quantized},
        "pytorch.module": {},
        "pytorch.module.base": {"get_dummy_wgrad": None, "TransformerEngineBaseModule": _Base},
    }
    for name, attributes in contents.items():
        full = ".".join(filter(None, ("transformer_engine", name)))
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[full] = module
        parent, _, own = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


class _Base(nn.Module):
    def backward_dw(self) -> None:
        pass

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # what TE keeps of FP8: nothing

    def set_extra_state(self, state) -> None:
        pass


def _parameter(*shape: int, value: float | None = None, dtype=None, device=None) -> Parameter:
    make = torch.empty(*shape, dtype=dtype, device=device)
    return Parameter(make if value is None else make.fill_(value))


def _normed(x, kind: str, weight, bias, eps: float, zero_centered: bool):
    if zero_centered:  # 1 + weight would be rounded in BF16
        x, dtype = x.float(), x.dtype
        return _normed(x, kind, 1 + weight.float(), bias.float() if bias is not None else None, eps, False).to(dtype)
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class LayerNorm(_Base):
    kind = "LayerNorm"

    def __init__(self, normalized_shape, eps, sequence_parallel, zero_centered_gamma, params_dtype, device):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _parameter(normalized_shape, value=1.0 - zero_centered_gamma, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = _parameter(normalized_shape, value=0.0, dtype=params_dtype, device=device)
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, x):
        return _normed(x, self.kind, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(LayerNorm):
    kind = "RMSNorm"


class Linear(_Base):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        sequence_parallel,
        tp_group,
        tp_size,
        get_rng_state_tracker,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        device,
        rng_tracker_name=None,
        **_,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        rows, columns = out_features, in_features
        if parallel_mode == "column":
            rows //= tp_size
        if parallel_mode == "row":
            columns //= tp_size
        self.weight = _parameter(rows, columns, dtype=params_dtype, device=device)
        self.bias = _parameter(rows, value=0.0, dtype=params_dtype, device=device) if bias else None
        with torch.no_grad():
            if get_rng_state_tracker is None:
                init_method(self.weight)
            else:
                with get_rng_state_tracker().fork(*filter(None, [rng_tracker_name])):
                    init_method(self.weight)
        if parallel_mode is not None:
            _mark(self.weight, 1 if parallel_mode == "row" else 0)
            if bias and parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif bias:
                _mark(self.bias, 0)

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column" and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif self.parallel_mode == "column" and self.tp_size > 1:
            x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        y = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        elif self.parallel_mode == "row" and self.tp_size > 1:
            y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        if self.use_bias and not self.return_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y


def _mark(parameter: Parameter, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, zero_centered_gamma, **kwargs):
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        like = {"dtype": kwargs["params_dtype"], "device": kwargs["device"]}
        self.layer_norm_weight = _parameter(in_features, value=1.0 - zero_centered_gamma, **like)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = _parameter(in_features, value=0.0, **like)
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        norm = self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        return super().forward(_normed(x, *norm))


class GroupedLinear(_Base):
    """Linears one for each expert, `weight0`, `weight1`...; tensor parallelism 1 only."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        get_rng_state_tracker,
        rng_tracker_name,
        init_method,
        bias,
        return_bias,
        params_dtype,
        device,
        **_,
    ):
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fp8 = self.fp8_calibration = False  # which Megatron reads when it saves
        self.fp8_meta = {"fp8_checkpoint": False}
        for i in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype, device=device)
            with torch.no_grad(), get_rng_state_tracker().fork(rng_tracker_name):
                init_method(weight)
            setattr(self, f"weight{i}", weight)
            if bias:
                setattr(self, f"bias{i}", _parameter(out_features, value=0.0, dtype=params_dtype, device=device))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        pass

    def forward(self, x, m_splits, is_first_microbatch=None):
        parts = x.split([int(rows) for rows in m_splits])
        out = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        if biases and not self.return_bias:
            out = [part + bias for part, bias in zip(out, biases, strict=True)]
        return (torch.cat(out), biases) if self.return_bias else torch.cat(out)


class _Gathered(torch.autograd.Function):
    """(s, ...) of every rank, one after the other.  (torch's own mixes up gradients of other strides over gloo.)"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.float().contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].bfloat16(), None


class DotProductAttention(_Base):
    """softmax(scale Q K^T + bias, masked, with a sink) V; (s, b, heads, channels).

    As TE's own attention in plain torch: products have the operands' precision, the softmax is FP32's, and dropout
    draws from the tensor-parallel ranks' own generator.  Context-parallel ranks give each other all keys.
    """

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        *,
        num_gqa_groups,
        attention_dropout,
        attn_mask_type,
        sequence_parallel,
        tp_size,
        get_rng_state_tracker,
        layer_number,
        softmax_scale=None,
        softmax_type="vanilla",
        window_size=None,
        cp_group=None,
        **_,
    ):
        super().__init__()
        self.cp_group = cp_group
        keys = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale = softmax_scale or 1.0 / math.sqrt(keys)
        self.heads, self.groups = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.attn_mask_type, self.window_size, self.dropout = attn_mask_type, window_size, attention_dropout
        forks = not sequence_parallel and get_rng_state_tracker is not None
        self._drawing = (lambda: get_rng_state_tracker().fork()) if forks else contextlib.nullcontext
        self.softmax_offset = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(self.heads)
        elif softmax_type == "learnable":
            self.softmax_offset = _parameter(self.heads, value=0.0)

    def forward(self, q, k, v, attention_mask=None, attn_mask_type=None, core_attention_bias=None, **_):
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=2) for t in (k, v))
        length, batch = q.shape[:2]
        places, of_keys = torch.arange(length), torch.arange(len(k))  # of tokens in their sequence
        if self.cp_group is not None:
            ranks, rank = self.cp_group.size(), self.cp_group.rank()
            k, v = (_Gathered.apply(t, self.cp_group) for t in (k, v))
            chunks = torch.arange(ranks * length).view(2 * ranks, -1)
            of_keys = torch.stack([torch.stack([chunks[i], chunks[-1 - i]]) for i in range(ranks)]).view(ranks, -1)
            places, of_keys = of_keys[rank], of_keys.flatten()
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in (q, k, v))  # (b * heads, s, channels)
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0.0, alpha=self.scale)
        scores = scores.unflatten(0, (batch, self.heads))
        if core_attention_bias is not None:
            scores = scores + core_attention_bias
        kind = attn_mask_type or self.attn_mask_type
        distance = places[:, None] - of_keys  # how far back a key lies
        masked = torch.zeros_like(distance, dtype=torch.bool)
        if kind == "causal":
            masked = masked | (distance < 0)
        elif kind != "no_mask":
            masked = attention_mask
        if self.window_size is not None:
            left, right = self.window_size
            masked = masked | (distance > left if left >= 0 else False) | (-distance > right if right >= 0 else False)
        scores = scores.float().masked_fill(masked, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        probabilities = probabilities.to(v.dtype)
        with self._drawing():
            probabilities = F.dropout(probabilities, self.dropout, self.training)
        y = torch.bmm(probabilities.flatten(0, 1), v)
        return y.unflatten(0, (batch, self.heads)).permute(2, 0, 1, 3).flatten(2)


class _Swiglu(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class _Geglu(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class _Gelu(nn.Module):
    def forward(self, x):
        return F.gelu(x, approximate="tanh")


class _Recipe:
    def __init__(self, **_):
        pass


class _NoFp8:
    is_fp8_enabled = staticmethod(lambda: False)


class _Quantized:
    """The class of TE's FP8 tensors: there are none."""


class _RngTracker:
    """States of the device's generator by name, with the interface of Megatron's own tracker."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states

    def add(self, name: str, seed: int) -> None:
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


@contextlib.contextmanager
def _nothing(*_, **__):
    yield


def _checkpoint(function, *args, distribute_saved_activations, get_rng_state_tracker, tp_group, **kwargs):
    return function(*args, **kwargs)  # the same result
