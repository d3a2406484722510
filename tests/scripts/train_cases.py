"""Trains commands, each in ranks forked from this warm process, and prints a line of JSON for each run.

    train_cases.py stock|level < cases      a line of JSON a case: [RANKS, FLAGS]

`stock` is Megatron's own Transformer Engine spec, over a stand-in for that library (stand_in_te.py).  `level` is O1
with BF16 GEMMs and FP32 gradients: it computes what stock computes, by the level's whole path.

    {"ranks": ..., "case": FLAGS, "code": exit code, "losses": [{name: value}], "norms": [...], "said": [last lines]}

The numbers are those of --fp8-log-exact, with all their digits.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

LEVEL = "--fp8-level O1 --fp8-gemm bf16 --fp8-grad-accum fp32 --fp8-grad-reduce fp32".split()
EXACT = re.compile(r"\[fp8\] iteration \d+: (exact .*)")


def train(count: int, flags: list[str]) -> dict:
    from megatron_fp8.tools.rehearsal import ranks

    variables = {"NVTE_APPLY_QK_LAYER_SCALING": str(int("--apply-query-key-layer-scaling" in flags))}
    if "--deterministic-mode" in flags:
        variables |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    command = [str(REPOSITORY / "pretrain_gpt_fp8.py"), *flags, "--fp8-log-exact"]
    with tempfile.TemporaryFile("w+", errors="replace") as output, tempfile.TemporaryDirectory() as folder:
        run = ranks.launch(count, command, output=output.fileno(), timeout=300, env=env, cwd=folder)
        code = ranks.wait(run)
        output.seek(0)
        lines = output.read().splitlines()
    found = [_values(match[1]) for match in map(EXACT.match, lines) if match]
    norms = [values.pop("grad norm", None) for values in found]
    said = [line[:500] for line in lines if line.strip() and not line.startswith("[ranks]")][-12:]
    return {"code": code, "losses": found, "norms": norms, "said": said if code else []}


def _values(text: str) -> dict[str, float]:
    """Of "exact lm loss 5.48; exact grad norm 3.1"."""
    words = (part.removeprefix("exact ").rpartition(" ") for part in text.split("; "))
    return {name: float(value) for name, _, value in words}


def main(side: str) -> None:
    if side == "stock":
        import stand_in_te

        stand_in_te.install()
    from megatron_fp8.tools.rehearsal import ranks

    ranks.warm_up()
    from training_cases import command

    for line in sys.stdin:
        count, case = json.loads(line)
        flags = [*command(case), *(LEVEL if side == "level" else ())]
        print(json.dumps({"ranks": count, "case": case, **train(count, flags)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
