"""Hidden communication in a trace of a training step: each collective, and how long compute ran beside it.

    TRACE=trace.json.gz python benchmarks/train_step.py --nproc 4 --gbs 64 --systems O1 --overlap-grad-reduce
    python benchmarks/trace_overlap.py trace.json.gz --csv benchmarks/results/overlap_dp4.csv
    python benchmarks/trace_overlap.py trace-0.json.gz trace-1.json.gz               # TRACE=trace-{rank}.json.gz

With the traces of all ranks it says how long a collective's bytes took, and how long each rank waited for the others.
SendRecv is the all-to-all of the linears' gradients, a kernel for each bucket; ReduceScatter is stock's own gradients;
AllGather is the weights.  A collective is hidden for as long as any other kernel runs.
"""

import argparse
import csv
import gzip
import json
import re
from pathlib import Path

from profile_gpt import COLLECTIVES, covered


def collectives(trace: dict) -> list[dict]:
    """Each collective of the step: kind, start, duration and hidden time, in microseconds."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begin = min(e["ts"] for e in kernels)
    compute = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" not in e["name"]]
    found = []
    for event in sorted((e for e in kernels if "nccl" in e["name"]), key=lambda e: e["ts"]):
        start, stop = event["ts"], event["ts"] + event["dur"]
        beside = [(max(a, start), min(b, stop)) for a, b in compute if a < stop and b > start]
        kind = next((c for c in COLLECTIVES if re.search(c, event["name"])), "other")
        found.append(
            {
                "collective": kind,
                "start_us": round(start - begin, 1),
                "duration_us": round(event["dur"], 1),
                "hidden_us": round(covered(beside), 1),
            }
        )
    return found


def beside_each_other(ranks: list[list[dict]]) -> list[dict]:
    """Each collective of all ranks' traces: its kind and number, the shortest of the ranks' durations, and for each
    rank how much longer its own took, and how long nothing else ran beside it.

    A collective moves nothing before its last rank begins. So the last rank's duration is that of the transfer, and
    what another's takes longer is a wait for it. Ranks' clocks need not agree. Raises ValueError if the ranks have
    other numbers of a kind.
    """
    found = []
    for kind in dict.fromkeys(row["collective"] for row in ranks[0]):
        of_kind = [[row for row in rows if row["collective"] == kind] for rows in ranks]
        if len(counts := {len(rows) for rows in of_kind}) > 1:
            raise ValueError(f"{kind}: the traces have {counts} of them")
        for number, same in enumerate(zip(*of_kind, strict=True)):
            transfer = min(row["duration_us"] for row in same)
            row = {"collective": kind, "number": number, "transfer_us": transfer}
            for rank, own in enumerate(same):
                row[f"start_{rank}_us"] = own["start_us"]
                row[f"waits_{rank}_us"] = round(own["duration_us"] - transfer, 1)
                row[f"bare_{rank}_us"] = round(own["duration_us"] - own["hidden_us"], 1)
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="torch's profiler's, .json.gz; of one rank, or all")
    parser.add_argument("--csv", help="write every collective to this file")
    args = parser.parse_args()
    ranks = [collectives(json.loads(gzip.decompress(Path(trace).read_bytes()))) for trace in args.traces]
    rows = beside_each_other(ranks) if len(ranks) > 1 else ranks[0]
    if len(ranks) > 1:
        print("collective      kernels   ms of transfer   and of waits; bare, on each rank")
    else:
        print("collective      kernels   ms in all   hidden     left")
    for kind in dict.fromkeys(row["collective"] for row in rows):
        own = [row for row in rows if row["collective"] == kind]

        def total(name: str, own=own) -> float:
            return sum(row[f"{name}_us"] for row in own) / 1e3

        if len(ranks) > 1:
            of_ranks = "   ".join(f"{total(f'waits_{i}'):.2f}; {total(f'bare_{i}'):.2f}" for i in range(len(ranks)))
            print(f"{kind:15} {len(own):7} {total('transfer'):16.2f}   {of_ranks}")
        else:
            took, hidden = total("duration"), total("hidden")
            print(f"{kind:15} {len(own):7} {took:11.2f} {hidden / took:8.1%} {took - hidden:8.2f}")
    if args.csv:
        with Path(args.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
