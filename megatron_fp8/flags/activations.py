"""--fp8-activations: which activations are kept in FP8 for the backward pass, after COAT (arXiv 2410.19313).

    norm before a linear     keeps its normalised input, E4M3 with a constant scale; q(norm)^T is recomputed from it
    activation function      keeps h + bias, E4M3 with a scale for each 128; q(act)^T is recomputed from it
    proj                     keeps nothing: q(x)^T is recomputed from attention's output, which attention keeps in BF16

No level includes it. The other activations stay in BF16; a log line names them.
"""

from argparse import Namespace

from ..errors import UserError
from .flag import Flag, value_of

ACTIVATIONS = Flag(
    "--fp8-activations",
    "Keep the inputs of norms and activation functions in FP8 for the backward pass, and recompute the linears' inputs "
    "from them: about half the memory of activations. Gradients lose some accuracy. No level includes it.",
)


def activations(args: Namespace, gemm: str) -> bool:
    """Whether activations are kept in FP8. gemm: the cell's value. Raises UserError of one line: flag, remedy."""
    if not ACTIVATIONS.given(args):
        return False
    if gemm != "fp8":
        why = "this run's GEMMs are BF16 (--fp8-gemm bf16, --fp8-emulate)"
        raise UserError(f"{ACTIVATIONS.name}: {why} and need BF16 inputs; remove one")
    if not args.fp8_wgrad:
        raise UserError(f"{ACTIVATIONS.name} with --no-fp8-wgrad: the weight gradients need BF16 inputs; remove one")
    return True


def activations_line(args: Namespace, given: bool, tp_gather: str) -> list[str]:
    """The log lines that name the activations that stay in BF16."""
    if not given:
        return []
    stays = []
    if args.sequence_parallel and args.tensor_model_parallel_size > 1 and tp_gather != "fp8":
        stays.append("norms, because their output is gathered in BF16 (add --fp8-tp-gather fp8)")
    if args.num_experts:
        stays.append("experts, and the norms before them")
    if args.multi_latent_attention:
        stays.append("the norms before latent attention")
    unknown = ("--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value")
    stays += [f"activation functions ({flag})" for flag in unknown if value_of(args, flag)]
    lines = [f"{ACTIVATIONS.name}: these stay in BF16: {'; '.join(stays)}"] if stays else []
    if args.recompute_granularity == "full":
        lines.append(f"{ACTIVATIONS.name}: saves little, --recompute-granularity full keeps only the layers' inputs")
    return lines
