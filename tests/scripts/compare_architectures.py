"""Compares every case of architecture_cases.py, or those given, and prints a line of JSON for each.

With --real-te first it is with Transformer Engine itself, on a GPU, else with the stand-in.

    {"case": ..., "verdict": "same" | "refused" | "differs" | "stock fails", "details": [...], "effect": bool}

`effect` says whether stock's own model shows the flag: whether it differs from that of the line without its first flag.
"""

import functools
import json
import logging
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import architecture
import architecture_cases

BOUND = 1e-4  # FP32 in another order
TF32_BOUND = 3e-2  # what Transformer Engine makes of FP32 operands


def without_first_flag(argv: list[str]) -> list[str]:
    end = next((i for i, word in enumerate(argv) if i and word.startswith("--")), len(argv))
    return argv[end:]


@functools.cache
def stocks(case: str):
    """Of many lines that differ in their first flag the rest is the same."""
    return architecture.describe(architecture.build(case.split(), level=False))


def compare(argv: list[str], bound: float) -> dict:
    from megatron_fp8.flags.config import adapt_stock_args, config_from_args
    from megatron_fp8.flags.stock import ADAPTED, rows

    args = architecture.parser().parse_args([*architecture.BASE, *architecture.LEVEL, *argv])
    args.rank, args.world_size = 0, 1
    try:
        config = config_from_args(args)
    except ValueError as refusal:
        return {"verdict": "refused", "details": [str(refusal)]}
    adapted = {row.flag for row in rows(args, ADAPTED)} | (set(argv) & architecture.RANDOM)
    adapt_stock_args(args, config)
    try:
        stock = stocks(" ".join(argv))
    except Exception as error:
        return {"verdict": "stock fails", "details": [repr(error)]}
    try:
        ours = architecture.describe(architecture.build(argv, level=True))
    except Exception:
        return {"verdict": "differs", "details": traceback.format_exc().splitlines()[-5:]}
    found = architecture.differences(stock, ours, bound, frozenset(adapted))
    try:
        base = stocks(" ".join(without_first_flag(argv)))
        effect = bool(architecture.differences(base, stock, 1e-5))
    except Exception:  # the flag's companions need it
        effect = True
    return {"verdict": "differs" if found else "same", "details": found[:12], "effect": effect}


def main(cases: list[str]) -> None:
    if cases[:1] == ["--real-te"]:
        architecture.start()
        report(cases[1:], TF32_BOUND)
        return
    import stand_in_te

    stand_in_te.install()
    from megatron_fp8 import cpu
    from megatron_fp8.flags import stock as stock_flags

    cpu.install()
    architecture.start()
    # An event of the stand-in for CUDA is that of its stream.
    events = mock.patch.object(cpu._Stream, "record_event", lambda stream: stream)
    with events, mock.patch.object(stock_flags, "installed", lambda module: False):
        report(cases or architecture_cases.case_lines(), BOUND)


def report(cases: list[str], bound: float) -> None:
    for case in cases:
        print(json.dumps({"case": case, **compare(case.split(), bound)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
