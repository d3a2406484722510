"""Every rank has a shard of a vocabulary: the loss and its gradient are those of the whole, on every rank, and nearly
stock's.  One collective a loss."""

import warnings

import torch
import torch.distributed as dist

from megatron_fp8.layers.cross_entropy import cross_entropy

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
alone = [dist.new_group([member]) for member in range(ranks)][rank]
draw = torch.Generator().manual_seed(13)
calls = []


def run(loss_of, logits, target, group, dloss):
    logits = logits.clone().requires_grad_()
    loss = loss_of(logits, target, tp_group=group)
    loss.backward(dloss)
    return loss.detach(), logits.grad


def ours(logits, target, tp_group):
    return cross_entropy(logits, target, tp_group)


def counted(*args, **kwargs):
    calls.append("all-gather")
    return gather(*args, **kwargs)


def check(dtype):
    whole = (torch.randn(6, 3, 40 * ranks, generator=draw) * 4).to(dtype)
    target = torch.randint(40 * ranks, (6, 3), generator=draw)
    target[0, 0], target[0, 1], target[0, 2] = -1, 0, 40 * ranks - 1
    whole[1, 0, :40] = -torch.inf  # all of rank 0's
    whole[1, 1, 40:] = -torch.inf  # all of the others'
    target[1, 0], target[1, 1] = 41, 3
    whole[1, 2, 7] = torch.nan
    dloss = torch.rand(6, 3, generator=draw) * (torch.rand(6, 3, generator=draw) < 0.7)
    dloss[1, 2] = 0.5

    mine = whole.chunk(ranks, 2)[rank]
    calls.clear()
    loss, gradient = run(ours, mine, target, group, dloss)
    assert calls == ["all-gather"]
    everyone = [torch.empty_like(loss) for _ in range(ranks)]
    dist.all_gather(everyone, loss)
    assert all(torch.equal(loss.view(torch.int32), other.view(torch.int32)) for other in everyone)
    close = {"rtol": 1e-5 if dtype == torch.float32 else 2**-7, "atol": 1e-6, "equal_nan": True}
    expected, dx = run(ours, whole, target, alone, dloss)
    assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert loss.isnan().sum() == 1 and loss[1, 2].isnan()
    assert torch.allclose(gradient, dx.chunk(ranks, 2)[rank], **close)
    expected, dx = run(vocab_parallel_cross_entropy, mine, target, group, dloss)
    assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.allclose(gradient, dx, **close)


gather, dist.all_gather_into_tensor = dist.all_gather_into_tensor, counted
for dtype in (torch.bfloat16, torch.float32):
    check(dtype)
print("as one\n", end="", flush=True)
