"""What a run needs before it may start, beside flags that fit: a GPU with FP8, a Megatron that we know, its data files.

Every mistake of a user is a ValueError of one line: the flag, its value, and what to do.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

MEGATRON_SERIES = "0.19"


def check_device(capability: tuple[int, int]) -> None:
    """Raise ValueError unless a GPU of this CUDA compute capability has FP8 tensor cores."""
    if tuple(capability) < (8, 9):
        raise ValueError(
            "--fp8-level: a GPU of compute capability {}.{} has no FP8 tensor cores (from 8.9 on); "
            "use another GPU, or --fp8-level O0".format(*capability)
        )


def check_megatron_version(version: str) -> None:
    """Raise ValueError unless the plugin knows this version of megatron-core."""
    if version.split(".")[:2] != MEGATRON_SERIES.split("."):
        raise ValueError(
            f"megatron-core {version}: megatron_fp8 knows {MEGATRON_SERIES}.x only; "
            f"pip install 'megatron-core=={MEGATRON_SERIES}.*', or use a Megatron-LM checkout of that version"
        )


def check_data_files(args: Namespace) -> None:
    """Raise ValueError for the first data or tokenizer file on the command line that is not there.

    Megatron would say it minutes later, from the depths. Only rank 0 looks, since not every rank need see the
    data, and only at files: s3:// and msc:// paths are taken on trust.
    """
    if getattr(args, "rank", 0) != 0 or getattr(args, "yaml_cfg", None) is not None:
        return
    for flag, path in _named_files(args):
        if path is not None and not _is_there(path):
            raise ValueError(f"{flag} {path}: there is no such file; give the path of one")
    for flag, prefix in () if args.mock_data else _data_prefixes(args):
        for path in (prefix,) if args.sft else (f"{prefix}.bin", f"{prefix}.idx"):
            if not _is_there(path):
                raise ValueError(
                    f"{flag} {prefix}: there is no {path}; give the path without .bin or .idx "
                    "(tools/prepare_data.py makes both files from text)"
                )


def _named_files(args: Namespace) -> Iterator[tuple[str, str | None]]:
    """(flag, path or None) of what must be a file by itself."""
    yield "--vocab-file", args.vocab_file
    yield "--merge-file", args.merge_file
    model = args.tokenizer_model or ""
    on_a_hub = (args.tokenizer_type or "").startswith(("HuggingFace", "SFT", "Multimodal", "Null"))
    if not on_a_hub or model.startswith(("/", "./", "../")):
        yield "--tokenizer-model", args.tokenizer_model
    if not args.mock_data:
        yield "--data-args-path", args.data_args_path
        yield "--per-split-data-args-path", args.per_split_data_args_path


def _data_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """(flag, prefix) of every data set, without the weights of a blend."""
    blends = [
        ("--data-path", args.data_path),
        ("--train-data-path", args.train_data_path),
        ("--valid-data-path", args.valid_data_path),
        ("--test-data-path", args.test_data_path),
    ]
    if args.data_args_path and _is_local(args.data_args_path):
        blends.append(("--data-args-path", Path(args.data_args_path).read_text().split()))
    if args.per_split_data_args_path and _is_local(args.per_split_data_args_path):
        for blend in json.loads(Path(args.per_split_data_args_path).read_text()).values():
            blends.append(("--per-split-data-args-path", blend.split() if isinstance(blend, str) else blend))
    for flag, blend in blends:
        items = blend or []
        weighted = len(items) % 2 == 0 and all(map(_is_number, items[::2]))
        for prefix in items[1::2] if weighted else items:
            yield flag, prefix


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_local(path: str) -> bool:
    return "://" not in path


def _is_there(path: str) -> bool:
    return not _is_local(path) or os.path.exists(path)
