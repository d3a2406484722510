"""Hidden communication in a trace of a training step: each collective, and how long compute ran beside it.

    TRACE=trace.json.gz python benchmarks/train_step.py --nproc 4 --gbs 64 --systems O1 --overlap-grad-reduce
    python benchmarks/trace_overlap.py trace.json.gz --csv benchmarks/results/overlap_dp4.csv

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", help="a trace of torch's profiler, .json.gz")
    parser.add_argument("--csv", help="write every collective to this file")
    args = parser.parse_args()
    rows = collectives(json.loads(gzip.decompress(Path(args.trace).read_bytes())))
    print("collective      kernels   ms in all   hidden     left")
    for kind in COLLECTIVES:
        own = [row for row in rows if row["collective"] == kind]
        took, hidden = (sum(row[f"{name}_us"] for row in own) / 1e3 for name in ("duration", "hidden"))
        if own:
            print(f"{kind:15} {len(own):7} {took:11.2f} {hidden / took:8.1%} {took - hidden:8.2f}")
    if args.csv:
        with Path(args.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
