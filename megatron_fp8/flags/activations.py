"""--fp8-activations: what waits for the backward pass in FP8, after COAT (arXiv 2410.19313).

    norm before a linear     its normalised input, E4M3 with a constant scale; q(norm)^T is made of it again
    activation function      h + bias, E4M3 with a scale for each 128; q(act)^T is made of it again
    proj                     q(x)^T is made again of the attention's output, which the attention keeps in BF16

Part of no level. What it does not reach stays in BF16, and a line of the log says so.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, value_of

ACTIVATIONS = Flag(
    "--fp8-activations",
    "Keep the inputs of norms and activation functions in FP8 for the backward pass, and make the linears' inputs of "
    "them again there: about half the memory of activations. Part of no level: it costs some accuracy of gradients.",
)


def activations(args: Namespace, gemm: str) -> bool:
    """Whether activations are kept in FP8, with the cell gemm. Raises UserError of one line: flag, remedy."""
    if not ACTIVATIONS.given(args):
        return False
    if gemm != "fp8":
        why = "the GEMMs of this run are BF16's (--fp8-gemm bf16, --fp8-emulate)"
        raise UserError(f"{ACTIVATIONS.name}: {why}, and read what they multiply in BF16; remove one")
    if not args.fp8_wgrad:
        raise UserError(f"{ACTIVATIONS.name} with --no-fp8-wgrad: the weight gradients need BF16 inputs; remove one")
    return True


def activations_line(args: Namespace, given: bool, tp_gather: str) -> list[str]:
    """What the log should say of what stays in BF16."""
    if not given:
        return []
    stays = []
    if args.sequence_parallel and args.tensor_model_parallel_size > 1 and tp_gather != "fp8":
        stays.append("norms, whose output is gathered in BF16 (add --fp8-tp-gather fp8)")
    if args.num_experts:
        stays.append("experts, and the norms before them")
    if args.multi_latent_attention:
        stays.append("the norms before latent attention")
    unknown = ("--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value")
    stays += [f"activation functions ({flag})" for flag in unknown if value_of(args, flag)]
    lines = [f"{ACTIVATIONS.name}: in BF16 stay {'; '.join(stays)}"] if stays else []
    if args.recompute_granularity == "full":
        lines.append(f"{ACTIVATIONS.name}: little to save, as --recompute-granularity full keeps layers' inputs alone")
    return lines
