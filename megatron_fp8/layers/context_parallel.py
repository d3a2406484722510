"""Causal self-attention over N context-parallel ranks; each rank has a part of every sequence.

Megatron cuts a sequence in 2 N chunks of c tokens and gives rank r two of them, the r-th and the r-th from the end, the
earlier one first. So each rank computes 2 N c^2 pairs of a query and a key that it sees, in three blocks:

    own       both own chunks, causal: only the order of keys matters             2 c queries, 2 c keys, half of them
    earlier   the early chunks of the ranks before it, all seen by every query    2 c queries, r c keys
    between   both chunks of the ranks behind it, seen by the late chunk          c queries, 2 (N - 1 - r) c keys

The softmax over several blocks of keys follows from the blocks' own, weighted by the logarithms of their sums of
exponentials:

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i        in FP32, rounded once

Backward, torch's kernels get this whole lse and out in place of the block's own. They compute P = exp(S - lse) and
dS = P (dP - rowsum(dO out)). With these inputs both are the whole softmax's, so the blocks' dQ, dK and dV just add up
(Ring Attention, arXiv 2310.01889).

K and V come again in the backward pass instead of being kept, so that a rank keeps its own tokens alone. Either they
are gathered, or fetched from one rank after the other (context_exchange.py). To gather them is Llama 3's choice (arXiv
2407.21783, 3.3.2), whose grouped queries make them small. It makes fewer passes over the output.

**K, V and gradients travel while the rank computes.** The own block needs no other rank. Forward it comes first, while
K and V are on their way. Backward it comes last, while the gradients of the other ranks' K and V go home. K and V are
asked for when the linear behind attention begins its backward pass (`announce`, function.py). With T tokens a rank, and
A, K and H channels of queries, keys and hidden states:

    forward     4 (N - 1) T K bytes    beside the own block's 2 T^2 A FLOPs
    backward    4 (N - 1) T K bytes    beside that linear's GEMMs, 4 T A H FLOPs
                3 (N - 1) T K bytes    beside the own block's 5 T^2 A FLOPs

At 370 GB/s and 450 TFLOP/s the first is hidden from T = 2400 (N - 1) K / A on, 4,300 tokens on each of 8 ranks if K = A
/ 4, and the third earlier. At 1200 TFLOP/s the second is hidden up to N - 1 = A H / 3200 K: 6 ranks for Llama 3 8B. (An
H100's figures; arithmetic. On two H200s a part of each gather was not hidden: docs/performance.md.) So --cp-comm-type
p2p fetches only if the whole K and V of a layer take more than 512 MiB (flags/stock.py): 131,072 tokens of 1024
channels are gathered, 65,536 tokens of 4096 are fetched.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from .. import ops
from ..errors import UserError
from ..flags.stock import FETCHED_ABOVE
from .context_exchange import Block, Fetched, Gathered, own_chunks
from .function import Function
from .packed import Documents
from .parcel import hold

_aten = torch.ops.aten


class Kernel(NamedTuple):
    """Attention of one block; q (b, np, s, hn), k (b, ng, t, hn), v (b, ng, t, hv), of any strides.

    forward(q, k, v, causal, scale) -> out (b, np, s, hv), lse (b, np, s) in FP32 of natural logarithms, and more
    arguments for the backward pass.  backward(dout, q, k, v, out, lse, causal, scale, *more) -> dq, dk, dv.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def against(self, block: Block) -> "Kernel":
        """What computes own queries against this block: itself, because each sees all keys."""
        return self


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    group,
    fetch: bool = False,
    documents: Documents | None = None,
) -> torch.Tensor:
    """q (s/N, b, np, hn), k (s/N, b, ng, hn), v (s/N, b, ng, hv) -> (s/N, b, np * hv), as stock's chunks.

    fetch: whether K and V above FETCHED_ABOVE bytes are fetched instead of gathered.
    documents: of the sequence, which do not see each other; b is 1 then, and K and V are fetched.
    Raises UserError on a GPU if torch offers neither its cuDNN nor its flash kernel.
    """
    choose = _kernel if documents is None else functools.partial(_packed_kernel, documents, group)
    kernel, width = choose(q, k, v), v.shape[3]
    if kernel is None:  # the flash kernel takes one width for all, a multiple of 8
        even = -(-max(q.shape[3], width) // 8) * 8
        q, k, v = (F.pad(t, (0, even - t.shape[3])) for t in (q, k, v))
        kernel = choose(q, k, v)
    if kernel is None:
        raise UserError(
            f"--context-parallel-size {group.size()}: torch has no fused attention here for heads of {q.shape[3]} in "
            f"{str(q.dtype).removeprefix('torch.')}; use heads of at most 256 and BF16, or --fp8-attention te"
        )
    large = fetch and (k.nbytes + v.nbytes) * group.size() > FETCHED_ABOVE
    exchange = Fetched if large or documents is not None else Gathered
    y = _ContextAttention.apply(q, k, v, scale, kernel, functools.partial(exchange, group=group))
    if v.shape[3] != width:
        return y.view(*q.shape[:3], -1)[..., :width].flatten(2)
    if y.requires_grad:  # the backward pass reads it, so it is kept
        hold(y)
    return y


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel | None:
    """The kernel that torch would choose, in the order that is set; None if it is not one of ours."""
    if not q.is_cuda:
        return _REFERENCE
    q, k, v = map(_heads, (q, k, v))
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=k.shape[1] != q.shape[1])
    return _FUSED.get(choice)


