"""Convert a Megatron checkpoint (`torch_dist`) to a Hugging Face folder, or back.

    megatron-fp8 convert to-hf CKPT OUT         only the model: BF16 weights under stock names, at every level
    megatron-fp8 convert to-megatron HF OUT     a checkpoint for `--load OUT`, without optimizer state

Neither starts Megatron or needs a GPU.  All weights become BF16: a BF16 model's bit for bit, another precision's
rounded once (--dtype e4m3 rounds the four linears' to E4M3 instead).  docs/convert.md explains the rest.
"""

import math
import warnings
from argparse import ArgumentParser, Namespace

from ...errors import UserError
from ...flags.usage import hide_missing_package_warnings, one_line_usage_errors, refuse_empty_values


def add_arguments(parser: ArgumentParser) -> None:
    """The two directions and their flags."""
    directions = parser.add_subparsers(dest="direction", required=True, metavar="{to-hf,to-megatron}")
    to_hf_parser = directions.add_parser("to-hf", help="convert a Megatron checkpoint to a Hugging Face folder")
    to_hf_parser.add_argument("checkpoint", metavar="CKPT", help="the folder of --save, or an iteration's folder in it")
    to_hf_parser.add_argument("--dtype", choices=("bf16", "e4m3"), default="bf16", help="the linears' weights (bf16)")
    to_hf_parser.add_argument("--vocab-size", type=int, metavar="N", help="real tokens, if the checkpoint does not say")
    to_hf_parser.add_argument("--max-shard-size", type=float, default=5.0, metavar="GB", help="largest file (5)")
    merged = "add LoRA adapters, named as those of examples/lora.py, to the weights"
    to_hf_parser.add_argument("--merge-adapters", action="store_true", help=merged)
    to_megatron_parser = directions.add_parser("to-megatron", help="convert a Hugging Face folder to a checkpoint")
    to_megatron_parser.add_argument("folder", metavar="HF", help="a folder with config.json and model*.safetensors")
    for direction in (to_hf_parser, to_megatron_parser):
        direction.add_argument("out", metavar="OUT", help="a new or an empty folder")
        one_line_usage_errors(direction)
        refuse_empty_values(direction)


def run(args: Namespace) -> int:
    """Convert, and print what was written."""
    from ...checkpoint.convert import to_hf, to_megatron

    hide_missing_package_warnings()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    if args.direction == "to-hf":
        for flag, number in (("--max-shard-size", args.max_shard_size), ("--vocab-size", args.vocab_size)):
            if number is not None and not 0 < number < math.inf:
                raise UserError(f"{flag} {number}: use a number above 0")
        most = int(args.max_shard_size * 10**9)
        to_hf(args.checkpoint, args.out, args.dtype, args.vocab_size, most, args.merge_adapters)
    else:
        to_megatron(args.folder, args.out)
    return 0
