"""`megatron-fp8 VERB ...` whose `build` takes this machine for one with a GPU: its ranks run on the CPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_fp8.cli import main
from megatron_fp8.tools.rehearsal import ahead

if __name__ == "__main__":
    ahead.has_gpu = lambda environment: True
    sys.exit(main())
