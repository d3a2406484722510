"""When a level's steps are CUDA graphs: with `--cuda-graph-impl`, or `--fp8-step-graph on`, if the host does the same
in each step. A replay runs no Python (engine/step_graph.py).

Megatron graphs whole steps (full_iteration), or what it can of each layer (local, transformer_engine). A level graphs
whole steps: whichever of the three is asked for.
"""

from argparse import Namespace

from .. import cpu
from .flag import Flag, one_of, value_of

WHOLE = "full_iteration"
STEP_GRAPH = Flag(
    "--fp8-step-graph",
    "Run each step as one CUDA graph, as --cuda-graph-impl full_iteration does: on, off, or auto, if the GPU waits for "
    "its host in the first steps. Default: on with --cuda-graph-impl, else off.",
    one_of("auto", "on", "off"),
)
# Share of looks (monitor/host_wait.py): a GPU that waits is done at nearly all of them, one that is the bound at few.
WAITS = 0.5
# In a step with these the host does something that a replay would leave out.
INSIDE = {
    "--fp8-emulate": "the noise of its rounding, and its formats, are of the step",
    "--num-experts": "the host counts the tokens of each expert",
    "--sft --dataloader-inter-document-masking": "the host reads the lengths of documents",
    "--save-activations-interval --save-dgrads-interval": "the host writes files",
    "--logits-load-dir --logits-save-dir": "the host reads or keeps logits",
    "--log-straggler": "the host times the parts of a step",
    "--timing-log-level": "at 2 the host waits for the GPU to time the parts of a step",
    "--log-max-attention-logit": "the host forgets the largest of a step when it has logged it",
    "--attention-dropout --hidden-dropout": "Megatron graphs no --recompute-modules that draw random numbers",
    "--skip-train": "no step is made, and evaluations run without",
    "--fp8-sharpness-interval --fp8-sharpness-eval": "the host looks at the logits",
}
_ONLY_IF = {  # of those of them that may be given with a graph
    "--timing-log-level": lambda args: args.timing_log_level == 2,  # of the data; at 1, of what is around a step
    "--attention-dropout": lambda args: "core_attn" in _recomputed(args),
    "--hidden-dropout": lambda args: "mlp" in _recomputed(args),
}


def _recomputed(args: Namespace) -> list[str]:
    """The modules that --recompute-activations, or --recompute-granularity selective, runs again."""
    selective = value_of(args, "--recompute-activations") or args.recompute_granularity == "selective"
    return (args.recompute_modules or ["core_attn"]) if selective else []


def asked(args: Namespace) -> bool:
    """Whether graphs are asked for, of whole steps or of layers.

    args: before Megatron's validation or after it, which translates the older spellings and deletes their attributes.
    """
    switch = STEP_GRAPH.given(args)
    return stock_asked(args) if switch is None else switch != "off"


def stock_asked(args: Namespace) -> bool:
    """Whether Megatron's own flags ask for graphs."""
    older = value_of(args, "--enable-cuda-graph") or value_of(args, "--external-cuda-graph")
    return args.cuda_graph_impl != "none" or bool(older)


def spelling(args: Namespace) -> str:
    """The flag that asks for graphs, as it is given; before Megatron's validation."""
    if args.cuda_graph_impl != "none":
        return f"--cuda-graph-impl {args.cuda_graph_impl}"
    if STEP_GRAPH.given(args):
        return STEP_GRAPH.shown(args)
    return "--enable-cuda-graph" if args.enable_cuda_graph else "--external-cuda-graph"


def hindrance(args: Namespace) -> str:
    """A flag, as it is given, with which the steps cannot be graphs; or "without a GPU"; or ""."""
    return inside(args) if can_record() else "without a GPU"


def inside(args: Namespace) -> str:
    """The first flag of INSIDE that is given, or ""."""
    given = (flag for flags in INSIDE for flag in flags.split() if value_of(args, flag))
    return next((flag for flag in given if flag not in _ONLY_IF or _ONLY_IF[flag](args)), "")


def can_record() -> bool:
    """Whether this machine has a GPU."""
    return not cpu.needed()


def graphed(args: Namespace) -> bool:
    """Whether steps will be graphs."""
    return asked(args) and not hindrance(args)


def reads_ahead(args: Namespace) -> bool:
    """Whether a step's data may be read during the step before.

    Not if the loop passes over some of it, or saves how far it was read, or goes back to it to run a step again.
    """
    checks = args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss or args.check_for_large_grads
    again = args.rerun_mode != "disabled" and checks
    return not (args.iterations_to_skip or value_of(args, "--dataloader-save") or again)


def advice(share: float, args: Namespace) -> list[str]:
    """The line for a run without a graph whose GPU had done all it was given at so many of the looks, if it waits."""
    if share <= WAITS:
        return []
    return [
        f"the GPU waits for its host: it was done with all it had been given at {share:.0%} of the looks; "
        f"{STEP_GRAPH.name} on, or a --micro-batch-size above {args.micro_batch_size}, ends that"
    ]
