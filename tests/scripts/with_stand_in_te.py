"""pretrain_gpt_fp8.py where `import transformer_engine` finds a stand-in: what stock computes with its TE spec."""

import runpy
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import stand_in_te

stand_in_te.install()
runpy.run_path(str(REPOSITORY / "pretrain_gpt_fp8.py"), run_name="__main__")