def _packed_kernel(documents: Documents, group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The PackedKernel of the own block; None if the GPU's kernel does not take these widths."""
    if q.is_cuda and (q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 256):
        return None
    own = own_chunks(group.rank(), group.size())
    return PackedKernel(documents, len(q) // 2, own, own, q.is_cuda)


class _ContextAttention(Function):
    """q, k, v as `attention` -> (s/N, b, np * hv).  exchange(pairs): the Gathered or Fetched of a pass.

    kernel: a Kernel, or a PackedKernel.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale: float, kernel: Any, exchange):
        theirs, widths = exchange(_side_by_side(k, v)), (k.shape[3], v.shape[3])
        out, lse, rest = kernel.forward(*map(_heads, (q, k, v)), True, scale)
        y, lse = out.permute(2, 0, 1, 3), lse.contiguous()
        del out
        left = theirs.count
        for block in theirs.blocks():  # not by enumerate, which holds a block until it has the next
            keys, values = block.pairs.split(widths, -1)
            operands = map(_heads, (q[block.first :], keys, values))
            out, of_block, rest = kernel.against(block).forward(*operands, False, scale)
            left -= 1
            part, dtype = out.permute(2, 0, 1, 3), torch.float32 if left else q.dtype
            y = ops.merge_attention(y, lse, part, of_block, dtype)
            del block, keys, values, operands, out, of_block, part  # the next block may take their memory
        y = y.flatten(2)
        ctx.save_for_backward(q, k, v, y, lse, *rest)
        ctx.how, ctx.begun, ctx.announced = (scale, kernel, exchange), None, _begin
        return y

    @staticmethod
    def backward(ctx, dy):
        if ctx.begun is None:
            _begin(ctx)
        (q, k, v, y, lse, *rest), theirs = ctx.begun
        ctx.begun = None
        scale, kernel, _ = ctx.how
        widths, dq, start = (k.shape[3], v.shape[3]), None, 0
        dy, y = (t.view(*q.shape[:3], -1) for t in (dy, y))
        wide = q.dtype if theirs.count == 1 else torch.float32  # the sum of two is rounded once in either
        for block in theirs.blocks():
            first, (keys, values) = block.first, block.pairs.split(widths, -1)
            operands = map(_heads, (dy[first:], q[first:], keys, values, y[first:]))
            grads = kernel.against(block).backward(*operands, lse[..., first:].contiguous(), False, scale, *rest)
            of_queries, *of_pairs = (t.permute(2, 0, 1, 3) for t in grads)
            del block, keys, values, grads, operands
            theirs.send(of_pairs)
            if dq is None:
                dq, start = of_queries.to(wide), first
            else:  # no later block has more queries
                dq[first - start :].add_(of_queries)
            del of_queries
        grads = kernel.backward(*map(_heads, (dy, q, k, v, y)), lse, True, scale, *rest)
        total, dk, dv = (t.permute(2, 0, 1, 3) for t in grads)
        total[start:].add_(dq)
        theirs.add_received(dk, dv)
        return total, dk, dv, None, None, None


def _begin(ctx) -> None:
    """Ask the other ranks for K and V, which the backward pass of _ContextAttention needs.

    Not yet if they have no memory: --recompute-modules mla_up_proj computes them again when the gradient comes.
    """
    saved = ctx.saved_tensors
    if saved[1].untyped_storage().nbytes():
        ctx.begun = saved, ctx.how[2](_side_by_side(*saved[1:3]))


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(t, b, ng, hn + hv): a view if each v follows its k in memory, as the split of QKV leaves them."""
    after = k.data_ptr() + k.shape[3] * k.itemsize
    if v.data_ptr() == after and v.stride() == k.stride() and v.untyped_storage()._cdata == k.untyped_storage()._cdata:
        return k.as_strided((*k.shape[:3], k.shape[3] + v.shape[3]), k.stride())
    return torch.cat([k, v], -1)


def _heads(t: torch.Tensor) -> torch.Tensor:
    """(s, b, heads, hn) -> torch's kernels' order, (b, heads, s, hn): a view."""
    return t.permute(1, 2, 0, 3)


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


def _logits(q, k, causal: bool, scale: float, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """(b, ng, np / ng, s, t) in FP32.  hidden: (s, t), True for keys that a query does not see."""
    logits = scale * q.unflatten(1, (k.shape[1], -1)).float() @ k.unsqueeze(2).float().transpose(-1, -2)
    if causal:
        logits.masked_fill_(torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)


def _plain(q, k, v, causal: bool, scale: float, hidden: torch.Tensor | None = None):
    """The formula, in FP32; it runs on a CPU."""
    logits = _logits(q, k, causal, scale, hidden)
    lse = logits.logsumexp(-1, keepdim=True)  # -inf for a query that sees no key
    out = (logits - lse.nan_to_num()).exp() @ v.unsqueeze(2).float()
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2).squeeze(-1), ()


def _plain_backward(dout, q, k, v, out, lse, causal: bool, scale: float, hidden: torch.Tensor | None = None):
    groups = k.shape[1]
    dout, out, lse = (t.unflatten(1, (groups, -1)).float() for t in (dout, out, lse.unsqueeze(-1)))
    p = (_logits(q, k, causal, scale, hidden) - lse).exp()
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


@dataclasses.dataclass(frozen=True)
class PackedKernel:
    """As Kernel, of a row of documents (packed.py): a query sees keys of its own document alone.

    Queries and keys of a block are chunks in the row's order, so a document's lie side by side in both, and one call of
    the kernel of variable length serves all documents. Many have no query in a block, or no key.

    Attributes:
        chunk: its number of tokens.
        queries, keys: of the block, as chunks of the row.
        fused: whether torch's flash kernel computes it, on a GPU.
    """

    documents: Documents
    chunk: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    fused: bool

    def against(self, block: Block) -> "PackedKernel":
        """What computes own queries against this block."""
        return dataclasses.replace(self, queries=self.queries[block.first // self.chunk :], keys=block.chunks)

    def forward(self, q, k, v, causal: bool, scale: float):
        ends = [self.documents.ends_in(chunks, self.chunk) for chunks in (self.queries, self.keys)]
        if not self.fused:
            return _plain(q, k, v, causal, scale, _apart(*ends))
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out, lse, *random, _ = _aten._flash_attention_forward(
            q, k, v, *ends, *self._longest(), 0.0, causal, False, scale=scale
        )
        # For a query that sees no key the kernel's logarithm is +inf.
        return out.transpose(0, 1)[None], lse.masked_fill(lse == torch.inf, -torch.inf)[None], tuple(random)

    def backward(self, dout, q, k, v, out, lse, causal: bool, scale: float, *random):
        ends = [self.documents.ends_in(chunks, self.chunk) for chunks in (self.queries, self.keys)]
        if not self.fused:
            return _plain_backward(dout, q, k, v, out, lse, causal, scale, _apart(*ends))
        dout, q, k, v, out = (t[0].transpose(0, 1) for t in (dout, q, k, v, out))
        grads = _aten._flash_attention_backward(
            dout, q, k, v, out, lse[0], *ends, *self._longest(), 0.0, causal, *random, scale=scale
        )
        return tuple(t.transpose(0, 1)[None] for t in grads)

    def _longest(self) -> list[int]:
        """Upper bounds of the queries, and of the keys, that a document has in the block."""
        return [min(self.documents.longest, len(chunks) * self.chunk) for chunks in (self.queries, self.keys)]


def _apart(*ends: torch.Tensor) -> torch.Tensor:
    """(s, t): whether a query and a key belong to different documents, which end at these queries and keys."""
    of_query, of_key = (torch.searchsorted(of[1:], torch.arange(int(of[-1])), right=True) for of in ends)
    return of_query[:, None] != of_key
