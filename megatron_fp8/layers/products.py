"""A linear's product y = x W^T with its two gradients, in FP8 or in BF16: two autograd functions.

Notation: x (M, K) activations, W (N, K) weight, y (M, N), dy (M, N).  q(.) is a cast to FP8 with one
scale for the tensor, so that t ~ q(t) * scale_inv(t).

    forward   y  = q(x)    q(W)^T        E4M3 x E4M3, fast accumulation, BF16 out
    dgrad     dx = q(dy)   q(W^T)^T      E5M2 x E4M3, full accumulation, BF16 out
    wgrad     dW = q(dy^T) q(x^T)^T      E5M2 x E4M3, full accumulation, to the weight's GradSink

x and dy are read once: one kernel writes q(t) and its transpose.  What waits for the backward is q(x^T)
(one byte an element, half of what BF16 saves) and the scale *tensor* that it was made with: a
later micro-batch, or the next step's scale, cannot change what this one captured.  In the same way how
the backward pass computes is decided in the forward, in a frozen `Call`: no flag that may have changed since is read.

Under sequence parallelism each tensor-parallel rank has a part of x's rows, which is gathered for the forward and again
for wgrad.  With `--fp8-tp-gather fp8` (O3) the cast comes first and the payload is gathered, half the bytes; what waits
for the backward is then the rank's own rows of q(x).  The values are those of casting after the gather, bit for bit:
all ranks cast with one scale, delayed scaling's, which they agree on anyway, or else one that they agree on here.

The weight is frozen to stock Megatron, so autograd must be told to visit us even when x needs no gradient (the first
layer after a frozen embedding): every call takes an empty `anchor` tensor that requires one.

x may also come in FP8 (`Fp8Activation`), cast by the module before as this linear would (`cast_input`), in the kernel
that makes it.  What autograd sees of it is a ticket: a tensor of x's shape and type without memory, which carries the
edge of the graph, and whose gradient is that of x.  In the same way dy may come in FP8 from the module after, which
made it (`post`): the cast lies in the call's mailbox, and autograd carries a ticket from one backward pass to the
other.

Source: FP8-LM (arXiv 2310.18313) section 2 for the formats; the plain BF16 path follows Megatron's
LinearWithGradAccumulationAndAsyncCommunication.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .. import ops
from ..comm import tensor
from ..engine.owned import GRAD, INPUT, OwnedWeight
from ..flags.emulate import OPERANDS
from ..numerics.emulation import EmulatedFormat
from ..numerics.noise import noise_seed
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Castable, Payloads

type Rounding = tuple[EmulatedFormat, tuple[int, int] | None]  # with a seed where it is stochastic


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a linear, as its forward and its backward pass go by it.

    Attributes:
        group: the tensor-parallel ranks.
        gather: how x comes from them under sequence parallelism: "bf16" or "fp8"; None: it is whole.
        sum_dx: whether dx is summed over them without sequence parallelism.
        training: whether what is cast counts for the scales.
        keep: whether a backward pass will come.
        fp8: whether the GEMMs are FP8's; wgrad_fp8: whether the weight gradient's is.
        rounding: of a BF16 call, how operands are rounded that are emulated.
        seen: whether someone looks at the GEMMs, so that x waits in BF16 too.
        mailbox: holds q(dy) between the backward pass that made it and this call's own.
    """

    weight: OwnedWeight
    group: torch.distributed.ProcessGroup
    gather: str | None
    sum_dx: bool
    training: bool
    keep: bool
    fp8: bool
    wgrad_fp8: bool
    rounding: dict[str, Rounding]
    seen: bool
    mailbox: "list[Posted]"

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x (s, ..., K), or a rank's part of it, as (M, K)."""
        x = tensor.gather(x, self.group) if self.gather else x
        return x.reshape(-1, x.shape[-1])

    def rounded(self, operand: str, x: torch.Tensor) -> torch.Tensor:
        """x as a BF16 GEMM reads it: rounded where it is emulated."""
        how = self.rounding.get(operand)
        return x if how is None else ops.emulate(x.detach(), *how)


