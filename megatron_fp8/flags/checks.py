"""What a run needs before it may start, beside flags that fit: a GPU with FP8, one queue to it where Megatron asks for
it, a Megatron that we know, a model of its GPT, its data files.

Every mistake of a user is a UserError of one line: the flag, its value, and what to do.
"""

import ctypes
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch

from .. import cpu
from ..errors import NoSuchFile, UserError
from ..ranks import gathered

MEGATRON_SERIES = "0.19"
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_device(capability: tuple[int, int]) -> None:
    """Raise UserError unless a GPU of this CUDA compute capability has FP8 tensor cores."""
    if tuple(capability) < (8, 9):
        raise UserError(
            "--fp8-level: a GPU of compute capability {}.{} has no FP8 tensor cores (from 8.9 on); "
            "use another GPU, or --fp8-level O0".format(*capability)
        )


def set_max_connections(args: Namespace) -> list[str]:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 where Megatron's validation demands it; lines for the log.

    Also where it is something else: Megatron lets that pass with --overlap-moe-expert-parallel-comm only, which a level
    switches off.  CUDA reads it when it starts, so that this comes before the first look at a device: which one it is,
    the driver's management library says.  From Blackwell on Megatron does not ask for it.

    Raises UserError when CUDA has started already.
    """
    sizes = {"--tensor-model-parallel-size": args.tensor_model_parallel_size}
    sizes["--context-parallel-size"] = args.context_parallel_size
    flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    given = os.environ.get(MAX_CONNECTIONS)
    if not flags or given == "1":
        return []
    if (_compute_capability() or (0, 0)) >= (10, 0):
        return []
    if torch.cuda.is_initialized() and not cpu.needed():
        raise UserError(f"{flags[0]}: Megatron needs {MAX_CONNECTIONS}=1, and CUDA runs already; export it first")
    os.environ[MAX_CONNECTIONS] = "1"
    instead = f" instead of {given}" if given else ""
    return [f"{' '.join(flags)}: {MAX_CONNECTIONS}=1{instead}, which Megatron asks for before Blackwell"]


def _compute_capability() -> tuple[int, int] | None:
    """Of the machine's first GPU, without starting CUDA; None where it cannot be told."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else (major.value, minor.value)


def check_megatron_version(version: str) -> None:
    """Raise UserError unless the plugin knows this version of megatron-core."""
    if version.split(".")[:2] != MEGATRON_SERIES.split("."):
        raise UserError(
            f"megatron-core {version}: megatron_fp8 knows {MEGATRON_SERIES}.x only; "
            f"pip install 'megatron-core=={MEGATRON_SERIES}.*', or use a Megatron-LM checkout of that version"
        )


def check_script(level: str) -> None:
    """Raise UserError where the script that runs has another model of Megatron's than its GPT: T5, BERT, LLaVA, Mamba.

    Such a script names its model; a GPT's names none, or GPTModel too: `check_model` sees what it builds.
    """
    models = [
        name
        for name, value in vars(sys.modules["__main__"]).items()
        if isinstance(value, type) and name.endswith("Model") and value.__module__.startswith("megatron.core.models.")
    ]
    if models and "GPTModel" not in models:
        raise _only_gpt(level, models[0])


def check_model(level: str, model_chunks) -> None:
    """Raise UserError unless every model chunk is a GPT of Megatron's."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.utils import unwrap_model

    for chunk in model_chunks:
        model = unwrap_model(chunk)
        if not isinstance(model, GPTModel):
            raise _only_gpt(level, type(model).__name__)


def check_stage(save: str | None, model_chunks) -> None:
    """Raise UserError, on all ranks, for a stage in a run that saves at whose first save Megatron fails: one without a
    parameter, or the last one of tied embeddings where it predicts more tokens.

    save: the value of --save.
    """
    from megatron.core.utils import unwrap_model

    mistake = ""
    if any(map(_has_tied_copies, unwrap_model(model_chunks))):
        mistake = (
            "of several stages Megatron cannot save tied embeddings with --mtp-num-layers; add "
            "--untie-embeddings-and-output-weights"
        )
    if not any(True for chunk in model_chunks for _ in chunk.parameters()):
        mistake = (
            f"rank {os.environ.get('RANK', '0')} is of a stage without any parameter, which Megatron cannot save; give "
            "each stage a layer in --pipeline-model-parallel-layout"
        )
    for found in gathered(mistake) if save else ():
        if found:
            raise UserError(f"--save {save}: {found}")


def _has_tied_copies(model) -> bool:
    """Of the embeddings, which are another stage's: one that multi-token prediction reads and the LM head's."""
    if not getattr(model, "mtp_process", False):
        return False
    return model.share_embeddings_and_output_weights and model.post_process and not model.pre_process


def _only_gpt(level: str, model: str) -> UserError:
    return UserError(
        f"--fp8-level {level}: the script trains a {model}, and a level knows Megatron's GPT only; use --fp8-level O0"
    )


def check_data_files(args: Namespace) -> None:
    """Raise NoSuchFile for the first data or tokenizer file on the command line that is not there.

    Megatron would say it minutes later, from the depths. Only rank 0 looks, since not every rank need see the
    data, and only at files: s3:// and msc:// paths are taken on trust.
    """
    if getattr(args, "rank", 0) != 0 or getattr(args, "yaml_cfg", None) is not None:
        return
    for flag, path in _named_files(args):
        if path is not None and not _is_there(path):
            raise NoSuchFile(f"{flag} {path}: there is no such file; give the path of one")
    for flag, prefix in () if args.mock_data else _data_prefixes(args):
        for path in (prefix,) if args.sft else (f"{prefix}.bin", f"{prefix}.idx"):
            if not _is_there(path):
                if len(words := prefix.split()) > 1 and _is_number(words[0]):  # a blend, as a YAML file had it
                    remedy = f"leave out its quotes, or in a file of flags write [{prefix}]"
                    raise UserError(f"{flag} {prefix!r}: is one word; {remedy}")
                raise NoSuchFile(
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
