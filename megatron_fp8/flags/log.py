"""What a run logs beside Megatron's own lines: the --fp8-log flags, two of them without a level too.

    --fp8-log-interval N      FP8 statistics, every so many steps
    --fp8-log-grad-snr        the signal-to-noise ratio of the reduced gradients, with them
    --fp8-log-exact           loss and gradient norm of every step with all their digits, without a level too
    --fp8-log-update-norm     how far the steps that are logged move the weights, without a level too

All look on: the losses are the same to the last bit.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, refuse, whole

_USUAL = 100  # steps from one log of statistics to the next
INTERVAL = Flag(
    "--fp8-log-interval",
    "Write FP8 statistics to TensorBoard and W&B, and the worst of them to the log, every N steps; 0: never. "
    f"Default {_USUAL} with --tensorboard-dir or --wandb-project, else 0.",
    whole(0, "never"),
)
GRAD_SNR = Flag(
    "--fp8-log-grad-snr",
    "Log the signal-to-noise ratio of the reduced gradients too; the steps that log hold and reduce an FP32 copy of "
    "them (4 bytes a parameter).",
)
EXACT = Flag(
    "--fp8-log-exact",
    "Log loss and gradient norm with all their digits, at any level and without one: Megatron's log has seven of the "
    "one and three decimals of the other.",
    needs_level=False,
)
UPDATE_NORM = Flag(
    "--fp8-log-update-norm",
    "Log how far every --log-interval-th step moves the weights, and that by their norm, at any level and without one.",
    needs_level=False,
)
FLAGS = (INTERVAL, GRAD_SNR, EXACT, UPDATE_NORM)


def statistics_interval(args: Namespace) -> int:
    """Steps from one log of FP8 statistics to the next, 0: none. Raises UserError of one line: flag, value, remedy."""
    interval = INTERVAL.given(args)
    if interval is None:
        interval = _USUAL if args.tensorboard_dir or args.wandb_project else 0
    if not interval:
        refuse(args, [GRAD_SNR], ": nothing is logged; add --fp8-log-interval N")
    return interval


def logs_update_norm(args: Namespace) -> bool:
    """Whether a run logs the norm of its updates. Raises UserError of one line: flag, value, remedy."""
    if not UPDATE_NORM.given(args):
        return False
    hiding = {  # their weights are not where the optimizer's are, or they step them elsewhere
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--optimizer-cuda-graph": getattr(args, "optimizer_cuda_graph", False),
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--qk-clip": getattr(args, "qk_clip", False),
        f"--optimizer {args.optimizer}": args.optimizer not in ("adam", "sgd"),
    }
    for flag, given in hiding.items():
        if given:
            raise UserError(f"--fp8-log-update-norm with {flag}: does not see its updates; remove one")
    return True
