"""--rope-scaling-factor: by how much --use-rope-scaling, which is Llama 3's, slows the slowest rotations down.

megatron-core 0.19 parses the flag and hands it to no model. It builds them all with factor 8, Llama 3.1's; Llama 3.2
has 32. A level hands it over. Without a level, and at O0, the run is stock Megatron's and builds 8.

A checkpoint says what its model was built with: its arguments have `rope_factor_built`. Without that it is stock's 8,
whatever the flag said.
"""

from argparse import Namespace

from ..errors import UserError

STOCK_FACTOR = 8.0


def hands_over(args: Namespace) -> bool:
    """Whether the flag asks for a model that stock Megatron would not build."""
    return bool(getattr(args, "use_rope_scaling", False)) and args.rope_scaling_factor != STOCK_FACTOR


def factor_built(args: Namespace) -> float:
    """The factor of the models that a run, or the run of a checkpoint, builds with --use-rope-scaling."""
    return getattr(args, "rope_factor_built", STOCK_FACTOR)


def check_loaded(saved: Namespace, args: Namespace) -> None:
    """Refuse a checkpoint whose model rotates otherwise than this run's."""
    if not (getattr(saved, "use_rope_scaling", False) and getattr(args, "use_rope_scaling", False)):
        return
    if (theirs := factor_built(saved)) != factor_built(args):
        said = f"--rope-scaling-factor {args.rope_scaling_factor}: the checkpoint's model was built with {theirs}"
        remedy = f"give {theirs}"
        if args.rope_scaling_factor == theirs:  # which no model gets without a level
            remedy = f"without a level Megatron builds {STOCK_FACTOR}: give --fp8-level O1, O2 or O3"
        raise UserError(f"{said}; {remedy}, or add --finetune to change it")
