"""Checks before a run starts, other than of flags: GPU, CUDA_DEVICE_MAX_CONNECTIONS, Megatron's version, model, files.

A user's mistake raises a UserError of one line: flag, value, remedy.
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
from . import graphs
from .stock import REFUSED, rows

MEGATRON_SERIES = "0.19"
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is torch's newer name


def check_device(capability: tuple[int, int]) -> None:
    """Raise UserError unless a GPU of this CUDA compute capability has FP8 tensor cores."""
    if tuple(capability) < (8, 9):
        raise UserError(
            "--fp8-level: a GPU of compute capability {}.{} has no FP8 tensor cores (from 8.9 on); "
            "use another GPU, or --fp8-level O0".format(*capability)
        )


def set_max_connections(args: Namespace) -> list[str]:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 if Megatron's validation demands it. Returns lines for the log.

    Another value is overwritten: Megatron accepts one only with --overlap-moe-expert-parallel-comm, which a level
    switches off.  CUDA reads the variable when it starts, so this must run before the first CUDA call; NVML, the
    driver's management library, tells the device without starting CUDA.  On Blackwell and later Megatron does not
    demand it.

    Raises UserError if CUDA has started already.
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
        raise UserError(f"{flags[0]}: Megatron needs {MAX_CONNECTIONS}=1, but CUDA is running already; export it first")
    os.environ[MAX_CONNECTIONS] = "1"
    instead = f" instead of {given}" if given else ""
    return [f"{' '.join(flags)}: set {MAX_CONNECTIONS}=1{instead}, which Megatron demands before Blackwell"]


def set_graph_register(args: Namespace) -> list[str]:
    """Set NCCL_GRAPH_REGISTER=0 for graphs of whole steps over several ranks, if torch's allocator has expandable
    segments. Returns lines for the log.

    NCCL would register a graph's buffers. In expandable segments that ends in an illegal memory access: Megatron says
    so of Transformer Engine's graphs, and refuses to start without the variable. NCCL reads it when it makes its first
    communicator, so this must run before.

    Raises UserError if it may have been made already.
    """
    expandable = next((name for name in ALLOCATOR if "expandable_segments:True" in os.environ.get(name, "")), "")
    if not (expandable and graphs.graphed(args) and args.world_size > 1) or os.environ.get(GRAPH_REGISTER) == "0":
        return []
    what = f"CUDA graphs with {expandable}=expandable_segments:True"
    if torch.distributed.is_initialized():
        raise UserError(f"{what}: NCCL must not register buffers; export {GRAPH_REGISTER}=0 before the start")
    os.environ[GRAPH_REGISTER] = "0"
    return [f"{what}: set {GRAPH_REGISTER}=0, as Megatron demands for Transformer Engine's graphs"]


def _compute_capability() -> tuple[int, int] | None:
    """The compute capability of the machine's first GPU, without starting CUDA; None if NVML cannot tell it."""
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
    """Raise UserError if the running script imports a model of Megatron's other than GPT: T5, BERT, LLaVA, Mamba.

    Such a script imports its model class. A script that trains a GPT imports none, or GPTModel among others; then
    `check_model` checks what it builds.
    """
    models = [
        name
        for name, value in vars(sys.modules["__main__"]).items()
        if isinstance(value, type) and name.endswith("Model") and value.__module__.startswith("megatron.core.models.")
    ]
    if models and "GPTModel" not in models:
        raise _only_gpt(level, models[0])


