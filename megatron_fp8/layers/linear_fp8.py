"""A linear's product y = x W^T with its two gradients, in FP8.

Notation: x (M, K) activations, W (N, K) weight, y (M, N), dy (M, N).  q(.) is a cast to FP8 with one
scale for the tensor, so that t ~ q(t) * scale_inv(t).

    forward   y  = q(x)    q(W)^T        E4M3 x E4M3, fast accumulation, BF16 out
    dgrad     dx = q(dy)   q(W^T)^T      E5M2 x E4M3, full accumulation, BF16 out
    wgrad     dW = q(dy^T) q(x^T)^T      E5M2 x E4M3, full accumulation, to the weight's GradSink

x and dy are read once: one kernel writes q(t) and its transpose.  What waits for the backward pass is q(x^T) (one byte
an element, half of what BF16 saves) and the scale *tensor* that it was made with: a later micro-batch, or the next
step's scale, cannot change it.  In the same way a frozen `Call` (parcel.py) says how the backward pass computes: it
reads no flag that may have changed since the forward pass.

x and dy may come in FP8 from the modules that make them, and q(x^T) may be made again instead of waiting: parcel.py.

Under sequence parallelism each tensor-parallel rank has a part of the rows of a column-parallel linear's x, and of a
row-parallel linear's dy.  All rows of x are gathered for the forward pass and again for wgrad.  With `--fp8-tp-gather
fp8` (O3) the cast comes first and the payload is gathered, half the bytes; the rank's own rows of q(x) wait for the
backward pass.  The values are those of casting after the gather, bit for bit: all ranks cast with one scale.  Delayed
scaling agrees on it anyway; otherwise they agree here.  What is summed over the ranks (a row-parallel y, a
column-parallel dx) may travel in FP8 too, `--fp8-tp-reduce-scatter`.  GEMMs hide what travels:

    forward    gather x | GEMM own rows | GEMM the others'        GEMM the others' rows | y on its way | GEMM own rows
    backward   gather x | cast dy, dgrad | dx on its way | wgrad   cast, gather dy | transpose W, GEMM own rows | ...

The weight is frozen to stock Megatron.  So autograd must be told to visit us even if x needs no gradient (the first
layer after a frozen embedding): a call takes an empty `anchor` tensor that requires one.  If a script has frozen the
weight there is no wgrad and no anchor: nothing of x waits for the backward pass, and if x needs no gradient there is
none.

Source: FP8-LM (arXiv 2310.18313) section 2 for the formats.
"""

from dataclasses import dataclass

import torch

from .. import gemm, ops
from ..comm.wire import Flight
from ..engine.owned_weight import GRAD
from ..numerics.scaled import ScaledTensor
from ..ops import source
from ..ops.source import Payloads
from .function import Function, announce
from .parallel import gathered_product, summed_product
from .parcel import Call, Late, Parcel, recipe_of


