"""Time to reduce gradients over data parallelism: stock's collectives and ours, in one run.

    torchrun --nproc-per-node 4 benchmarks/grad_reduce.py --csv benchmarks/results/grad_reduce.csv
    torchrun --nproc-per-node 2 benchmarks/grad_reduce.py --mi 1        # any machine (gloo), checks the script

Every row starts from a rank's own random gradients in the named storage and ends with the FP32 sum of this rank's shard
(stock's BF16: a BF16 sum).  Stock's rows are one collective. Ours go in a few pieces, like buckets in training: all
pieces are started, then each is summed while the next are on the wire.

Time: the median over repetitions of the slowest rank, by CUDA events after a barrier and a short sleep of the GPU,
during which the host gets ahead as in a backward pass.  Error: of the summed shard against FP64, over all ranks.
"""

import argparse
import csv
import datetime
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from train_step import stamp

from megatron_fp8 import ops
from megatron_fp8.comm.reduce import reduce_blocks
from megatron_fp8.comm.shared import SharedScale
from megatron_fp8.comm.wire import Flight, own_shard, sent_bytes
from megatron_fp8.numerics.auto_scaling import ScalingRule
from megatron_fp8.numerics.blocks import PackedBlocks

MI = 2**20
TENSOR = 16 * MI  # elements of a tensor, for modes with a scale for each tensor


def systems(gradient: torch.Tensor, group, pieces: int) -> dict:
    """{row: function that reduces from the row's storage to the sum}. gradient: (n,) FP32, this rank's own."""
    ranks, device, n = group.size(), gradient.device, gradient.numel()
    bf16 = gradient.bfloat16()

    def pack(values: torch.Tensor) -> PackedBlocks:
        return ops.quantize_blocks(values, out=PackedBlocks.empty(ranks, values.numel() // ranks, device))

    packed = [pack(part) for part in gradient.chunk(pieces)]
    room = [PackedBlocks.empty(ranks, n // pieces // ranks, device) for _ in packed]
    spans = [(a, min(a + TENSOR, n // pieces), i) for i, a in enumerate(range(0, n // pieces, TENSOR))]
    shared = SharedScale(ScalingRule(), [b - a for a, b, _ in spans], group, group, True, device)
    shard16 = torch.empty(n // ranks, dtype=torch.bfloat16, device=device)
    copy = gradient.clone()

    def stock_fp32():
        shard = own_shard(copy, group)
        dist.reduce_scatter_tensor(shard, copy, group=group)
        return [shard]

    def stock_bf16():
        dist.reduce_scatter_tensor(shard16, bf16, group=group)
        return [shard16]

    def stock_bf16_fp32_sum():  # --ddp-reduce-scatter-with-fp32-accumulation
        received = torch.empty_like(bf16)
        dist.all_to_all_single(received, bf16, group=group)
        return [received.view(ranks, -1).sum(0, dtype=torch.float32)]

    def block(sent):
        flights = [Flight(reduce_blocks(s, group, True, receive=r)) for s, r in zip(sent, room, strict=True)]
        return [flight.land().take() for flight in flights]

    def shared_scale():
        flights = []
        for part in bf16.chunk(pieces):
            for flight in flights:
                flight.advance()
            flights.append(Flight(shared.reduce(part, spans)))
        return [flight.land().take() for flight in flights]

    return {
        "fp32 (stock)": stock_fp32,
        "bf16 (stock)": stock_bf16,
        "bf16, fp32 sum (stock)": stock_bf16_fp32_sum,
        "block, from fp8 storage": lambda: block(packed),
        "block, from bf16 storage": lambda: block(map(pack, bf16.chunk(pieces))),
        "block, from fp32 storage": lambda: block(map(pack, gradient.chunk(pieces))),
        "shared, from bf16 storage": shared_scale,
    }


def milliseconds(reduce, repetitions: int, device) -> float:
    """Median time of the slowest rank."""
    times = []
    for i in range(repetitions + 3):
        dist.barrier()
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # cycles, about a millisecond
            begin.record()
            reduce()
            end.record()
            torch.cuda.synchronize()
            ms = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            reduce()
            ms = (time.perf_counter() - start) * 1e3
        slowest = torch.tensor(ms, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if i >= 3:
            times.append(slowest.item())
    return statistics.median(times)


def relative_error(shards: list[torch.Tensor], truth: torch.Tensor, group) -> float:
    """||sum - truth|| / ||truth|| over all ranks. shards: of the pieces of `truth` (n,), FP64."""
    squares = torch.zeros(2, dtype=torch.float64, device=truth.device)
    for shard, part in zip(shards, truth.chunk(len(shards)), strict=True):
        true = own_shard(part, group)
        squares += torch.stack([(shard.double() - true).square().sum(), true.square().sum()])
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mi", type=int, default=256, help="gradients, in Mi")
    parser.add_argument("--pieces", type=int, default=1, help="number of pieces for ours")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--csv", help="append the figures to this file")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=2))
    group, rank = dist.group.WORLD, dist.get_rank()

    torch.manual_seed(rank)
    gradient = torch.randn(args.mi * MI, device=device)
    truth = gradient.double()  # summed over ranks in FP64, an eighth at a time
    for part in truth.chunk(8):
        dist.all_reduce(part)

    rows = []
    for name, reduce in systems(gradient, group, args.pieces).items():
        sent_bytes.clear()
        error = relative_error(reduce(), truth, group)
        sent = sum(sent_bytes.values()) / gradient.numel()
        ms = round(milliseconds(reduce, args.repetitions, device), 4)
        rows.append({"reduction": name, "ms": ms, "bytes_sent": round(sent, 4), "error": error})
        if rank == 0:
            stock = {row["reduction"]: row["ms"] for row in rows}
            ratios = [f"{rows[-1]['ms'] / stock[k]:5.2f}" for k in ("fp32 (stock)", "bf16 (stock)") if k in stock]
            wire = f"{sent:5.3f} B sent" if sent else ""
            print(
                f"{name:26} {rows[-1]['ms']:8.3f} ms   x fp32, bf16: {' '.join(ratios):11}  error {error:.3%}  {wire}",
                flush=True,
            )
    if args.csv and rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else ""
        made = {**stamp(), "gpus": group.size(), "nccl": nccl, "mi": args.mi, "pieces": args.pieces}
        path = Path(args.csv)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[*made, *rows[0]])
            if new:
                writer.writeheader()
            writer.writerows({**made, **row, "error": round(row["error"], 6)} for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
