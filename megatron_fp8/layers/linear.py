"""The FP8 linear: y = x W^T with all three GEMMs in FP8, its weight owned by the plugin's engine.

Notation: x (M, K) activations, W (N, K) weight, y (M, N), dy (M, N).  q(.) is a cast to FP8 with one
scale for the tensor, so that t ~ q(t) * scale_inv(t).  Hopper's FP8 tensor cores want both operands
"K-major" (the summed index contiguous), so each GEMM below is written as  a (m, k) times b (n, k)^T:

    forward   y  = q(x)    q(W)^T        E4M3 x E4M3, fast accumulation, BF16 out
    dgrad     dx = q(dy)   q(W^T)^T      E5M2 x E4M3, full accumulation, BF16 out
    wgrad     dW = q(dy^T) q(x^T)^T      E5M2 x E4M3, full accumulation, FP32 or BF16 out, to the engine

x and dy are read once: one kernel writes q(t) and its transpose.  What waits for the backward is q(x^T)
(one byte an element, half of what BF16 saves) and the scale *tensor* that it was made with: a
later micro-batch, or the next step's scale, cannot change what this one captured.

W is quantised once a step; stored in E4M3 (O3) it is taken as it is.  W^T is made when dgrad needs it, in one scratch
buffer that all layers share; `--keep-fp8-transpose-cache` keeps one a layer instead (a byte a weight for a pass a
micro-batch).

Under sequence parallelism each tensor-parallel rank has a part of x's rows, which is gathered for the forward and again
for wgrad.  With `--fp8-tp-gather fp8` (O3) the cast comes first and the payload is gathered, half the bytes; what waits
for the backward is then the rank's own rows of q(x).  The values are those of casting after the gather, bit for bit:
all ranks cast with one scale, delayed scaling's, which they agree on anyway, or else one that they agree on here.

To stock Megatron W is frozen (`requires_grad=False`): its DDP, gradient buffers and optimizer pass it by.
Two consequences.  The weight gradient goes straight to the engine, which knows how it is stored (`Fp8Weight.grad`).
And autograd must be told to visit us even when x needs no gradient (the first layer after a frozen
embedding): every call takes an empty `anchor` tensor that requires one.

Source: FP8-LM (arXiv 2310.18313) section 2 for the formats; the plain BF16 path follows Megatron's
LinearWithGradAccumulationAndAsyncCommunication.
"""

import dataclasses
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from .. import ops
from ..errors import UserError
from ..flags.config import Fp8Config
from ..flags.emulate import OPERANDS, linear_name, matches
from ..numerics.blocks import BLOCK
from ..numerics.noise import noise_seed
from ..numerics.scaled import ScaledTensor
from ..numerics.scaling import DelayedScaling, compute_scale, power_of_two_scale
from .norm import Norm

INPUT, GRAD = 0, 1  # a linear's two slots in the delayed-scaling state
_scratch: dict[torch.device, torch.Tensor] = {}  # where W^T is made, for all layers


