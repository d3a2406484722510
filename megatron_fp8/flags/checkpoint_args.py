"""--use-checkpoint-args: the model's arguments that Megatron leaves as typed, though they change what it computes.

megatron-core 0.19 takes the sizes from a checkpoint, and much else, but none of these. No tensor's shape shows them, so
the run would go on with another function: without the window, say, or with another epsilon. Under a level the
checkpoint's value counts for them too, as it does for rotary_base.
"""

from argparse import Namespace
from collections.abc import Iterator

from .rope import factor_built

_LEFT_OUT = {  # {argument: flag}
    "window_size": "--window-size",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "layernorm_epsilon": "--norm-epsilon",
    "qk_layernorm": "--qk-layernorm",
    "qk_l2_norm": "--qk-l2-norm",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "no_rope_freq": "--no-rope-freq",
    "softmax_type": "--softmax-type",
    "quick_geglu": "--quick-geglu",
    "glu_linear_offset": "--glu-linear-offset",
    "activation_func_clamp_value": "--activation-func-clamp-value",
}


def take_over(args: Namespace, saved: Namespace) -> Iterator[str]:
    """Set what Megatron has left out to the values of a checkpoint's arguments -> a line for each that changes."""
    for name, flag in _LEFT_OUT.items():
        value = getattr(saved, name, None)
        if name == "rope_scaling_factor" and value is not None:  # what was built, whatever the flag said
            value = factor_built(saved) if args.use_rope_scaling else None
        if value is not None and hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            shown = ",".join(map(str, value)) if isinstance(value, tuple | list) else value
            yield f"--use-checkpoint-args: {flag} {shown}, which Megatron does not take from a checkpoint"