class Fp8Product(Function):
    """y (..., N) = x W^T + bias + residual.

    x (..., K): BF16, or the ticket of what the parcel has in FP8.
    """

    @staticmethod
    def forward(ctx, x, anchor, parcel: Parcel, bias, residual):
        call, ctx.announces = parcel.call, parcel.q is None  # what comes in FP8 comes of a norm or an activation
        if parcel.q is None:
            recipe = recipe_of(x) if call.recasts and call.columns else None
            parcel.cast(call.whole(x) if call.gather == "bf16" else source.rows(x), recipe)
            parcel.exact = x if call.seen else None
        q, recipe = parcel.q, parcel.recipe if call.wgrad else None
        assert q is not None
        gathering = call.start_gather(q.payload) if call.gather == "fp8" else None
        w, read, out = call.weight.quantized(), q, None
        if gathering is not None:
            y, read = gathered_product(q, gathering, call.group, w, _epilogue(x.dtype, bias), fast_accum=True)
        elif call.sum_y:
            assert bias is None  # which is added to the sum
            y = summed_product(q, w, call.group, x.dtype, call.scatter, call.sum_y == "fp8")
            out = None if residual is None else residual + y.view(residual.shape)
        else:
            if residual is not None:
                out = torch.empty(*residual.shape, dtype=x.dtype, device=x.device)
            y = gemm.gemm(q, w, _epilogue(x.dtype, bias, residual, out), fast_accum=True)

        kept: tuple[torch.Tensor | None, ...] = (x,)
        if not call.wgrad:
            kept = ()
        elif recipe is not None:
            kept = recipe.kept
        elif call.wgrad_fp8 and call.gather != "bf16":
            kept = (q.columns if call.gather is None else q.payload,)
        ctx.parcel, ctx.w = parcel, w
        ctx.make, ctx.late = (None, False) if recipe is None else (recipe.make, recipe.late)
        ctx.scale, ctx.scale_inv = parcel.scale, q.scale_inv  # never written, so autograd need not watch them
        ctx.save_for_backward(*kept)
        if call.seen:
            ctx.exact = parcel.exact
            call.show_forward(ctx.exact, read, w)
        parcel.q = parcel.scale = parcel.recipe = parcel.exact = None  # read: what the backward pass needs is saved
        # Of a view at a layer's end stock makes a tensor that is none, in an autograd function of its own.
        return y.view(-1, *x.shape[1:-1], y.shape[-1]) if out is None else out

    @staticmethod
    def backward(ctx, dy):
        parcel, needs_dx = ctx.parcel, ctx.needs_input_grad[0]
        call, scale, scale_inv, kept = parcel.call, ctx.scale, ctx.scale_inv, ctx.saved_tensors
        gathering = _gather_x(ctx, call, scale, kept) if call.wgrad and call.gather else None
        gradient = _gradient(ctx, parcel, dy)
        if ctx.announces and needs_dx:  # the GEMMs hide what attention's backward pass then asks other ranks for
            announce(ctx)
        dx = _dgrad(ctx.w, call, gradient, dy.dtype) if needs_dx else None
        summing = call.start_sum(dx) if call.sum_dx and needs_dx else None

        product = None
        if call.wgrad:
            dy_t = gradient.transposed(call)
            if not call.seen:
                gradient.q = gradient.gathering = None  # dy's rows have served: wgrad needs their memory
            if ctx.late and needs_dx and not call.seen:  # autograd then visits x's producer, which makes q(x^T)
                parcel.late = Late(dy_t, scale, scale_inv)
            else:
                x_t, gathering = _x_transposed(ctx, call, scale, scale_inv, kept, gathering), None  # x's too
                product = gemm.Product(dy_t, x_t)
        if call.seen:
            read = gradient.rows(), ctx.w if needs_dx else None
            call.show_backward(ctx.exact, gradient.exact, read, product)
        if product is not None:
            call.weight.take_gradient(product)  # while dx is being summed
        if summing is not None:
            dx = summing.land()
        if dx is not None:
            dx = dx.view(-1, *dy.shape[1:-1], dx.shape[-1])
        return dx, None, None, gradient.dbias, dy if ctx.needs_input_grad[4] else None