class Fp8Weight:
    """What the plugin keeps for one linear: where its gradient goes, quantised copy, scaling slots.

    Attributes:
        param: (N, K) BF16 or E4M3, frozen to stock Megatron.
        storage: "bf16" or "fp8", what the engine is to make of param.
        stored: of an E4M3 param, with its scale; None until the engine has made it.
        load: of an E4M3 param, sets it to values (N, K) of any float type.
        on_use: called before the weight is used, while it may still be on its way from the other ranks; or None.
        identity, rank, step: what tells the weight from others; of data parallelism; the number of the update, from 1.
        forwards: of this step, those that keep nothing for a backward pass, and those that do.
        grad: what takes its gradients, with `add(wgrad)` (engine/gradients.py); None until an engine is attached.
        pending: forward passes whose backward pass has not come yet.
        on_grad: called with this weight after each gradient.
        watch: looks at this step's casts (`cast`) and gradients (`add`), see monitor/collect.py; None on most steps.
        probe: looks at this step's GEMMs (`forward`, `backward`), see monitor/probe.py; None on most steps.
        fp8: False where the GEMMs stay in BF16 (`--fp8-gemm bf16`, `--first-last-layers-bf16`, `--fp8-bf16-layers`),
            or are there for a while (`--fp8-on-spike bf16-fallback`); it changes between steps only.
        path, layer_number: where it sits in the model, for checkpoints and statistics.
        scaling, slots: delayed-scaling state and this linear's (input, grad) slots; None for tensorwise.
    """

    def __init__(self, param: torch.nn.Parameter, config: Fp8Config):
        param.requires_grad_(False)
        self.param = param
        self.config = config
        self.fp8 = config.gemm == "fp8"
        self.storage = config.weight
        self.emulate = config.emulate
        self.identity: tuple[int, ...] = ()
        self.rank = 0
        self.step = 1
        self.forwards = [0, 0]
        self.stored: ScaledTensor | None = None
        self.load: Callable[[torch.Tensor], None] = lambda values: None
        self.on_use: Callable[[], None] | None = None
        self.grad: Any = None
        self.pending = 0
        self.on_grad: Callable[[Fp8Weight], None] = lambda weight: None
        self.watch: Any = None
        self.probe: Any = None
        self.scaling: DelayedScaling | None = None
        self.slots: tuple[int, int] = (0, 0)
        self.path, self.layer_number = "", 0
        self._quantized: ScaledTensor | None = None
        self._transposed: torch.Tensor | None = None
        self._version = -1  # of param, when it was quantised
        self._in_model_state: Callable[[], torch.Tensor] = lambda: param

    def invalidate(self) -> None:
        """Quantise and transpose again at the next use: the weight has changed."""
        self._version = -1
        self._transposed = None

    def arrive(self) -> None:
        """Have the weight here; before every use."""
        if self.on_use is not None:
            self.on_use()

    def dense(self) -> torch.Tensor:
        """The weight (N, K) in BF16: the parameter, or of E4M3 a copy, exactly."""
        self.arrive()
        return self.param if self.stored is None else self.stored.dequantize(torch.bfloat16)

    def emulated(self, operand: str, x: torch.Tensor, count: int = 0) -> torch.Tensor:
        """x as the GEMMs read it: rounded as --fp8-emulate has it, in the count-th micro-batch of the step."""
        how = self.emulate and self.emulate.for_operand(self.path, self.layer_number, operand, self.step)
        if not how:
            return x
        noisy = how.rounding == "stochastic"
        rank = 0 if operand == "weight" else self.rank  # the weight is one, and rounded alike, on all of them
        seed = noise_seed(*self.identity, rank, self.step, OPERANDS.index(operand), count) if noisy else None
        return ops.emulate(x.detach(), how, seed)

    def quantized(self) -> ScaledTensor:
        """The weight in E4M3: as it is stored, or quantised once and kept until the weight changes."""
        self.arrive()
        if self.stored is not None:
            return self.stored
        if self._version != self.param._version:
            self._quantized = self._transposed = None  # freed before their successors are allocated
            fmt, weight = self.config.forward_format, self.param.detach()
            # Validation without an optimizer (--skip-train) meets E4M3 weights in BF16: a power of two changes no bit.
            scaled_to = power_of_two_scale if self.storage == "fp8" else compute_scale
            scale = scaled_to(ops.amax(weight), fmt, margin=self.config.margin)
            self._quantized = ScaledTensor(ops.quantize(weight, fmt, scale), scale.reciprocal())
            self._version = self.param._version
        return self._quantized

    def transposed(self, payload: torch.Tensor) -> torch.Tensor:
        """(K, N) transpose of the (N, K) payload, valid until the next call on the same stream."""
        if self.config.keep_transpose_cache:
            if self._transposed is None:
                self._transposed = ops.transpose(payload)
            return self._transposed
        n, k = payload.shape
        scratch = _scratch.get(payload.device)
        if scratch is None or scratch.numel() < n * k:
            scratch = _scratch[payload.device] = torch.empty(
                n * k, dtype=torch.uint8, device=payload.device
            )
        out = scratch[: n * k].view(payload.dtype).view(k, n)
        return ops.transpose(payload, out=out)

    def quantize(self, x: torch.Tensor, role: int, fmt, *, transpose: bool, training: bool, group=None):
        """x (M, K) -> (payload, payload transposed or None, scale, scale_inv), scaled by the recipe.

        group: the ranks that must use one scale, or None.
        """
        scaling, slot = self.scaling, self.slots[role]
        if scaling is not None and scaling.warm:
            scale, scale_inv = scaling.slot_scale(slot), scaling.scale_inv[slot]
            out = ops.quantize(
                x, fmt, scale, transpose=transpose, amax_out=scaling.amax[slot] if training else None
            )
        else:
            amax = ops.amax(x)
            if group is not None:
                amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop NaN, differently on each rank
                torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
            if scaling is not None and training:
                scaling.record(slot, amax)
            scale = compute_scale(amax, fmt, margin=self.config.margin)
            scale_inv = scale.reciprocal()
            out = ops.quantize(x, fmt, scale, transpose=transpose)
        payload, payload_t = out if transpose else (out, None)
        if self.watch is not None and training:
            self.watch.cast(self, role, x, payload, scale_inv)
        return payload, payload_t, scale, scale_inv

    def follow(self, role: int, x: torch.Tensor) -> None:
        """Keep the delayed scale up to date of what a linear would cast that is out of FP8 for a while."""
        if self.scaling is not None:
            self.scaling.record(self.slots[role], ops.amax(x))

    def export(self, sharded: Any) -> Any:
        """The weight's entry in a sharded state dict (a ShardedTensor of param), as stock has it: in BF16."""
        self.arrive()
        if self.stored is None:
            return sharded
        copy = self.stored.dequantize(torch.bfloat16).cpu()
        self._in_model_state = weakref.ref(copy)
        return dataclasses.replace(sharded, data=copy, dtype=copy.dtype)

    def in_model_state(self) -> torch.Tensor:
        """What stands for the weight in the model's sharded state dict that was made last."""
        return self._in_model_state()

    def cached_tensors(self) -> list[torch.Tensor]:
        """The quantised copy, and its transpose if that is kept."""
        kept = [self._quantized.payload] if self._quantized is not None else []
        return kept + ([self._transposed] if self._transposed is not None else [])

    def add_grad(self, wgrad: Callable[..., torch.Tensor]) -> None:
        """Hand over the gradient of one backward pass: wgrad(out=None, accumulate=False, dtype=None) computes it."""
        if self.grad is None:
            raise RuntimeError("an FP8 linear ran a backward pass before the optimizer was built")
        if self.watch is None:
            self.grad.add(wgrad)
        else:
            self.watch.add(self, wgrad)
        self.pending -= 1
        self.on_grad(self)


