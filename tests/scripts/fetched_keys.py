"""pretrain_gpt_fp8.py whose --cp-comm-type p2p fetches keys and values of any size. On the CPU its graphs are tapes
(tests/tape.py)."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tape

from megatron_fp8 import cpu
from megatron_fp8.layers import context_parallel

if __name__ == "__main__":
    if cpu.needed():
        tape.install()
    context_parallel.FETCHED_ABOVE = 0
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
