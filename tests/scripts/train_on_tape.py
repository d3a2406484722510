"""pretrain_gpt_fp8.py on the CPU, its graphs tapes (tests/tape.py)."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tape

if __name__ == "__main__":
    tape.install()
    runpy.run_path(str(ROOT / "pretrain_gpt_fp8.py"), run_name="__main__")
