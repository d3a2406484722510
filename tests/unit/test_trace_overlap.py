"""benchmarks/trace_overlap.py: hidden time, and transfers apart from waits."""

import gzip
import json
import sys

import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import trace_overlap

GATHER, SEND, KERNEL = "ncclDevKernel_AllGather_RING", "ncclDevKernel_SendRecv(x)", "attention"


def trace(*events) -> dict:
    """Of (name, start, duration) in us."""
    return {"traceEvents": [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in events]}


FIRST = trace((KERNEL, 1000, 100), (GATHER, 1050, 90), (SEND, 1200, 10), (GATHER, 1300, 20), (KERNEL, 1310, 100))
SECOND = trace((KERNEL, 0, 130), (GATHER, 110, 30), (SEND, 220, 15), (GATHER, 250, 90), (KERNEL, 400, 1))


def test_hidden_is_what_runs_beside():
    rows = trace_overlap.collectives(FIRST)
    assert [(row["collective"], row["duration_us"], row["hidden_us"]) for row in rows] == [
        ("AllGather", 90, 50), ("SendRecv", 10, 0), ("AllGather", 20, 10)
    ]  # fmt: skip


def test_the_rank_that_comes_last_does_not_wait(tmp_path, monkeypatch, capsys):
    """Clocks that differ by a second change nothing; kinds may come in another order."""
    ranks = [trace_overlap.collectives(of) for of in (FIRST, SECOND)]
    rows = trace_overlap.beside_each_other(ranks)
    assert [tuple(row.values()) for row in rows] == [
        ("AllGather", 0, 30, 50, 60, 40, 110, 0, 10),
        ("AllGather", 1, 20, 300, 0, 10, 250, 70, 90),
        ("SendRecv", 0, 10, 200, 0, 10, 220, 5, 15),
    ]
    files = [tmp_path / f"{i}.json.gz" for i in range(2)]
    for file, of in zip(files, (FIRST, SECOND), strict=True):
        file.write_bytes(gzip.compress(json.dumps(of).encode()))
    monkeypatch.setattr(sys, "argv", ["trace_overlap.py", *map(str, files), "--csv", str(tmp_path / "rows.csv")])
    trace_overlap.main()
    assert "AllGather             2             0.05   0.06; 0.05   0.07; 0.10" in capsys.readouterr().out
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4


def test_traces_of_other_steps_are_refused():
    one = trace_overlap.collectives(trace((GATHER, 0, 1)))
    with pytest.raises(ValueError, match="AllGather"):
        trace_overlap.beside_each_other([one, 2 * one])
