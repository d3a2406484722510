"""A linear's product y = x W^T with its two gradients, in FP8 or in BF16: two autograd functions.

Notation: x (M, K) activations, W (N, K) weight, y (M, N), dy (M, N).  q(.) is a cast to FP8 with one
scale for the tensor, so that t ~ q(t) * scale_inv(t).

    forward   y  = q(x)    q(W)^T        E4M3 x E4M3, fast accumulation, BF16 out
    dgrad     dx = q(dy)   q(W^T)^T      E5M2 x E4M3, full accumulation, BF16 out
    wgrad     dW = q(dy^T) q(x^T)^T      E5M2 x E4M3, full accumulation, to the weight's GradSink

x and dy are read once: one kernel writes q(t) and its transpose.  What waits for the backward is q(x^T)
(one byte an element, half of what BF16 saves) and the scale *tensor* that it was made with: a
later micro-batch, or the next step's scale, cannot change what this one captured.  In the same way how
the backward pass computes is decided in the forward, in a frozen `Call` (call.py): no flag that may have changed since
is read.

Under sequence parallelism each tensor-parallel rank has a part of the rows of a column-parallel linear's x, which is
gathered for the forward and again for wgrad, and of a row-parallel linear's dy.  With `--fp8-tp-gather fp8` (O3) the
cast comes first and the payload is gathered, half the bytes; what waits for the backward is then the rank's own rows of
q(x).  The values are those of casting after the gather, bit for bit: all ranks cast with one scale, delayed scaling's,
which they agree on anyway, or else one that they agree on here.  What is summed over the ranks (a row-parallel y, a
column-parallel dx) may travel in FP8 too, `--fp8-tp-reduce-scatter`.  None of it is waited for while there is work:

    forward    gather x | GEMM own rows | GEMM the others'        GEMM the others' rows | y on its way | GEMM own rows
    backward   gather x | cast dy, dgrad | dx on its way | wgrad   cast, gather dy | transpose W, GEMM own rows | ...

The weight is frozen to stock Megatron, so autograd must be told to visit us even when x needs no gradient (the first
layer after a frozen embedding): a call takes an empty `anchor` tensor that requires one.  Not where a script has frozen
the weight, which then has no wgrad: nothing of x waits for the backward pass, and where x needs no gradient there is
none.

x and dy may come in FP8 from the modules that make them (handover.py).  With --fp8-activations (`Call.recasts`) q(x^T)
does not wait for the backward pass where it can be made then (again.py).

Source: FP8-LM (arXiv 2310.18313) section 2 for the formats; the plain BF16 path follows Megatron's
LinearWithGradAccumulationAndAsyncCommunication.
"""

import torch

from .. import gemm, ops
from ..comm import tensor
from ..comm.wire import Flight
from ..engine.owned_weight import GRAD, INPUT
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Payloads
from .again import Late, of_held
from .call import Call, cast_input
from .handover import Fp8Activation
from .parallel import gathered_product, summed_product