class _Linear(torch.autograd.Function):
    """y = x W^T (see the top of the file); `anchor` only makes autograd come here."""

    @staticmethod
    def forward(ctx, x, anchor, weight: Fp8Weight, gather, allreduce_dgrad, group, training, needs_backward):
        ctx.weight, ctx.gather, ctx.allreduce_dgrad, ctx.group = weight, gather, allreduce_dgrad, group
        ctx.training = training
        weight.pending += needs_backward
        ctx.gather_fp8 = gather and weight.fp8 and weight.config.tp_gather == "fp8"
        total = _all_gather(x, group) if gather and not ctx.gather_fp8 else x
        flat = total.reshape(-1, total.shape[-1])
        if not weight.fp8:
            # A forward pass that is computed again has the noise of the first: micro-batches come in one order.
            ctx.count = weight.forwards[needs_backward]
            weight.forwards[needs_backward] += 1
            if training:
                weight.follow(INPUT, flat)
            flat = weight.emulated("activation", flat, ctx.count)
            w = weight.emulated("weight", weight.dense())
            y = flat @ w.t()
            ctx.save_for_backward(x if gather else flat)
        else:
            cfg = weight.config
            w = weight.quantized()
            # Under sequence parallelism the local shard waits and is gathered again, as stock does;
            # with --no-fp8-wgrad the backward wants x itself.
            keep_fp8 = needs_backward and cfg.wgrad
            payload, payload_t, scale, scale_inv = weight.quantize(
                flat,
                INPUT,
                cfg.forward_format,
                transpose=keep_fp8 and not gather,
                training=training,
                group=group if ctx.gather_fp8 else None,
            )
            kept = x
            if keep_fp8 and not gather:
                kept = payload_t
            elif keep_fp8 and ctx.gather_fp8:
                kept = payload
            if ctx.gather_fp8:
                payload = _all_gather(payload, group)
            y = ops.gemm(payload, w.payload, scale_inv, w.scale_inv, out_dtype=x.dtype, fast_accum=True)
            ctx.w = w
            ctx.save_for_backward(kept, scale, scale_inv)
        if weight.probe is not None and needs_backward:
            ctx.exact = x
            read = ScaledTensor(payload.view(-1, payload.shape[-1]), scale_inv) if weight.fp8 else flat
            weight.probe.forward(weight, _gathered(ctx, x), read, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        weight = ctx.weight
        flat = dy.reshape(-1, dy.shape[-1])
        if weight.fp8:
            dx, wgrad = _fp8_backward(ctx, weight, flat)
        else:
            dx, wgrad = _bf16_backward(ctx, weight, flat)

        handle = None
        if dx is not None:
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
            if ctx.allreduce_dgrad:
                handle = torch.distributed.all_reduce(dx, group=ctx.group, async_op=True)
            elif ctx.gather:
                full, dx = dx, dx.new_empty((dx.shape[0] // ctx.group.size(), *dx.shape[1:]))
                handle = torch.distributed.reduce_scatter_tensor(dx, full, group=ctx.group, async_op=True)
        weight.add_grad(wgrad)  # hides the collective
        if handle is not None:
            handle.wait()
        return dx, None, None, None, None, None, None, None


def _fp8_backward(ctx, weight: Fp8Weight, dy):
    cfg, w = weight.config, ctx.w
    saved, x_scale, x_scale_inv = ctx.saved_tensors
    q, q_t, _, dy_scale_inv = weight.quantize(
        dy, GRAD, cfg.grad_format, transpose=cfg.wgrad, training=ctx.training
    )
    dx = None
    if ctx.needs_input_grad[0]:
        dx = ops.gemm(q, weight.transposed(w.payload), dy_scale_inv, w.scale_inv, out_dtype=dy.dtype)
    if not cfg.wgrad:
        x = _gathered(ctx, saved)
        if weight.probe is not None:
            read = ScaledTensor(q, dy_scale_inv), None if dx is None else w
            weight.probe.backward(weight, x, dy, read, (dy, x))
        return dx, _bf16_wgrad(dy, x)

    if ctx.gather_fp8:
        x_t = ops.transpose(_all_gather(saved, ctx.group))
    elif ctx.gather:  # gather again and quantise with the scale that the forward captured
        x = _gathered(ctx, saved)
        x_t = ops.quantize(x, cfg.forward_format, x_scale, transpose=True)[1]
    else:
        x_t = saved
    if weight.probe is not None:
        read = ScaledTensor(q, dy_scale_inv), None if dx is None else w
        read_t = ScaledTensor(q_t.t(), dy_scale_inv), ScaledTensor(x_t.t(), x_scale_inv)
        weight.probe.backward(weight, _gathered(ctx, ctx.exact), dy, read, read_t)

    def wgrad(out=None, accumulate=False, dtype=None):
        return ops.gemm(q_t, x_t, dy_scale_inv, x_scale_inv, out_dtype=dtype, out=out, accumulate=accumulate)

    return dx, wgrad


def _bf16_backward(ctx, weight: Fp8Weight, dy):
    if ctx.training:
        weight.follow(GRAD, dy)
    exact, dy = dy, weight.emulated("gradient", dy, ctx.count)
    w = weight.emulated("weight", weight.dense()) if ctx.needs_input_grad[0] else None
    dx = None if w is None else dy @ w
    x = _gathered(ctx, ctx.saved_tensors[0])
    if ctx.gather:
        x = weight.emulated("activation", x, ctx.count)
    if weight.probe is not None:
        weight.probe.backward(weight, _gathered(ctx, ctx.exact), exact, (dy, w), (dy, x))
    return dx, _bf16_wgrad(dy, x)


def _bf16_wgrad(dy, x):
    def wgrad(out=None, accumulate=False, dtype=None):
        product = dy.t() @ x
        if out is None:
            return product.to(dtype)
        return out.add_(product) if accumulate else out.copy_(product)

    return wgrad


def _gathered(ctx, x):
    x = _all_gather(x, ctx.group) if ctx.gather else x
    return x.reshape(-1, x.shape[-1])


def _all_gather(x, group):
    """(s/tp, ...) on each rank -> (s, ...)."""
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # As bytes: gloo has no FP8 types.
    torch.distributed.all_gather_into_tensor(out.view(torch.uint8), x.contiguous().view(torch.uint8), group=group)
    return out


class _Fp8LinearMixin:
    """Replaces the matrix product of a stock tensor-parallel linear and takes over its weight.

    Everything else stays the stock class's: initialisation, bias, tensor and sequence parallelism around
    the product, state dict and sharding.
    """

    weight: torch.nn.Parameter

    def _take_over(self, config: Fp8Config) -> None:
        n, k = self.weight.shape
        if (config.gemm == "fp8" and (n % 16 or k % 16)) or n * k % BLOCK:
            needs = "multiples of 16" if config.gemm == "fp8" else f"a multiple of {BLOCK} elements in all"
            raise UserError(
                f"--fp8-level {config.level} --fp8-gemm {config.gemm}: a linear of {n} x {k} elements on each tensor-"
                f"parallel rank needs {needs}: change --hidden-size, --ffn-hidden-size or --tensor-model-parallel-size"
            )
        self.fp8_weight = Fp8Weight(self.weight, config)
        self._anchor = torch.zeros(0, requires_grad=True)

    def sharded_state_dict(self, prefix="", *args, **kwargs):
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        state[f"{prefix}weight"] = self.fp8_weight.export(state[f"{prefix}weight"])
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        values = state_dict.get(f"{prefix}weight")
        if self.fp8_weight.stored is not None and values is not None and values.shape == self.weight.shape:
            self.fp8_weight.load(values)
            state_dict = {**state_dict, f"{prefix}weight": self.weight.data}  # which it is copied from, to itself
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _forward_impl(self, input, weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, **stock):
        if stock.get("gtp_remat_size", 1) > 1 or stock.get("grad_output_buffer") is not None:
            raise UserError("generalized tensor parallelism and deferred weight gradients need --fp8-level O0")
        y = _Linear.apply(
            input,
            self._anchor,
            self.fp8_weight,
            sequence_parallel,
            allreduce_dgrad,
            stock["tp_group"],
            self.training,
            torch.is_grad_enabled(),
        )
        return y if bias is None else y + bias


class Fp8ColumnParallelLinear(_Fp8LinearMixin, ColumnParallelLinear):
    """Stock ColumnParallelLinear with FP8 GEMMs; W (N/tp, K)."""

    def __init__(self, *args, fp8_config: Fp8Config, **kwargs):
        super().__init__(*args, **kwargs)
        self._take_over(fp8_config)


class Fp8RowParallelLinear(_Fp8LinearMixin, RowParallelLinear):
    """Stock RowParallelLinear with FP8 GEMMs; W (N, K/tp).

    The bias that it returns to be added later is a view, not the parameter itself.  Megatron recomputes an MLP
    (--recompute-modules mlp) in an autograd function, which returns that bias too: of a parameter, a leaf, it would
    become the origin, so that its backward pass would call itself without end.  Stock's linears do, and hang.
    """

    def __init__(self, *args, fp8_config: Fp8Config, **kwargs):
        super().__init__(*args, **kwargs)
        self._take_over(fp8_config)

    def forward(self, input_):
        output, bias = super().forward(input_)
        return output, None if bias is None else bias.view_as(bias)


class Fp8NormColumnParallelLinear(Fp8ColumnParallelLinear):
    """Norm, then column-parallel linear, with the parameter names of Transformer Engine's fused module:
    `layer_norm_weight`, `layer_norm_bias`, `weight`, `bias`.  Checkpoints of the TE spec therefore match."""

    def __init__(self, input_size, output_size, *, config, fp8_config: Fp8Config, **kwargs):
        super().__init__(input_size, output_size, config=config, fp8_config=fp8_config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
        self._norm = norm.function

    def forward(self, input_, *args, **kwargs):
        return super().forward(self._norm(input_, self.layer_norm_weight, self.layer_norm_bias), *args, **kwargs)


class ExpertRowLinear(RowParallelLinear):
    """Stock's, for experts: Megatron adds an expert's bias in place, which autograd forbids to what a function of its
    own has returned as it came, without tensor and expert parallelism."""

    def forward(self, input_):
        output, bias = super().forward(input_)
        return output if bias is None or self.explicit_expert_comm else output.clone(), bias


def keep_in_bf16(model, config: Fp8Config, num_layers: int) -> None:
    """Leave linears in BF16, their GEMMs and what is stored, and do not emulate them: those of the first and last
    layers (`--first-last-layers-bf16` and its two counts), and those whose names match `--fp8-bf16-layers`."""
    kept = [w for w in fp8_weights([model]) if matches(config.bf16_layers, linear_name(w.path, w.layer_number))]
    for layer in model.decoder.layers:  # multi-token-prediction layers are neither first nor last
        if not config.bf16_layers_start < layer.layer_number <= num_layers - config.bf16_layers_end:
            kept += fp8_weights([layer])
    for weight in kept:
        weight.fp8, weight.storage, weight.emulate = False, "bf16", None


def name_weights(chunks) -> None:
    """Give every weight its `path` in the model, the layer's number left out, and its `layer_number` from 1."""
    for chunk in chunks:
        layers = {n: m for n, m in chunk.named_modules() if isinstance(m, TransformerLayer)}
        for layer_path, layer in layers.items():
            block = re.sub(r"^(module\.)+", "", layer_path).rpartition(".")[0]
            for name, module in layer.named_modules():
                if isinstance(module, _Fp8LinearMixin):
                    module.fp8_weight.path = re.sub(r"\.\d+", "", f"{block}.{name}")
                    module.fp8_weight.layer_number = layer.layer_number


def readable_params(dumped: dict[str, dict[str, torch.Tensor]], chunks) -> dict[str, dict[str, torch.Tensor]]:
    """What --save-params-interval took of `chunks`, {"model_chunk0": {name: tensor}}, with E4M3 weights in BF16."""
    for i, chunk in enumerate(chunks):
        for name, module in unwrap_model(chunk).named_modules():
            if isinstance(module, _Fp8LinearMixin) and module.fp8_weight.stored is not None:
                dumped[f"model_chunk{i}"][f"{name}.weight"] = module.fp8_weight.dense().cpu()
    return dumped


def in_forward_order(weights: list[Fp8Weight]) -> list[Fp8Weight]:
    """Named weights of one chunk in the order of the forward pass: attention registers its output projection first."""
    blocks = {(w.path.rpartition(".")[0], w.layer_number): i for i, w in reversed(list(enumerate(weights)))}
    return sorted(
        weights, key=lambda w: (blocks[w.path.rpartition(".")[0], w.layer_number], w.path.endswith(".linear_proj"))
    )


def fp8_weights(modules) -> list[Fp8Weight]:
    """The weights of every FP8 linear inside the modules, in model order."""
    return [m.fp8_weight for root in modules for m in root.modules() if isinstance(m, _Fp8LinearMixin)]
