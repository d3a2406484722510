"""Time QKV's split with rotary embedding, and the join of its gradients, on one GPU beside stock Megatron's.

    python benchmarks/fused_qkv.py                  sized for a minute on an H200, compilation included

Microseconds are medians of triton.testing.do_bench, which empties the L2 cache before each run; data is random. GB/s
counts the bytes that must move: each element that is read or written once, without the tables. Stock's forward is
torch.split and its unfused rotary embedding under autograd; its backward is autograd's of that. For the FP8 rows
stock's time includes the cast of the BF16 gradient into both layouts.

The last rows are of models with RMSNorm of queries and keys (--qk-layernorm): both norms with rotation, of q and of k,
beside torch's split, norm and stock's rotation.
"""

import argparse

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from stamp import commit
from triton.testing import do_bench

from megatron_fp8 import ops
from megatron_fp8.numerics import E5M2

SHAPES = {  # s, b, groups, query heads a group, size of a head, rotated elements of a head, interleaved
    "7B slice, no rotation": (2048, 4, 32, 1, 128, 0, False),
    "7B slice, rotary": (2048, 4, 32, 1, 128, 128, False),
    "7B slice, interleaved": (2048, 4, 32, 1, 128, 128, True),
    "GPT-125M, rotary": (1024, 32, 12, 1, 64, 64, False),
    "Llama-like, rotary": (4096, 2, 8, 4, 128, 128, False),
    "Llama-like, interleaved": (4096, 2, 8, 4, 128, 128, True),
}

NORMED = {  # s, b, groups, query heads a group, size of a head
    "Qwen3-30B-A3B": (4096, 2, 4, 8, 128),
    "Qwen3 8B": (4096, 2, 8, 4, 128),
}
EPS = 1e-6


def stock_split(mixed, groups, r, angles, interleaved):
    s, b, width = mixed.shape
    hn = width // (groups * (r + 2))
    q, k, v = mixed.view(s, b, groups, -1).split([r * hn, hn, hn], dim=3)
    q = q.reshape(s, b, -1, hn)
    if angles is None:
        return q, k, v
    q, k = (_apply_rotary_pos_emb_bshd(t, angles, rotary_interleaved=interleaved) for t in (q, k))
    return q, k, v


def microseconds(function) -> float:
    return 1e3 * do_bench(function, warmup=10, rep=60, return_mode="median")


def row(name: str, what: str, ours, numbytes: int, stock: float) -> None:
    time = microseconds(ours)
    print(f"{name:24} {what:22} {time:8.1f} us {numbytes / time / 1e3:6.0f} GB/s   stock {stock:8.1f} us", flush=True)


def measure(name: str, shape: tuple[int, ...]) -> None:
    s, b, groups, r, hn, d, interleaved = shape
    mixed = torch.randn(s, b, groups * (r + 2) * hn, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    angles = torch.rand(s, 1, 1, d, device="cuda") * 100 if d else None
    tables = (angles[:, 0, 0].cos(), angles[:, 0, 0].sin()) if d else (None, None)
    parts = stock_split(mixed, groups, r, angles, interleaved)
    grads = [torch.randn(t.shape, dtype=t.dtype, device="cuda") for t in parts]
    scale, largest = torch.tensor(1000.0, device="cuda"), torch.zeros((), device="cuda")
    n, ours, pairing = mixed.numel(), mixed.detach().clone(), {"interleaved": interleaved}

    def stock_backward():
        return torch.autograd.grad(parts, mixed, grads, retain_graph=True)[0]

    def stock_backward_cast():
        gradient = stock_backward().view(s * b, -1)
        return ops.quantize(gradient, E5M2, scale, transpose=True, amax_out=largest)

    in_place = 1 in (groups, r)
    moved = 4 * (n * (r + 1) // (r + 2) * d // hn if in_place else n)
    if moved:  # in place it rotates its own output again, which is the same work
        forward = microseconds(lambda: stock_split(mixed, groups, r, angles, interleaved))
        row(name, "split", lambda: ops.split_qkv(ours, groups, r, *tables, **pairing), moved, forward)
    row(name, "join, BF16", lambda: ops.join_qkv(*grads, *tables, **pairing), 4 * n, microseconds(stock_backward))

    def join(columns):
        how = {"fmt": E5M2, "scale": scale, "columns": columns, "amax_out": largest, **pairing}
        return lambda: ops.join_qkv(*grads, *tables, **how)

    with_cast = microseconds(stock_backward_cast)
    row(name, "join, FP8 rows", join(False), 3 * n, with_cast)
    row(name, "join, FP8 both layouts", join(True), 4 * n, with_cast)


def measure_normed(name: str, shape: tuple[int, ...]) -> None:
    s, b, groups, r, hn = shape
    mixed = torch.randn(s, b, groups * (r + 2) * hn, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    angles = torch.rand(s, 1, 1, hn, device="cuda") * 100
    gains = [torch.ones(hn, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2)]
    heads = mixed.detach().view(s, b, groups, r + 2, hn)
    parts = list(zip((heads[..., :r, :], heads[..., r : r + 1, :]), (gain.detach() for gain in gains), strict=True))
    tables, how = (angles[:, 0, 0].cos(), angles[:, 0, 0].sin()), {"zero_centered": False, "interleaved": False}

    def stock():
        q, k, _ = stock_split(mixed, groups, r, None, False)
        normed = [F.rms_norm(t, (hn,), gain, EPS) for t, gain in zip((q, k), gains, strict=True)]
        return [_apply_rotary_pos_emb_bshd(t, angles, rotary_interleaved=False) for t in normed]

    made = stock()
    grads = [torch.randn_like(t) for t in made]
    n = s * b * groups * (r + 1) * hn

    def forward():
        return [ops.norm_rotate(x, gain, EPS, *tables, **how) for x, gain in parts]

    def backward():
        given = zip(grads, parts, strict=True)
        return [ops.norm_rotate_backward(dy, x, gain, EPS, *tables, **how) for dy, (x, gain) in given]

    row(name, "norm and rotation", forward, 4 * n, microseconds(stock))
    of_stock = microseconds(lambda: torch.autograd.grad(made, [mixed, *gains], grads, retain_graph=True))
    row(name, "backward", backward, 6 * n, of_stock)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {commit()}")
    print("if ours casts, stock's time includes the cast into both layouts")
    for name, shape in SHAPES.items():
        measure(name, shape)
    for name, shape in NORMED.items():
        measure_normed(name, shape)


if __name__ == "__main__":
    main()
