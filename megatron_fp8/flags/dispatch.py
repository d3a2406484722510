"""--fp8-dispatch: whether rows travel to their experts in FP8 (layers/dispatch.py)."""

from argparse import Namespace
from typing import Final

from ..errors import UserError
from .flag import Flag, one_of, value_of
from .watch import FALLBACK, ON_SPIKE

OFF: Final = "off"
DISPATCH = Flag(
    "--fp8-dispatch",
    "Send rows to their experts in FP8, of half the bytes: the forward pass's in E4M3 (forward), or the gradients' in "
    "E5M2 too (both). Results come back in BF16. Changes no bit of a run. Needs --fp8-experts, --moe-grouped-gemm and "
    "--moe-token-dispatcher-type alltoall. In no level: its time was not measured.",
    one_of("forward", "both"),
)


def dispatch(args: Namespace, gemm: str) -> str:
    """One of "off", "forward" or "both". gemm: the level's cell. Raises UserError of one line: flag, value, remedy."""
    way = DISPATCH.given(args)
    if way is None:
        return OFF
    sender = args.moe_token_dispatcher_type
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size  # as Megatron's own default
    for hindered, why in (
        (not value_of(args, "--fp8-experts"), "experts read BF16; add --fp8-experts"),
        (
            args.expert_model_parallel_size == parts == 1,
            "no row leaves its rank at --expert-model-parallel-size 1; raise that, or remove this flag",
        ),
        (not args.moe_grouped_gemm, "experts that run one by one take BF16 rows; add --moe-grouped-gemm"),
        (sender != "alltoall", f"--moe-token-dispatcher-type {sender} sends BF16; use alltoall"),
        (gemm != "fp8", "this run's GEMMs are BF16 (--fp8-gemm bf16, --fp8-emulate); remove one"),
        (args.fp8_recipe != "delayed", f"--fp8-recipe {args.fp8_recipe} has no scale before rows arrive; use delayed"),
        (not args.fp8_wgrad, "--no-fp8-wgrad reads BF16 rows; remove one"),
        (args.moe_apply_probs_on_input, "--moe-apply-probs-on-input multiplies rows after they arrive; remove one"),
        (ON_SPIKE.given(args) == FALLBACK, f"{ON_SPIKE.name} {FALLBACK} takes single experts out of FP8; use skip"),
    ):
        if hindered:
            raise UserError(f"{DISPATCH.shown(args)}: {why}")
    return way
