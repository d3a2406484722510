"""Shrink the jobs of a file of JSON lines, {"gpus": N, "flags": [...]}, and let Megatron validate both sizes.

Prints a line of JSON a job: what failed, or what the rehearsal is.
"""

import json
import sys
from pathlib import Path

from launch import ROOT

sys.path.insert(0, str(ROOT))
from megatron_fp8.tools.rehearsal import ranks

ranks.warm_up()
from megatron_fp8.flags.command import Launch, take_apart
from megatron_fp8.tools.rehearsal.job import examine
from megatron_fp8.tools.rehearsal.page import Outcome, Start, warnings, write
from megatron_fp8.tools.rehearsal.room import Room
from megatron_fp8.tools.rehearsal.shrink import STEPS, shrink

SCRIPT = str(ROOT / "pretrain_gpt_fp8.py")
for request in map(json.loads, Path(sys.argv[1]).read_text().splitlines()):
    job = examine(take_apart([SCRIPT, *request["flags"]]), request["gpus"])
    if job.args is None:
        print(json.dumps({"error": job.error}), flush=True)
        continue
    mock = bool(job.missing) or job.args.mock_data
    small = shrink(job.flags, job.args, most_ranks=64, free=Room(0), quick_ranks=64, mock_data=mock,
                   all_layers=request.get("all_layers", False), storage=job.cells["grad_accum"])  # fmt: skip
    again = examine(Launch([SCRIPT], small.flags, small.ranks), small.ranks)
    found = {"ranks": small.ranks, "data": small.data_parallel, "left_out": small.left_out, "missing": job.missing}
    found["changes"] = {change.what: [change.before, change.after] for change in small.changes}
    found["rehearsal_error"], found["level"] = again.error, again.level
    found["cells"] = [job.cells, again.cells]
    went = Start("train", 0, 1.0, {STEPS: {"loss": 1.0}}, None, [], [])
    found["page"] = write("", request["gpus"], None, job, small, Outcome(went, went), 0.0)
    found["warnings"] = list(warnings(job, small, Outcome(went, went)))
    if again.args is not None:
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
                 "sequence_parallel", "expert_model_parallel_size", "num_experts", "group_query_attention",
                 "multi_latent_attention", "swiglu", "add_bias_linear", "use_distributed_optimizer", "hidden_size",
                 "num_layers", "num_query_groups", "num_attention_heads", "global_batch_size")  # fmt: skip
        found["kept"] = {name: [getattr(a, name) for a in (job.args, again.args)] for name in names}
    print(json.dumps(found), flush=True)
