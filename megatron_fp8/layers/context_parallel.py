"""Causal self-attention over N context-parallel ranks, of which each has a part of every sequence.

Megatron cuts a sequence in 2 N chunks of c tokens and gives rank r two of them, the r-th and the r-th from the end, the
earlier one first. So every rank has 2 N c^2 pairs of a query and a key that it sees, in three blocks:

    own       both own chunks, causal: only the order of keys matters             2 c queries, 2 c keys, half of it
    earlier   the early chunks of the ranks before it, all seen by every query    2 c queries, r c keys
    between   both chunks of the ranks behind it, seen by the late chunk          c queries, 2 (N - 1 - r) c keys

A softmax over several blocks of keys is theirs, weighted by the logarithms of their sums of exponentials:

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i        in FP32, rounded once

Backward, torch's kernels are given this whole lse and out in place of a block's own. They compute P = exp(S - lse) and
dS = P (dP - rowsum(dO out)), which are then the whole softmax's, and dQ, dK and dV of the blocks just add up (Ring
Attention, arXiv 2310.01889).

    forward    gather K and V                              |  own  |  earlier, between, merge
    backward   gather K and V again                        |  own  |  earlier, between  |  exchange dK and dV, add

What stands between the first bars runs while K and V are on their way. They are gathered again in the backward pass
instead of being kept: a rank keeps its own tokens alone. That K and V are gathered, and not sent round a ring, is Llama
3's choice (arXiv 2407.21783, 3.3.2): grouped queries make them small. What a rank has of the dK and dV of another's key
comes out of one block, rounded to BF16; as such it travels, and the key's owner adds up in FP32. It is the sum that a
reduce-scatter in FP32 gives, for 3/8 of its bytes: the late chunks of the ranks before it get none.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from ..comm import tensor, wire
from ..errors import UserError
from .parcel import hold

_aten = torch.ops.aten


class Kernel(NamedTuple):
    """Attention of one block; q (b, np, s, hn), k (b, ng, t, hn), v (b, ng, t, hv), of any strides.

    forward(q, k, v, causal, scale) -> out (b, np, s, hv), lse (b, np, s) in FP32 of natural logarithms, and what else
    the backward pass takes.  backward(dout, q, k, v, out, lse, causal, scale, *else) -> dq, dk, dv.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, group) -> torch.Tensor:
    """q (s/N, b, np, hn), k (s/N, b, ng, hn), v (s/N, b, ng, hv) -> (s/N, b, np * hv), as stock's chunks.

    Raises UserError on a GPU if torch offers neither its cuDNN nor its flash kernel.
    """
    kernel, width = _kernel(q, k, v), v.shape[3]
    if kernel is None:  # one width that is a multiple of 8 is what the flash kernel takes
        even = -(-max(q.shape[3], width) // 8) * 8
        q, k, v = (F.pad(t, (0, even - t.shape[3])) for t in (q, k, v))
        kernel = _kernel(q, k, v)
    if kernel is None:
        raise UserError(
            f"--context-parallel-size {group.size()}: torch has no fused attention here for heads of {q.shape[3]} in "
            f"{str(q.dtype).removeprefix('torch.')}; use heads of at most 256 and BF16, or --fp8-attention te"
        )
    y = _ContextAttention.apply(q, k, v, scale, kernel, group)
    if y.shape[3] != width:
        return y[..., :width].flatten(2)
    y = y.flatten(2)
    if y.requires_grad:  # the backward pass reads it, and so keeps it
        hold(y)
    return y


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel | None:
    """The first of torch's kernels, in the order that is set, if it is one of ours."""
    if not q.is_cuda:
        return _REFERENCE
    q, k, v = map(_heads, (q, k, v))
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=k.shape[1] != q.shape[1])
    return _FUSED.get(choice)


class _Block(NamedTuple):
    """Own queries from row `first` on, against keys (t, b, ng, hn) and values (t, b, ng, hv)."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool


def _blocks(k: torch.Tensor, v: torch.Tensor, group) -> Iterator[_Block]:
    """The own block, while the other ranks' K and V are on their way, and theirs."""
    flights = [wire.Flight(tensor.gather(t, group, wire.KEYS)) for t in (k, v)]
    yield _Block(0, k, v, True)
    ranks, rank, chunk = group.size(), group.rank(), len(k) // 2
    keys, values = (flight.land().unflatten(0, (ranks, 2, chunk)) for flight in flights)
    if rank > 0:
        yield _Block(0, keys[:rank, 0].flatten(0, 1), values[:rank, 0].flatten(0, 1), False)
    if rank < ranks - 1:
        yield _Block(chunk, keys[rank + 1 :].flatten(0, 2), values[rank + 1 :].flatten(0, 2), False)


