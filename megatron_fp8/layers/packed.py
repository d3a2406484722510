"""Documents packed into one row: none sees another, and each has positions from its own beginning.

    tokens      | a a a a a | b b b | c c c c c c |        (t, 1, ...), one row for any micro-batch
    ends        0           5       8             14       cu_seqlens (n + 1,) int32, on the device
    positions     0 1 2 3 4   0 1 2   0 1 2 3 4 5

Megatron gives every layer a PackedSeqParams with cu_seqlens. In every layer its own rotary embedding then cuts the row
on the host, one document at a time. Here positions, and tables of cosines gathered by them, are made once a
micro-batch, on the device. For the layers the row is one sample whose angles differ from token to token. A `Documents`
replaces the parameters between a layer's parts, and only the core attention reads it:

    on a GPU   torch's attention of variable length, the flash kernel: one call for all documents
    else       torch's attention, one call a document; it is also the kernel's reference

Context parallelism cuts the row as any sequence, in chunks, wherever documents end (context_parallel.py).

Padding between documents (cu_seqlens_*_padded) belongs to the document before it: attention is causal, so no token
before the padding sees it.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UserError
from .context_exchange import own_chunks


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory: recomputation brings another tensor of it."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


@dataclass(eq=False)
class Documents:
    """Where the documents of a row are.

    Attributes:
        ends: (n + 1,) int32: 0, and where each document ends; the last at the row's end.
        longest: an upper bound of a document's length.
        context: the context-parallel ranks that share the row, each with two of its chunks; None: one rank has it.
        qkv_format: Megatron's attention asks for it; with this value it does nothing of its own.
    """

    ends: torch.Tensor
    longest: int
    context: Any = None
    qkv_format: str = "documents"
    _positions: torch.Tensor | None = None
    _gathered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _cut: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def positions(self, length: int) -> torch.Tensor:
        """(length,) int64: the place in its document of each token that this rank has."""
        if self._positions is None:
            ranks = 1 if self.context is None else self.context.size()
            tokens = torch.arange(length * ranks, device=self.ends.device, dtype=self.ends.dtype)
            if ranks > 1:
                chunks = tokens.view(2 * ranks, -1)
                tokens = torch.cat([chunks[i] for i in own_chunks(self.context.rank(), ranks)])
            document = torch.searchsorted(self.ends[1:], tokens, right=True)
            self._positions = tokens.long() - self.ends.long()[document]
        return self._positions

    def ends_in(self, chunks: tuple[int, ...], size: int) -> torch.Tensor:
        """(n + 1,) int32: where documents end in these chunks of the row, of `size` tokens, one after the other."""
        if chunks not in self._cut:
            self._cut[chunks] = torch.stack([(self.ends - i * size).clamp(0, size) for i in chunks]).sum(0).int()
        return self._cut[chunks]

    def by_position(self, table: torch.Tensor, length: int) -> torch.Tensor:
        """The rows of a table (positions, ...) for `length` tokens; made once for a table."""
        for known, gathered in self._gathered:
            if same_memory(known, table):
                return gathered
        gathered = table.detach()[self.positions(length)]
        self._gathered.append((table.detach(), gathered))  # held, so that no other takes its memory
        return gathered


def documents_of(params) -> Documents:
    """The Documents of a PackedSeqParams in the thd form; all layers share it. UserError for another form."""
    if isinstance(params, Documents):
        return params
    if params.qkv_format != "thd":
        raise UserError(f"packed sequences of the form {params.qkv_format} are not known without --fp8-attention te")
    found = getattr(params, "fp8_documents", None)
    if found is None:
        padded = params.cu_seqlens_q_padded
        ends = params.cu_seqlens_q if padded is None else padded
        found = params.fp8_documents = Documents(ends, int(params.max_seqlen_q))
    return found


def share_row(params, group) -> None:
    """Say that the row of a PackedSeqParams is cut over context-parallel ranks as any sequence, in chunks. Stock cuts
    each document by itself."""
    params.fp8_documents = Documents(params.cu_seqlens_q, int(params.max_seqlen_q), group)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, window: int | None, scale: float
) -> torch.Tensor:
    """Causal attention within each document: q (t, np, hn), k (t, ng, hn), v (t, ng, hv) -> (t, np, hv).

    window: how many keys before its own a query sees; None: all of its document.
    """
    attend_to = _in_one_kernel if q.is_cuda else _one_by_one
    return attend_to(q, k, v, documents, window, scale)


def _in_one_kernel(q, k, v, documents: Documents, window: int | None, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # its operators are for a GPU

    wanted = v.shape[-1]
    # The kernel takes one head size for all three, a multiple of 8.
    width = -(-max(q.shape[-1], wanted) // 8) * 8
    q, k, v = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    ends, longest = documents.ends, documents.longest
    seen = (-1 if window is None else window, 0)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=seen)
    return out[..., :wanted]


def _one_by_one(q, k, v, documents: Documents, window: int | None, scale: float) -> torch.Tensor:
    ends = documents.ends.tolist()
    if ends[-1] != q.shape[0]:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}, and there are {q.shape[0]} tokens")
    parts = []
    for start, stop in itertools.pairwise(ends):
        if start == stop:
            continue
        one, keys, values = (t[start:stop].transpose(0, 1)[None] for t in (q, k, v))  # (1, heads, s, h)
        seen = None
        if window is not None:
            ones = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device)
            seen = ones.tril().triu(-window)
        how = {"scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
        out = F.scaled_dot_product_attention(one, keys, values, seen, is_causal=seen is None, **how)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
