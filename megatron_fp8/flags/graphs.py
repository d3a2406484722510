"""When a level's steps are one CUDA graph: `--cuda-graph-impl full_iteration`, on one GPU, where the host does the
same in each step. A replay runs no Python (engine/step_graph.py).
"""

from argparse import Namespace

from .. import cpu

_WHOLE = "full_iteration"
# With these the host does something in a step that a replay would leave out: noise and formats of the step, counts,
# looks at losses and at what passes, other shapes; or somebody else takes, or saves the place of, data that a replay
# has read ahead.
BY_THE_STEP = """--fp8-emulate --num-experts --mtp-num-layers --check-for-spiky-loss --save-activations-interval
--save-dgrads-interval --log-straggler --sft --iterations-to-skip --result-rejected-tracker-filename
--dataloader-save --dataloader-inter-document-masking --logits-load-dir""".split()
NOISY = "--fp8-grad-accum fp8"


def asked(args: Namespace) -> bool:
    """Whether whole steps are to be graphed; Megatron's older spelling is --cuda-graph-scope full_iteration.

    args: before Megatron's validation or after it, which translates the older spelling and deletes its attribute.
    """
    scopes = [*(getattr(args, "cuda_graph_scope_deprecated", None) or ()), *(args.cuda_graph_modules or ())]
    return args.cuda_graph_impl == _WHOLE or (args.cuda_graph_impl == "local" and _WHOLE in scopes)


def one_gpu(args: Namespace) -> bool:
    """Whether the run has one GPU, and one process."""
    return not cpu.needed() and args.world_size == 1


def differ(args: Namespace) -> bool:
    """Whether the host's part differs between steps."""
    # The last are flags of some scripts only.
    given = (getattr(args, flag.removeprefix("--").replace("-", "_"), None) for flag in BY_THE_STEP)
    return args.fp8_grad_accum == "fp8" or any(given)


def graphed(args: Namespace) -> bool:
    """Whether whole steps will be graphed."""
    return asked(args) and one_gpu(args) and not differ(args)