def plan(weight: OwnedWeight, group, sequence_parallel: bool, sum_dx: bool, training: bool) -> Call:
    """Decide how a linear's next call is computed, and count it."""
    keep, fp8, config = torch.is_grad_enabled(), weight.fp8, weight.config
    weight.pending += keep
    gather = (config.tp_gather if fp8 else "bf16") if sequence_parallel else None
    rounding = {} if fp8 else _rounding(weight, keep)
    seen = keep and bool(weight.events.forward or weight.events.backward)
    return Call(weight, group, gather, sum_dx, training, keep, fp8, config.wgrad, rounding, seen, [])


def _rounding(weight: OwnedWeight, keep: bool) -> dict[str, Rounding]:
    # A forward pass that is computed again has the noise of the first: micro-batches come in one order.
    count = weight.forwards[keep]
    weight.forwards[keep] += 1
    rounding: dict[str, Rounding] = {}
    if weight.emulate is None:
        return rounding
    for i, operand in enumerate(OPERANDS):
        how = weight.emulate.for_operand(weight.path, weight.layer_number, operand, weight.step)
        if how:
            # The weight is one, and rounded alike, on all ranks and in all micro-batches.
            rank, at = (0, 0) if operand == "weight" else (weight.rank, count)
            noisy = how.rounding == "stochastic"
            rounding[operand] = how, noise_seed(*weight.identity, rank, weight.step, i, at) if noisy else None
    return rounding


def cast_input(call: Call, x: Castable) -> tuple[ScaledTensor, torch.Tensor]:
    """x (M, K) -> (q(x), its scale), as an FP8 call casts its input.

    Under sequence parallelism the backward pass gathers it again, and transposes then.
    """
    columns = call.keep and call.wgrad_fp8 and call.gather is None
    group = call.group if call.gather == "fp8" else None
    fmt = call.weight.config.forward_format
    return call.weight.cast(x, INPUT, fmt, columns=columns, training=call.training, group=group)


def takes_fp8(call: Call) -> bool:
    """Whether x may come in FP8: not where the call wants it in BF16 for a gather or for wgrad."""
    return call.fp8 and call.gather != "bf16" and (call.wgrad_fp8 or not call.keep)


@dataclass(frozen=True, eq=False)
class Fp8Activation:
    """An activation in FP8 on its way from one module to a linear: the ticket for autograd, q(x), and its scale.

    exact: x itself where someone looks at the GEMMs, else None.
    """

    ticket: torch.Tensor
    q: ScaledTensor
    scale: torch.Tensor
    exact: torch.Tensor | None


def hand_over(maker: type[torch.autograd.Function], call: Call, *inputs) -> tuple[Fp8Activation, Any]:
    """What a maker makes of its inputs for `call`, and what else it returns.

    Its forward pass gets (ctx, call, made, *inputs) and returns what `give` does, and something else or None; its
    backward pass returns None for the first two.
    """
    made: list[tuple[ScaledTensor, torch.Tensor, torch.Tensor | None]] = []
    ticket, other = maker.apply(call, made, *inputs)
    return Fp8Activation(ticket, *made[0]), other


def give(call: Call, made: list, x: Castable, like: torch.Tensor) -> torch.Tensor:
    """Cast x (M, K) for `call` into `made`; returns the ticket, of the type and the leading shape of `like`."""
    q, scale = cast_input(call, x)
    exact = source.values(x) if call.seen else None
    shape = *like.shape[:-1], call.weight.param.shape[1]
    made.append((q, scale, None if exact is None else exact.view(shape)))
    return ticket(shape, like)


