"""examples/core_loop.py without a schedule: its trainer calls finalize_model_grads itself, or not at all (unsummed).

tokens: losses are sums, and the number of tokens divides the gradients.  unbegun: the optimizer is not told when a step
begins, which stock's need not know.
"""

import sys

from launch import ROOT

sys.path.insert(0, str(ROOT))
SUMMED = "finalize_model_grads([model], torch.tensor(MICRO_BATCHES * BATCH * LENGTH) if PER_TOKEN else None)"
BY_HAND = f"""reports = []
        for i in range(MICRO_BATCHES):
            with contextlib.nullcontext() if i == MICRO_BATCHES - 1 else model.no_sync():
                losses, mean = forward_step(data, model)
                loss, report = mean(losses)
                (losses.float().sum() if PER_TOKEN else loss / MICRO_BATCHES).backward()
                reports.append(report)
        {"pass" if "unsummed" in sys.argv else SUMMED}"""
CHANGES = {
    "finalize_model_grads_func=finalize_model_grads,": "calculate_per_token_loss=PER_TOKEN,",
    "reports = schedule(forward_only=False)": BY_HAND,
    "import functools": "import contextlib, functools",
    "    schedule = ": "    data = batches(torch.distributed.get_rank())\n    schedule = ",
}
if "unbegun" in sys.argv:
    CHANGES["        optimizer.zero_grad()\n"] = ""
per_token = "tokens" in sys.argv
sys.argv = [word for word in sys.argv if word not in ("tokens", "unsummed", "unbegun")]
source = (ROOT / "examples/core_loop.py").read_text()
for old, new in CHANGES.items():
    assert old in source, old
    source = source.replace(old, new)
exec(compile(source, "core_loop.py", "exec"), {"__name__": "__main__", "PER_TOKEN": per_token})
