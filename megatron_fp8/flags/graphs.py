"""Decides whether a level's steps run as CUDA graphs: asked for by `--cuda-graph-impl` or `--fp8-step-graph on`.

A replay runs no Python (engine/step_graph.py), so the host must do the same in each step.

Megatron graphs whole steps (full_iteration) or parts of each layer (local, transformer_engine). A level graphs whole
steps for any of the three.
"""

from argparse import Namespace

from .. import cpu
from .flag import Flag, one_of, value_of

WHOLE = "full_iteration"
STEP_GRAPH = Flag(
    "--fp8-step-graph",
    "Run each step as one CUDA graph, as --cuda-graph-impl full_iteration does: on, off, or auto (on if the GPU waits "
    "for its host in the first steps). Default: on with --cuda-graph-impl, else off.",
    one_of("auto", "on", "off"),
)
# Share of looks at which the GPU was idle (monitor/host_wait.py). If the host is the bound, the share is near 1; if the
# GPU is, near 0.
WAITS = 0.5
# With these flags the host does something in a step that a replay would leave out.
INSIDE = {
    "--fp8-emulate": "the noise of its rounding, and its formats, depend on the step",
    "--expert-model-parallel-size": "the host counts the tokens that go to experts of other ranks, but not with "
    "--moe-token-dispatcher-type allgather",
    "--num-experts": "the host counts the tokens of each expert; docs/experts.md says when it need not",
    "--sft --dataloader-inter-document-masking": "the host reads the lengths of documents",
    "--save-activations-interval --save-dgrads-interval": "the host writes files",
    "--logits-load-dir --logits-save-dir": "the host reads or keeps logits",
    "--log-straggler": "the host times the parts of a step",
    "--timing-log-level": "at 2 the host waits for the GPU to time the parts of a step",
    "--log-max-attention-logit": "the host resets the largest logit after it has logged it",
    "--attention-dropout --hidden-dropout --moe-input-jitter-eps": "Megatron graphs no --recompute-modules that draw "
    "random numbers",
    "--skip-train": "there is no training step, and evaluations run without a graph",
    "--fp8-sharpness-interval --fp8-sharpness-eval": "the host looks at the logits",
}
_ONLY_IF = {  # these flags prevent a graph only under a condition
    "--timing-log-level": lambda args: args.timing_log_level == 2,  # 2 times parts inside a step, 1 does not
    "--attention-dropout": lambda args: "core_attn" in _recomputed(args),
    "--hidden-dropout": lambda args: bool({"mlp", "moe"} & set(_recomputed(args))),
    "--moe-input-jitter-eps": lambda args: "moe" in _recomputed(args),
    "--expert-model-parallel-size": lambda args: (
        bool(args.num_experts) and args.expert_model_parallel_size > 1 and not _gathers(args)
    ),
    "--num-experts": lambda args: not counts_stay(args),
}


def _recomputed(args: Namespace) -> list[str]:
    """The modules that --recompute-activations or --recompute-granularity selective recomputes."""
    selective = value_of(args, "--recompute-activations") or args.recompute_granularity == "selective"
    return (args.recompute_modules or ["core_attn"]) if selective else []


def _gathers(args: Namespace) -> bool:
    return args.moe_token_dispatcher_type == "allgather"


def counts_stay(args: Namespace) -> bool:
    """Whether counts of tokens stay on the GPU: the experts are owned, in FP8 with known scales, and none drops a
    token. They are whole and all on each rank (layers/local_dispatch.py), or all tokens come to all ranks
    (layers/gathered_dispatch.py). They must also run together: config_from_args sees to it, because Megatron's
    validation gets --moe-grouped-gemm switched off."""
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size  # as Megatron's own default
    whole = args.expert_model_parallel_size == parts == 1 and args.moe_token_dispatcher_type == "alltoall"
    whole = whole or (_gathers(args) and not args.moe_apply_probs_on_input)
    known = args.fp8_recipe == "delayed" and args.fp8_wgrad and value_of(args, "--fp8-gemm") != "bf16"
    bf16 = args.first_last_layers_bf16 or value_of(args, "--fp8-bf16-layers")
    owned = bool(value_of(args, "--fp8-experts")) and not bf16
    return owned and whole and known and args.moe_expert_capacity_factor is None


def asked(args: Namespace) -> bool:
    """Whether a flag asks for graphs, of whole steps or of layers.

    args: from before or after Megatron's validation, which translates the older flags and deletes their attributes.
    """
    switch = STEP_GRAPH.given(args)
    return stock_asked(args) if switch is None else switch != "off"


def stock_asked(args: Namespace) -> bool:
    """Whether Megatron's own flags ask for graphs."""
    older = value_of(args, "--enable-cuda-graph") or value_of(args, "--external-cuda-graph")
    return args.cuda_graph_impl != "none" or bool(older)


def spelling(args: Namespace) -> str:
    """The flag that asks for graphs, as it was typed. args: from before Megatron's validation."""
    if args.cuda_graph_impl != "none":
        return f"--cuda-graph-impl {args.cuda_graph_impl}"
    if STEP_GRAPH.given(args):
        return STEP_GRAPH.shown(args)
    return "--enable-cuda-graph" if args.enable_cuda_graph else "--external-cuda-graph"


def hindrance(args: Namespace) -> str:
    """Why the steps cannot be graphs: a flag that was given, or "without a GPU"; "" if they can."""
    return inside(args) if can_record() else "without a GPU"


def inside(args: Namespace) -> str:
    """The first flag of INSIDE that is given, or ""."""
    given = (flag for flags in INSIDE for flag in flags.split() if value_of(args, flag))
    return next((flag for flag in given if flag not in _ONLY_IF or _ONLY_IF[flag](args)), "")


def can_record() -> bool:
    """Whether this machine has a GPU."""
    return not cpu.needed()


def graphed(args: Namespace) -> bool:
    """Whether steps run as graphs."""
    return asked(args) and not hindrance(args)


def reads_ahead(args: Namespace) -> bool:
    """Whether a step's data may be read during the previous step.

    Not if the loop skips some data, saves how far it has read, or reads a step's data again to rerun the step.
    """
    checks = args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss or args.check_for_large_grads
    again = args.rerun_mode != "disabled" and checks
    return not (args.iterations_to_skip or value_of(args, "--dataloader-save") or again)


def advice(share: float, args: Namespace) -> list[str]:
    """The log line for a run without a graph whose GPU waits. share: of looks at which the GPU was idle, 0 to 1."""
    if share <= WAITS:
        return []
    return [
        f"the GPU waits for its host: it was idle at {share:.0%} of the checks; "
        f"{STEP_GRAPH.name} on, or a --micro-batch-size above {args.micro_batch_size}, helps"
    ]