def product(
    x: torch.Tensor,
    anchor: torch.Tensor,
    call: Call,
    given: Fp8Activation | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + bias (+ residual, in FP8) (..., N) as `call` says; x is a ticket where it is `given` in FP8."""
    visit = anchor if call.wgrad else None
    if not call.fp8:
        assert residual is None  # stock's kernel adds bias and residual in one
        y = Bf16Product.apply(x, visit, call)
        return y if bias is None else y + bias
    y = Fp8Product.apply(x, visit, call, given, bias, residual)
    # A bias's gradient is summed from dy as it is, a residual's is dy; that of a sum over the ranks is every rank's.
    in_fp8 = call.wgrad_fp8 or not call.wgrad  # all that the backward pass reads of dy
    if call.keep and in_fp8 and bias is None and residual is None and not call.sum_y:
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
    """y = x W^T + bias + residual in FP8; x in BF16, or the ticket of `given`."""

    @staticmethod
    def forward(ctx, x, anchor, call: Call, given: Fp8Activation | None, bias, residual):
        if given is not None:
            q, scale, recipe = given.q, given.scale, given.recipe if call.wgrad else None
        else:
            recipe = of_held(x) if call.recasts and call.wgrad and call.gather is None else None
            here = call.whole(x) if call.gather == "bf16" else source.rows(x)
            q, scale = cast_input(call, here, recipe)
        arriving = call.start_gather(q.payload) if call.gather == "fp8" else None
        w, read = call.weight.quantized(), q
        past = None if residual is None else source.rows(residual)
        epilogue = gemm.Epilogue(dtype=x.dtype, bias=bias, residual=past)
        if arriving is not None:
            y, read = gathered_product(q, arriving, call.group, w, epilogue, fast_accum=True)
        elif call.sum_y:
            assert bias is None and residual is None  # which are added to the sum
            y = summed_product(q, w, call.group, x.dtype, call.scatter, call.sum_y == "fp8")
        else:
            y = gemm.gemm(q, w, epilogue, fast_accum=True)
        kept: tuple[torch.Tensor | None, ...] = (x,)
        if not call.wgrad:
            kept = ()
        elif recipe is not None:
            kept = recipe.kept
        elif call.wgrad_fp8 and call.gather != "bf16":
            kept = (q.columns if call.gather is None else q.payload,)
        ctx.call, ctx.w, ctx.exact = call, w, None
        ctx.make, ctx.late = (None, False) if recipe is None else (recipe.make, recipe.late)
        ctx.save_for_backward(scale, q.scale_inv, *kept)
        if call.seen:
            ctx.exact = x if given is None else given.exact
            _show_forward(call, ctx.exact, read, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        dx, dbias, product = _fp8_gradients(ctx, ctx.call, dy)
        past = dy if ctx.needs_input_grad[5] else None
        return _finish(ctx.call, dx, dy.shape, product), None, None, None, dbias, past


def _fp8_gradients(ctx, call: Call, dy: torch.Tensor) -> tuple[Flight | None, torch.Tensor | None, gemm.Product | None]:
    """dx (M, K) under way, dbias (N,), and dW not computed yet, or None, where it comes late or never: what only dx
    needs is freed before it is."""
    weight, w, needs_dx = call.weight, ctx.w, ctx.needs_input_grad[0]
    x_scale, x_scale_inv, *kept = ctx.saved_tensors
    x, fmt = kept[0] if kept else None, weight.config.forward_format
    if ctx.make is not None and call.gather:
        x, _ = ctx.make(fmt, x_scale, *kept, rows=True, columns=False)
    x_rows = call.start_gather(source.rows(x)) if call.gather and call.wgrad else None
    q, exact, dbias, dy_rows = _cast_gradient(ctx, call, dy)
    dx = None
    if needs_dx:
        w_t, epilogue = weight.transposed(w), gemm.Epilogue(dtype=dy.dtype)
        if dy_rows is None:
            dx = gemm.gemm(q, w_t, epilogue)
        else:
            dx, q = gathered_product(q, dy_rows, call.group, w_t, epilogue)
        dx = call.start_sum(dx)
    elif dy_rows is not None:
        q = ScaledTensor(dy_rows.land(), q.scale_inv)
    if not call.wgrad:
        if call.seen:
            _show_backward(call, call.whole(ctx.exact), exact, (q, w if needs_dx else None), None)
        return dx, dbias, None
    if call.gather_dy == "fp8":
        q = ScaledTensor(q.payload, q.scale_inv, ops.transpose(q.payload))
    if not call.seen:  # its rows have served: they need not wait for x^T
        q, dy_rows = ScaledTensor(None, q.scale_inv, q.columns), None
    x = x if x_rows is None else x_rows.land()
    if not call.wgrad_fp8:
        assert exact is not None  # of such a call nobody posts, and what is gathered is BF16
        product = gemm.Product(exact.t(), source.rows(x).t())
    elif ctx.late and needs_dx and not call.seen:
        call.late.append(Late(ScaledTensor(q.columns, q.scale_inv), x_scale, x_scale_inv))
        return dx, dbias, None
    else:
        if call.gather == "fp8":
            x = ops.transpose(x)
        elif call.gather == "bf16":  # with the scale that the forward captured
            x = ops.quantize(x, fmt, x_scale, transpose=True, rows=False)[1]
        elif ctx.make is not None:
            _, x = ctx.make(fmt, x_scale, *kept, rows=False, columns=True)
        product = gemm.Product(ScaledTensor(q.columns, q.scale_inv), ScaledTensor(x, x_scale_inv))
    if call.seen:
        _show_backward(call, call.whole(ctx.exact), exact, (q, w if needs_dx else None), product)
    return dx, dbias, product


def _cast_gradient(
    ctx, call: Call, dy: torch.Tensor
) -> tuple[ScaledTensor, torch.Tensor | None, torch.Tensor | None, Flight | None]:
    """q(dy); dy (M, N), or None; dbias (N,), or None; and the rows of all ranks, under way, where q has but its own."""
    if call.mailbox:
        posted = call.mailbox.pop()
        if dy.data_ptr() != posted.ticket.data_ptr() or any(dy.stride()):
            raise RuntimeError(
                "the gradient of an FP8 linear's result was changed on its way to the linear: something else read that "
                "result too, such as a hook"
            )
        return posted.q, posted.exact, None, None
    flat = source.rows(dy)
    if call.gather_dy == "fp8":
        q, _ = call.weight.cast(flat, GRAD, columns=False, training=call.training, group=call.group)
        dy_rows = call.start_gather(q.payload)
        return q, call.start_gather(flat).land() if call.seen else None, None, dy_rows
    if call.gather_dy:
        flat = call.start_gather(flat).land()
    gradient = BiasedGradient(flat) if ctx.needs_input_grad[4] else flat
    columns = call.wgrad and call.wgrad_fp8
    rows = ctx.needs_input_grad[0] or not columns or call.seen
    q, _ = call.weight.cast(gradient, GRAD, rows=rows, columns=columns, training=call.training)
    return q, flat, gradient.dbias if isinstance(gradient, BiasedGradient) else None, None


class Bf16Product(torch.autograd.Function):
    """y = x W^T in BF16, of operands that may be emulated."""

    @staticmethod
    def forward(ctx, x, anchor, call: Call):
        flat = call.whole(x)
        if call.training:
            call.weight.casts.follow(INPUT, flat)
        flat = call.rounded("activation", flat)
        w = call.rounded("weight", call.weight.dense())
        y = gemm.gemm(flat, w, gemm.Epilogue(dtype=x.dtype))
        if call.sum_y:
            y = Flight(tensor.add(y, call.group, call.scatter, fp8=False)).land()
        ctx.call, ctx.exact = call, x if call.seen else None
        ctx.save_for_backward(*((x if call.gather else flat,) if call.wgrad else ()))
        if call.seen:
            _show_forward(call, x, flat, w)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        flat = source.rows(dy)
        whole = ctx.call.start_gather(flat).land() if ctx.call.gather_dy else flat
        dx, product = _bf16_gradients(ctx, ctx.call, whole)
        return _finish(ctx.call, dx, dy.shape, product), None, None


def _bf16_gradients(ctx, call: Call, exact: torch.Tensor) -> tuple[Flight | None, gemm.Product | None]:
    """As _fp8_gradients."""
    (x,) = ctx.saved_tensors if call.wgrad else (None,)
    x_rows = call.start_gather(source.rows(x)) if call.gather and call.wgrad else None
    if call.training:
        call.weight.casts.follow(GRAD, exact)
    dy = call.rounded("gradient", exact)
    w = call.rounded("weight", call.weight.dense()) if ctx.needs_input_grad[0] else None
    dx = None if w is None else call.start_sum(gemm.gemm(dy, w.t(), gemm.Epilogue(dtype=dy.dtype)))
    if x_rows is not None:
        x = call.rounded("activation", x_rows.land())
    product = None if x is None else gemm.Product(dy.t(), x.t())
    if call.seen:
        _show_backward(call, call.whole(ctx.exact), exact, (dy, w), product)
    return dx, product


def _finish(call: Call, dx: Flight | None, shape: torch.Size, product: gemm.Product | None) -> torch.Tensor | None:
    """Hand the weight its gradient, if it is here, which hides what is under way of dx (M, K); dx (..., K)."""
    if product is not None:
        call.weight.take_gradient(product)
    if dx is None:
        return None
    landed = dx.land()
    return landed.view(-1, *shape[1:-1], landed.shape[-1])


def _show_forward(call: Call, x: torch.Tensor, read_x: gemm.Operand, read_w: gemm.Operand) -> None:
    whole = call.whole(x)
    for look in call.weight.events.forward:
        look(call.weight, whole, read_x, read_w)


def _show_backward(call: Call, x: torch.Tensor, dy: torch.Tensor | None, dgrad: tuple, product) -> None:
    wgrad = None if product is None else (product.a.T, product.b.T)
    for look in call.weight.events.backward:
        look(call.weight, x, dy, dgrad, wgrad)