def ticket(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape, of the type of `like`, without memory: what autograd sees of one that is in FP8."""
    return torch.empty((), dtype=like.dtype, device=like.device).as_strided(shape, (0,) * len(shape))


@dataclass(frozen=True, eq=False)
class Posted:
    """dy in FP8, both layouts; the ticket that autograd has of it; dy itself where someone looks at the GEMMs."""

    q: ScaledTensor
    ticket: torch.Tensor
    exact: torch.Tensor | None


def maker_of(y: torch.Tensor) -> Call | None:
    """The call that gave y and takes its gradient in FP8, or None.

    Only whoever alone reads y may ask, and `post` to it.
    """
    return getattr(y, "_fp8_call", None)


def post(call: Call, dy: Castable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Cast the gradient dy (M, N) of a call's result; what autograd is to be given for it: of the result's shape, and
    the type of `like`."""
    weight = call.weight
    q, _ = weight.cast(dy, GRAD, weight.config.grad_format, columns=True, training=call.training)
    sent = ticket(shape, like)
    call.mailbox.append(Posted(q, sent, source.values(dy) if call.seen else None))
    return sent


def product(
    x: torch.Tensor,
    anchor: torch.Tensor,
    call: Call,
    given: Fp8Activation | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias (..., N) as `call` says; x is a ticket where it is `given` in FP8."""
    if not call.fp8:
        y = Bf16Product.apply(x, anchor, call)
        return y if bias is None else y + bias
    y = Fp8Product.apply(x, anchor, call, given, bias)
    if call.keep and call.wgrad_fp8 and bias is None:  # whose gradient is summed from dy as it is
        y._fp8_call = call
    return y


class BiasedGradient:
    """dy (M, N) as a Source whose sum over M, dbias (N,), is made along with it."""

    def __init__(self, dy: torch.Tensor):
        self._dy = dy
        self.dbias: torch.Tensor | None = None

    def cast(self, fmt, scale, *, rows, columns, amax_out) -> Payloads:
        how = {"rows": rows, "columns": columns, "amax_out": amax_out}
        payload, payload_t, self.dbias = ops.quantize_bias_grad(self._dy, fmt, scale, **how)
        return payload, payload_t

    def values(self) -> torch.Tensor:
        if self.dbias is None:  # who only looks on, after the cast, changes nothing
            self.dbias = self._dy.sum(0)
        return self._dy


class Fp8Product(torch.autograd.Function):
    """y = x W^T + bias in FP8; x in BF16, or the ticket of `given`."""

    @staticmethod
    def forward(ctx, x, anchor, call: Call, given: Fp8Activation | None, bias: torch.Tensor | None):
        w = call.weight.quantized()
        if given is not None:
            q, scale = given.q, given.scale
        else:
            here = call.whole(x) if call.gather == "bf16" else x.reshape(-1, x.shape[-1])
            q, scale = cast_input(call, here)
        read = q
        if call.gather == "fp8":
            rows = tensor.gather(q.payload.view(x.shape), call.group)
            read = ScaledTensor(rows.view(-1, rows.shape[-1]), q.scale_inv)
        y = ops.gemm(read, w, ops.Epilogue(dtype=x.dtype, bias=bias), fast_accum=True)
        kept = x
        if call.keep and call.wgrad_fp8 and call.gather != "bf16":
            kept = q.columns if call.gather is None else q.payload.view(x.shape)
        ctx.call, ctx.w, ctx.exact = call, w, None
        ctx.save_for_backward(kept, scale, q.scale_inv)
        if call.seen:
            ctx.exact = x if given is None else given.exact
            _show_forward(call, ctx.exact, read, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        dx, dbias, product = _fp8_gradients(ctx, ctx.call, dy)
        return _finish(ctx.call, dx, dy.shape, product), None, None, None, dbias


def _fp8_gradients(
    ctx, call: Call, dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, ops.Product]:
    """dx (M, K), dbias (N,), and dW not computed yet: what only dx needs is freed before it is."""
    weight, config, w = call.weight, call.weight.config, ctx.w
    kept, x_scale, x_scale_inv = ctx.saved_tensors
    needs_dx, dbias = ctx.needs_input_grad[0], None
    if call.mailbox:
        posted = call.mailbox.pop()
        if dy.data_ptr() != posted.ticket.data_ptr() or any(dy.stride()):
            raise RuntimeError("the gradient of an FP8 linear was added to on its way: its result had a second reader")
        q, flat = posted.q, posted.exact
    else:
        flat = dy.reshape(-1, dy.shape[-1])
        rows = needs_dx or not call.wgrad_fp8 or call.seen
        gradient = BiasedGradient(flat) if ctx.needs_input_grad[4] else flat
        q, _ = weight.cast(
            gradient, GRAD, config.grad_format, rows=rows, columns=call.wgrad_fp8, training=call.training
        )
        dbias = gradient.dbias if isinstance(gradient, BiasedGradient) else None
    dx = ops.gemm(q, weight.transposed(w), ops.Epilogue(dtype=dy.dtype)) if needs_dx else None
    if not call.wgrad_fp8:
        assert flat is not None  # of such a call nobody posts
        product = ops.Product(flat.t(), call.whole(kept).t())
    else:
        x_t = ScaledTensor(_columns(call, kept, x_scale), x_scale_inv)
        product = ops.Product(ScaledTensor(q.columns, q.scale_inv), x_t)
    if call.seen:
        _show_backward(call, call.whole(ctx.exact), flat, (q, w if needs_dx else None), product)
    return dx, dbias, product


def _columns(call: Call, kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q(x^T) of what the forward pass kept of x."""
    if call.gather is None:
        return kept
    if call.gather == "fp8":
        rows = tensor.gather(kept, call.group)
        return ops.transpose(rows.view(-1, rows.shape[-1]))
    # Gather again, and quantise with the scale that the forward captured.
    return ops.quantize(call.whole(kept), call.weight.config.forward_format, scale, transpose=True, rows=False)[1]


class Bf16Product(torch.autograd.Function):
    """y = x W^T in BF16, of operands that may be emulated."""

    @staticmethod
    def forward(ctx, x, anchor, call: Call):
        flat = call.whole(x)
        if call.training:
            call.weight.casts.follow(INPUT, flat)
        flat = call.rounded("activation", flat)
        w = call.rounded("weight", call.weight.dense())
        y = ops.gemm(flat, w, ops.Epilogue(dtype=x.dtype))
        ctx.call, ctx.exact = call, x if call.seen else None
        ctx.save_for_backward(x if call.gather else flat)
        if call.seen:
            _show_forward(call, x, flat, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        dx, product = _bf16_gradients(ctx, ctx.call, dy.reshape(-1, dy.shape[-1]))
        return _finish(ctx.call, dx, dy.shape, product), None, None


def _bf16_gradients(ctx, call: Call, exact: torch.Tensor) -> tuple[torch.Tensor | None, ops.Product]:
    """As _fp8_gradients."""
    if call.training:
        call.weight.casts.follow(GRAD, exact)
    dy = call.rounded("gradient", exact)
    w = call.rounded("weight", call.weight.dense()) if ctx.needs_input_grad[0] else None
    dx = None if w is None else ops.gemm(dy, w.t(), ops.Epilogue(dtype=dy.dtype))
    x = call.whole(ctx.saved_tensors[0])
    if call.gather:
        x = call.rounded("activation", x)
    product = ops.Product(dy.t(), x.t())
    if call.seen:
        _show_backward(call, call.whole(ctx.exact), exact, (dy, w), product)
    return dx, product


def _finish(call: Call, dx: torch.Tensor | None, shape: torch.Size, product: ops.Product) -> torch.Tensor | None:
    """Hand the weight its gradient, which hides the sum of dx (M, K) over tensor parallelism; dx (..., K)."""
    handle, summed = None, None
    if dx is not None:
        summed = dx = dx.view(*shape[:-1], dx.shape[-1])
        if call.sum_dx:
            summed, handle = tensor.start_all_reduce(dx, call.group)
        elif call.gather:
            summed, handle = tensor.start_reduce_scatter(dx, call.group)
    call.weight.take_gradient(product)
    if handle is not None:
        handle.wait()  # until here dx is kept
    return summed


def _show_forward(call: Call, x: torch.Tensor, read_x: ops.Operand, read_w: ops.Operand) -> None:
    whole = call.whole(x)
    for look in call.weight.events.forward:
        look(call.weight, whole, read_x, read_w)


def _show_backward(call: Call, x: torch.Tensor, dy: torch.Tensor | None, dgrad: tuple, product: ops.Product) -> None:
    for look in call.weight.events.backward:
        look(call.weight, x, dy, dgrad, (product.a.T, product.b.T))
