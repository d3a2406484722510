"""A Megatron checkpoint (`torch_dist`) into a Hugging Face folder, and back.

    megatron-fp8 convert to-hf CKPT OUT         the model part alone: BF16 weights under stock names, of every level
    megatron-fp8 convert to-megatron HF OUT     a checkpoint that `--load OUT` starts from, without optimizer state

Neither starts Megatron, and neither needs a GPU.  All weights become BF16: of a BF16 model bit for bit, of one in
another precision rounded once (--dtype e4m3 rounds the four linears' to E4M3 instead).  docs/convert.md has the rest.
"""

import math
import warnings
from argparse import ArgumentParser, Namespace

from ...errors import UserError
from ...flags.usage import hide_missing_package_warnings, one_line_usage_errors, refuse_empty_values


def add_arguments(parser: ArgumentParser) -> None:
    """The two directions and their flags."""
    directions = parser.add_subparsers(dest="direction", required=True, metavar="{to-hf,to-megatron}")
    to_hf_parser = directions.add_parser("to-hf", help="a Megatron checkpoint into a Hugging Face folder")
    to_hf_parser.add_argument("checkpoint", metavar="CKPT", help="what --save wrote, or one iteration's folder in it")
    to_hf_parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="of linears' weights (bf16)")
    to_hf_parser.add_argument("--vocab-size", type=int, metavar="N", help="real tokens, if the checkpoint cannot tell")
    to_hf_parser.add_argument("--max-shard-size", type=float, default=5.0, metavar="GB", help="of a weights file (5)")
    to_megatron_parser = directions.add_parser("to-megatron", help="a Hugging Face folder into a Megatron checkpoint")
    to_megatron_parser.add_argument("folder", metavar="HF", help="has config.json and model*.safetensors")
    for direction in (to_hf_parser, to_megatron_parser):
        direction.add_argument("out", metavar="OUT", help="a new or an empty folder")
        one_line_usage_errors(direction)
        refuse_empty_values(direction)


def run(args: Namespace) -> int:
    """Convert, and say what was written."""
    from ...checkpoint.convert import to_hf, to_megatron

    hide_missing_package_warnings()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    if args.direction == "to-hf":
        for flag, number in (("--max-shard-size", args.max_shard_size), ("--vocab-size", args.vocab_size)):
            if number is not None and not 0 < number < math.inf:
                raise UserError(f"{flag} {number}: use a number above 0")
        to_hf(args.checkpoint, args.out, args.dtype, args.vocab_size, int(args.max_shard_size * 10**9))
    else:
        to_megatron(args.folder, args.out)
    return 0
