"""Cross-entropy of BF16 logits on one GPU: ours and both of stock's, checked against each other, then timed.

    python benchmarks/fused_cross_entropy.py --csv fused_cross_entropy.csv        sized for a minute on an H200

The method and the columns are those of ops.py. GB/s counts the bytes that must move: forward a read of the logits, 2
bytes each; backward a read and a write, 4, or 3 if half of the rows are masked. A whole loss must move 6, and stock's
GB/s use the same 6. "step" is a forward and a backward pass through autograd, as in training, except that the gradient
gets new memory (a leaf's logits stay). Stock's backward pass is its step minus its forward pass. Rows with a
configuration compare launch configurations; the default is in ops/triton/cross_entropy.py.
"""

import torch
import torch.distributed as dist
from ops import Table
from timed_rows import measured

from megatron_fp8 import ops
from megatron_fp8.layers.cross_entropy import cross_entropy
from megatron_fp8.ops.triton import cross_entropy as kernels

SHAPES = [(8192, 50_304), (8192, 6288), (8192, 128_256), (2048, 50_257)]
SWEPT = SHAPES[:1]
STATISTICS = [(1024, 4, 4), (1024, 8, 4), (2048, 2, 8)]  # lanes, groups, warps
GRADIENT = [(2048, 4), (4096, 4), (4096, 8)]  # columns, warps


def stocks() -> dict:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return {
        "stock fused": fused_vocab_parallel_cross_entropy,
        "stock": lambda logits, target, group: vocab_parallel_cross_entropy(logits, target, tp_group=group),
    }


def step(loss_of, logits, target, dloss, group):
    """(loss, gradient) of the logits as a leaf."""
    logits = logits.detach().requires_grad_()
    loss = loss_of(logits, target, group)
    return loss.detach(), torch.autograd.grad(loss, logits, dloss)[0]


def check(group) -> None:
    logits = (torch.randn(512, 4, 50_304, device="cuda") * 4).bfloat16()
    target = torch.randint(50_304, (512, 4), device="cuda")
    dloss = torch.rand(512, 4, device="cuda") * (torch.rand(512, 4, device="cuda") < 0.9)
    loss, gradient = step(cross_entropy, logits, target, dloss, group)
    for name, loss_of in stocks().items():
        other, theirs = step(loss_of, logits, target, dloss, group)
        assert torch.allclose(loss, other, rtol=1e-5, atol=1e-6), name
        assert torch.allclose(gradient, theirs, rtol=2**-7, atol=1e-6), name
        print(f"{name}: of the gradient's BF16 numbers {(gradient != theirs).float().mean().item():.1e} differ")


def best(rows: list[dict]) -> None:
    print(f"    {rows[0]['name']}: best {min(rows, key=lambda row: row['ms'])['config']}")


def bench(table: Table, shape: tuple[int, int], group) -> None:
    rows, columns = shape
    logits = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=4)
    target, dloss = torch.randint(columns, (rows,), device="cuda"), torch.rand(rows, device="cuda")
    size = logits.nbytes
    statistics = ops.cross_entropy_statistics(logits, target, 0)
    _, normalizer = ops.cross_entropy_loss(statistics[None], target, columns)
    out = torch.empty_like(logits)

    def forward():
        ops.cross_entropy_loss(ops.cross_entropy_statistics(logits, target, 0)[None], target, columns)

    def backward(dloss=dloss, out=out):
        ops.cross_entropy_gradient(logits, target, 0, normalizer, dloss, out)

    table.add("forward", shape, forward, numbytes=size)
    for ranks in (1, 8):
        shared = statistics.expand(ranks, 3, rows).contiguous()
        table.add(f"loss of {ranks} ranks", (rows,), lambda s=shared: ops.cross_entropy_loss(s, target, columns))
    if shape in SWEPT:
        chosen, first = (kernels.LANES, kernels.GROUPS, kernels.STATISTICS_WARPS), len(table.rows)
        for config in STATISTICS:
            kernels.LANES, kernels.GROUPS, kernels.STATISTICS_WARPS = config
            table.add("forward", shape, forward, config=str(config), numbytes=size)
        kernels.LANES, kernels.GROUPS, kernels.STATISTICS_WARPS = chosen
        best(table.rows[first:])
        chosen, first = (kernels.BLOCK, kernels.GRADIENT_WARPS), len(table.rows)
        for config in GRADIENT:
            kernels.BLOCK, kernels.GRADIENT_WARPS = config
            table.add("backward", shape, backward, config=str(config), numbytes=2 * size)
        kernels.BLOCK, kernels.GRADIENT_WARPS = chosen
        best(table.rows[first:])
    table.add("backward", shape, backward, numbytes=2 * size)
    masked = dloss * (torch.arange(rows, device="cuda") % 2)
    table.add("backward, half masked", shape, lambda: backward(masked), numbytes=3 * size // 2)
    for name, loss_of in {"ours": cross_entropy, **stocks()}.items():
        given = logits[:, None], target[:, None]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss_of, *given, dloss[:, None], group)
        memory = (torch.cuda.max_memory_allocated() - before) / 1e9
        with torch.no_grad():
            table.add(f"{name}: forward", shape, lambda f=loss_of, g=given: f(*g, group), numbytes=size)
        table.add(
            f"{name}: step", shape, lambda f=loss_of, g=given: step(f, *g, dloss[:, None], group), numbytes=3 * size
        )
        print(f"    {name}: at most {memory:.2f} GB beside logits of {size / 1e9:.2f}")
    table.add("backward, in place", shape, lambda: backward(out=logits), numbytes=2 * size)  # last: overwrites logits


def main() -> None:
    with measured(__doc__, Table) as table:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        check(group)
        source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda").normal_()
        target = torch.empty_like(source)
        table.add("copy", source.shape, lambda: target.copy_(source), numbytes=2 * source.nbytes)
        for shape in SHAPES:
            bench(table, shape, group)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