class _ContextAttention(torch.autograd.Function):
    """q, k, v as `attention` -> (s/N, b, np, hv)."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float, kernel: Kernel, group):
        parts, rest = [], ()
        for first, keys, values, causal in _blocks(k, v, group):
            out, lse, rest = kernel.forward(*map(_heads, (q[first:], keys, values)), causal, scale)
            parts.append((first, out, lse))
        y, lse = _merge(parts)
        ctx.save_for_backward(q, k, v, y, lse, *rest)
        ctx.how = scale, kernel, group
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse, *rest = ctx.saved_tensors
        scale, kernel, group = ctx.how
        dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        of_keys, of_values = [], []
        for first, keys, values, causal in _blocks(k, v, group):
            operands = map(_heads, (dy[first:], q[first:], keys, values, y[first:]))
            grads = kernel.backward(*operands, lse[..., first:].contiguous(), causal, scale, *rest)
            of_queries, of_key, of_value = (t.permute(2, 0, 1, 3) for t in grads)
            dq[first:] += of_queries
            of_keys.append(of_key)
            of_values.append(of_value)
        flights = [wire.Flight(_add(*parts, group=group)) for parts in (of_keys, of_values)]
        dk, dv = (flight.land() for flight in flights)
        return dq.to(q.dtype), dk, dv, None, None, None


def _heads(t: torch.Tensor) -> torch.Tensor:
    """(s, b, heads, hn) as torch's kernels have it, (b, heads, s, hn): a view."""
    return t.permute(1, 2, 0, 3)


def _merge(parts: list[tuple[int, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(First row, out, lse) of each block, the first of all rows -> out (s, b, np, hv), lse (b, np, s) of all keys."""
    (_, own, whole), *others = parts
    whole = whole.clone()
    for first, _, lse in others:
        whole[..., first:] = torch.logaddexp(whole[..., first:], lse)
    b, heads, s, width = own.shape
    y = torch.zeros(s, b, heads, width, dtype=torch.float32, device=own.device)
    for first, out, lse in parts:
        _heads(y[first:]).addcmul_(out, (lse - whole[..., first:]).exp().unsqueeze(-1))
    return y.to(own.dtype), whole


def _add(own: torch.Tensor, *others: torch.Tensor, group) -> wire.Stages:
    """A gradient's blocks (t, b, ng, hn), in the order of `_blocks` -> the sum over ranks for the own tokens."""
    ranks, rank, rows = group.size(), group.rank(), len(own)
    chunk = rows // 2
    # An earlier rank is sent what falls on its early chunk, a later one both; so each gets both of the earlier ranks.
    sent = [chunk] * rank + [0] + [rows] * (ranks - 1 - rank)
    expected = [rows] * rank + [0] + [chunk] * (ranks - 1 - rank)
    data = torch.empty(sum(sent), *own.shape[1:], dtype=own.dtype, device=own.device)
    received, handle = wire.pass_rows(torch.cat(others, out=data), sent, expected, group, wire.KEYS_GRADS)
    yield [handle]
    total = own.to(torch.float32, memory_format=torch.contiguous_format)
    both, early = received.split([rank * rows, (ranks - 1 - rank) * chunk])
    total += both.view(rank, *own.shape).sum(0, dtype=torch.float32)
    total[:chunk] += early.view(ranks - 1 - rank, chunk, *own.shape[1:]).sum(0, dtype=torch.float32)
    return total.to(own.dtype), []


# --- the kernels


def _cudnn(q, k, v, causal: bool, scale: float):
    out, lse, _, _, _, _, *random, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3]), tuple(random)


def _cudnn_backward(dout, q, k, v, out, lse, causal: bool, scale: float, *random):
    return _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), *random, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


def _flash(q, k, v, causal: bool, scale: float):
    out, lse, _, _, _, _, *random, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse, tuple(random)


def _flash_backward(dout, q, k, v, out, lse, causal: bool, scale: float, *random):
    return _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *random, scale=scale
    )


def _logits(q, k, causal: bool, scale: float) -> torch.Tensor:
    """(b, ng, np / ng, s, t) in FP32."""
    logits = scale * q.unflatten(1, (k.shape[1], -1)).float() @ k.unsqueeze(2).float().transpose(-1, -2)
    if causal:
        logits.masked_fill_(torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return logits


def _plain(q, k, v, causal: bool, scale: float):
    """The formula, in FP32: what runs on a CPU."""
    logits = _logits(q, k, causal, scale)
    lse = logits.logsumexp(-1, keepdim=True)
    out = (logits - lse).exp() @ v.unsqueeze(2).float()
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2).squeeze(-1), ()


def _plain_backward(dout, q, k, v, out, lse, causal: bool, scale: float):
    groups = k.shape[1]
    dout, out, lse = (t.unflatten(1, (groups, -1)).float() for t in (dout, out, lse.unsqueeze(-1)))
    p = (_logits(q, k, causal, scale) - lse).exp()
    ds = scale * p * (dout @ v.unsqueeze(2).float().transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
    dq = (ds @ k.unsqueeze(2).float()).flatten(1, 2)
    dk = (ds.transpose(-1, -2) @ q.unflatten(1, (groups, -1)).float()).sum(2)
    dv = (p.transpose(-1, -2) @ dout).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


_REFERENCE = Kernel(_plain, _plain_backward)
_FUSED: dict[Any, Kernel] = {
    int(SDPBackend.CUDNN_ATTENTION): Kernel(_cudnn, _cudnn_backward),
    int(SDPBackend.FLASH_ATTENTION): Kernel(_flash, _flash_backward),
}