def _epilogue(
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> gemm.Epilogue:
    """The forward pass's; residual and out (..., N) come together."""
    if bias is None and residual is None:
        return gemm.plain(dtype)
    if residual is None or out is None:
        return gemm.Epilogue(dtype, bias)
    return gemm.Epilogue(dtype, bias, source.rows(residual), source.rows(out))


@dataclass(slots=True, eq=False)
class Gradient:
    """dy as the backward pass has it.

    Attributes:
        q: q(dy), of this rank's rows while `gathering`; None once its rows have served.
        exact: dy (M, N) of all ranks, or None if it came in FP8.
        dbias: (N,), the sum of dy over M, if there is a bias.
        gathering: the rows of q(dy) of all ranks, on their way; None if they are here.
    """

    q: ScaledTensor | None
    exact: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    gathering: Flight | None = None

    def rows(self) -> ScaledTensor:
        """q(dy) of all ranks."""
        assert self.q is not None
        if self.gathering is not None:
            self.q, self.gathering = ScaledTensor(self.gathering.land(), self.q.scale_inv), None
        return self.q

    def transposed(self, call: Call) -> gemm.Operand:
        """dy^T (N, M) of all ranks, as wgrad reads it: in FP8, or in BF16 if that GEMM is."""
        if not call.wgrad_fp8:
            assert self.exact is not None  # such a call takes no dy in FP8, and gathers it in BF16
            return self.exact.t()
        q = self.q if self.gathering is None else self.rows()
        assert q is not None
        columns = ops.transpose(q.payload) if call.gather_dy == "fp8" else q.columns
        return ScaledTensor(columns, q.scale_inv)


def _gradient(ctx, parcel: Parcel, dy: torch.Tensor) -> Gradient:
    """Cast dy (..., N), if its producer has not posted it, and start to gather its rows.

    Raises RuntimeError if y had another reader beside the one that posted.
    """
    call, posted = parcel.call, parcel.dy
    if posted is not None:
        parcel.dy = None
        if dy is not posted.ticket:
            raise RuntimeError(
                "the gradient of an FP8 linear's result was changed on its way to the linear: something else read that "
                "result too, such as a hook"
            )
        return Gradient(posted.q, posted.exact)
    flat = source.rows(dy)
    if call.gather_dy == "fp8":
        q, _ = call.weight.cast(flat, GRAD, columns=False, training=call.training, group=call.group)
        gathering = call.start_gather(q.payload)
        return Gradient(q, call.start_gather(flat).land() if call.seen else None, gathering=gathering)
    if call.gather_dy:
        flat = call.start_gather(flat).land()
    columns = call.wgrad and call.wgrad_fp8
    rows = ctx.needs_input_grad[0] or not columns or call.seen
    how = {"rows": rows, "columns": columns, "training": call.training}
    if not ctx.needs_input_grad[3]:
        return Gradient(call.weight.cast(flat, GRAD, **how)[0], flat)
    biased = BiasedGradient(flat)
    q, _ = call.weight.cast(biased, GRAD, **how)
    return Gradient(q, flat, biased.dbias)


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
        if self.dbias is None:  # after the cast only observers ask: they change nothing
            self.dbias = self._dy.sum(0)
        return self._dy


def _dgrad(w: ScaledTensor, call: Call, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
    """dx (M, K) = q(dy) W, this rank's part of a sum if there is one."""
    w_t, q, gathering = call.weight.transposed(w), gradient.q, gradient.gathering
    assert q is not None
    if gathering is None:
        return gemm.gemm(q, w_t, gemm.plain(dtype))
    dx, gradient.q = gathered_product(q, gathering, call.group, w_t, gemm.plain(dtype))
    gradient.gathering = None
    return dx


def _gather_x(ctx, call: Call, scale: torch.Tensor, kept: tuple) -> Flight:
    """Start to gather what wgrad reads of x: q(x), or x in BF16."""
    x = kept[0]
    if ctx.make is not None:
        x, _ = ctx.make(call.weight.config.forward_format, scale, *kept, rows=True, columns=False)
    return call.start_gather(source.rows(x))


def _x_transposed(ctx, call: Call, scale, scale_inv, kept: tuple, gathering: Flight | None) -> gemm.Operand:
    """x^T (K, M) of all ranks, as wgrad reads it: in FP8, with the scale that the forward pass captured, or in BF16."""
    fmt, x = call.weight.config.forward_format, kept[0] if gathering is None else gathering.land()
    if not call.wgrad_fp8:
        return source.rows(x).t()
    if call.gather == "fp8":
        x = ops.transpose(x)
    elif call.gather:
        x = ops.quantize(x, fmt, scale, transpose=True, rows=False)[1]
    elif ctx.make is not None:
        x = ctx.make(fmt, scale, *kept, rows=False, columns=True)[1]
    return ScaledTensor(x, scale_inv)
