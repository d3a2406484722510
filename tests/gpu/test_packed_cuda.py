"""Attention of packed documents on CUDA: torch's kernel of variable length against a call a document.

Also whether the kernel takes fewer heads of K and V, a window, and values of another size; and two runs' bits.
"""

import pytest
import torch

from megatron_fp8.layers import packed
from megatron_fp8.layers.packed import Documents

pytestmark = pytest.mark.gpu
ENDS = [0, 700, 701, 701, 1500, 4096]
SHAPES = [(32, 32, 128, 128), (32, 8, 128, 128), (9, 3, 64, 64), (16, 16, 192, 128), (8, 4, 100, 60)]


def operands(heads, groups, hn, hv):
    seed = torch.seed() % 2**32
    print(f"torch.manual_seed({seed})")  # shown when the test fails
    torch.manual_seed(seed)
    sizes = (heads, hn), (groups, hn), (groups, hv), (heads, hv)
    *qkv, grad = (torch.randn(ENDS[-1], *size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return [t.requires_grad_() for t in qkv], grad


def results(attend, qkv, grad, window):
    documents = Documents(torch.tensor(ENDS, dtype=torch.int32, device="cuda"), 2596)
    q, k, v = qkv
    out = attend(q, k, v, documents, window, q.shape[-1] ** -0.5)
    return [out, *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_kernel_is_a_call_a_document(shape, window):
    qkv, grad = operands(*shape)
    found = results(packed._in_one_kernel, qkv, grad, window)
    exact = [t.detach().float().requires_grad_() for t in qkv]
    for ours, theirs in zip(found, results(packed._one_by_one, exact, grad.float(), window), strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < 1e-2, error


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_transformer_engines_attention_is_the_same(shape):
    """Stock's --sft has it: a result and gradients that differ no more than two kernels in BF16.

    Transformer Engine looks for a cuDNN of the system first. If there is another one than torch's, parts of the two do
    not fit: let CUDNN_HOME, and LD_LIBRARY_PATH's first folder, be the folder of torch's (nvidia/cudnn/lib).
    """
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
    heads, groups, hn, _ = shape
    core = te.DotProductAttention(
        heads, hn, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )

    def theirs(q, k, v, documents, window, scale):
        ends = documents.ends.unique_consecutive()  # no empty document
        sizes = {"max_seqlen_q": documents.longest, "max_seqlen_kv": documents.longest}
        return core(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, **sizes).view(-1, heads, hn)

    qkv, grad = operands(*shape)
    for a, b in zip(results(packed._in_one_kernel, qkv, grad, None), results(theirs, qkv, grad, None), strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 1e-2


def test_no_wait_for_the_host():
    qkv, grad = operands(32, 8, 128, 128)
    results(packed._in_one_kernel, qkv, grad, None)
    documents = Documents(torch.tensor(ENDS, dtype=torch.int32, device="cuda"), 2596)
    table = torch.randn(2596, 1, 1, 128, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        documents.by_position(table, ENDS[-1])
        q, k, v = qkv
        packed._in_one_kernel(q, k, v, documents, None, 0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
