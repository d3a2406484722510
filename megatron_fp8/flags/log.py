"""The --fp8-log flags: what a run logs in addition to Megatron's own lines.

    --fp8-log-interval N      FP8 statistics, every N steps
    --fp8-log-grad-snr        with them, the signal-to-noise ratio of the reduced gradients
    --fp8-log-exact           loss and gradient norm of every step with all digits; needs no level
    --fp8-log-update-norm     how far the logged steps move the weights; needs no level
    --fp8-log-routing N       how routers spread tokens over experts, every N steps; needs no level

None changes the training: the losses are the same to the last bit.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, refuse, whole

_USUAL = 100  # steps from one log of statistics to the next
INTERVAL = Flag(
    "--fp8-log-interval",
    "Write FP8 statistics to TensorBoard and W&B, and the worst ones to the log, every N steps; 0: never. "
    f"Default {_USUAL} with --tensorboard-dir or --wandb-project, else 0.",
    whole(0, "never"),
)
GRAD_SNR = Flag(
    "--fp8-log-grad-snr",
    "Log the signal-to-noise ratio of the reduced gradients too. A step that logs it also stores and reduces an FP32 "
    "copy of them (4 bytes a parameter).",
)
EXACT = Flag(
    "--fp8-log-exact",
    "Log loss and gradient norm with all their digits, at any level and without one. Megatron logs seven digits of the "
    "loss and three decimals of the norm.",
    needs_level=False,
)
UPDATE_NORM = Flag(
    "--fp8-log-update-norm",
    "Log how far every --log-interval-th step moves the weights (the norm of the update, also divided by the weights' "
    "norm), at any level and without one.",
    needs_level=False,
)
ROUTING = Flag(
    "--fp8-log-routing",
    "Every N steps log how the routers of a mixture of experts spread tokens: their entropy, and the tokens of each "
    "expert, at any level and without one. Default 0: never.",
    whole(0, "never"),
    needs_level=False,
)
FLAGS = (INTERVAL, GRAD_SNR, EXACT, UPDATE_NORM, ROUTING)


def statistics_interval(args: Namespace) -> int:
    """Steps from one log of FP8 statistics to the next; 0: never. Raises UserError of one line: flag, value, remedy."""
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
    hiding = {  # with these the weights are not the optimizer's, or something else updates them
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
            raise UserError(f"--fp8-log-update-norm with {flag}: cannot see its updates; remove one")
    return True


def routing_interval(args: Namespace) -> int:
    """Steps from one log of the routing to the next; 0: never. Raises UserError of one line: flag, value, remedy."""
    interval = ROUTING.given(args) or 0
    if interval and not args.num_experts:
        raise UserError(f"{ROUTING.shown(args)}: no --num-experts: there are no routers; remove it")
    if interval and (graph := args.cuda_graph_impl) != "none":
        raise UserError(f"{ROUTING.shown(args)} with --cuda-graph-impl {graph}: hides the routers; remove one")
    return interval