def check_model(level: str, model_chunks) -> None:
    """Raise UserError unless every model chunk is Megatron's GPTModel."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.utils import unwrap_model

    for chunk in model_chunks:
        model = unwrap_model(chunk)
        if not isinstance(model, GPTModel):
            raise _only_gpt(level, type(model).__name__)


def check_own_config(args: Namespace, config) -> None:
    """Raise UserError if a trainer's model configuration asks for what a level refuses as a flag (stock.py).

    args: a run's, of defaults.  config: Megatron's TransformerConfig, whose fields have the names of flags' values.
    """
    if getattr(config, "fp8", None):
        raise UserError(
            f"TransformerConfig.fp8 {config.fp8}: stock's FP8, Transformer Engine's, would start beside the level's; "
            "leave it out, and give megatron_fp8.enable() format"
        )
    asked = Namespace(**{name: getattr(config, name, value) for name, value in vars(args).items()})
    if isinstance(asked.cp_comm_type, str):  # one for all layers; the flag is a list
        asked.cp_comm_type = [asked.cp_comm_type]
    for row in rows(asked, REFUSED):
        raise UserError(f"TransformerConfig.{row.dest}: as {row.shown(asked)}: {row.note}")
    if getattr(args, "fp8_experts", False):
        if not config.num_moe_experts:
            raise UserError("TransformerConfig.num_moe_experts: there are no experts; leave experts out of enable()")
        if config.add_bias_linear:
            raise UserError("TransformerConfig.add_bias_linear True: experts with biases; set it to False")


def check_stage(save: str | None, model_chunks) -> None:
    """Raise UserError, on all ranks, if a pipeline stage is one that Megatron cannot save.

    Megatron's first save fails for a stage without parameters, and for the last stage of a model with tied embeddings
    and multi-token prediction. Without --save nothing is refused. save: the value of --save.
    """
    from megatron.core.utils import unwrap_model

    mistake = ""
    if any(map(_has_tied_copies, unwrap_model(model_chunks))):
        mistake = (
            "with several pipeline stages Megatron cannot save tied embeddings with --mtp-num-layers; add "
            "--untie-embeddings-and-output-weights"
        )
    if not any(True for chunk in model_chunks for _ in chunk.parameters()):
        mistake = (
            f"the stage of rank {os.environ.get('RANK', '0')} has no parameters, and Megatron cannot save it; give "
            "each stage a layer in --pipeline-model-parallel-layout"
        )
    for found in gathered(mistake) if save else ():
        if found:
            raise UserError(f"--save {save}: {found}")


def _has_tied_copies(model) -> bool:
    """Whether this stage has two copies of another stage's embeddings: multi-token prediction's and the LM head's."""
    if not getattr(model, "mtp_process", False):
        return False
    return model.share_embeddings_and_output_weights and model.post_process and not model.pre_process


def _only_gpt(level: str, model: str) -> UserError:
    return UserError(
        f"--fp8-level {level}: the script trains a {model}, a level supports only Megatron's GPT; use --fp8-level O0"
    )


def check_data_files(args: Namespace) -> None:
    """Raise NoSuchFile for the first data or tokenizer file on the command line that does not exist.

    Megatron would fail minutes later, in a traceback. Only rank 0 looks: the other ranks may not see the data.
    s3:// and msc:// paths are not checked.
    """
    if getattr(args, "rank", 0) != 0 or getattr(args, "yaml_cfg", None) is not None:
        return
    for flag, path in _named_files(args):
        if path is not None and not _is_there(path):
            raise NoSuchFile(f"{flag} {path}: no such file; give its path")
    for flag, prefix in () if args.mock_data else _data_prefixes(args):
        for path in (prefix,) if args.sft else (f"{prefix}.bin", f"{prefix}.idx"):
            if not _is_there(path):
                if len(words := prefix.split()) > 1 and _is_number(words[0]):  # a blend that is quoted as one word
                    remedy = f"leave out its quotes, or write [{prefix}] in a file of --args-file"
                    raise UserError(f"{flag} {prefix!r}: a blend in one word; {remedy}")
                raise NoSuchFile(
                    f"{flag} {prefix}: no file {path}; give the path without .bin or .idx "
                    "(tools/prepare_data.py makes both files from text)"
                )


def check_files(args: Namespace) -> None:
    """Raise NoSuchFile for another file of the command line that Megatron would open in a traceback."""
    path = args.nccl_communicator_config_path
    if path is not None and not _is_there(path):
        raise NoSuchFile(f"--nccl-communicator-config-path {path}: no such file; give its path")


def _named_files(args: Namespace) -> Iterator[tuple[str, str | None]]:
    """(flag, path or None) of each flag whose value is the path of one file."""
    yield "--vocab-file", args.vocab_file
    yield "--merge-file", args.merge_file
    model = args.tokenizer_model or ""
    on_a_hub = (args.tokenizer_type or "").startswith(("HuggingFace", "SFT", "Multimodal", "Null"))
    if not on_a_hub or model.startswith(("/", "./", "../")):
        yield "--tokenizer-model", args.tokenizer_model
    if not args.mock_data:
        yield "--data-args-path", args.data_args_path
        yield "--per-split-data-args-path", args.per_split_data_args_path
        yield "--per-dataset-sequences-path", args.per_dataset_sequences_path


def _data_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """(flag, prefix) of every dataset, without a blend's weights."""
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
