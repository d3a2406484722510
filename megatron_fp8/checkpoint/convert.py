"""`megatron-fp8 convert`: converts a Megatron checkpoint (`torch_dist`) to a Hugging Face folder, and back.

    to-hf         CKPT OUT    reads only the model: the weights under stock names, BF16 at every level
    to-megatron   HF OUT      writes a checkpoint for `--load OUT`: weights without optimizer state

Neither starts Megatron or needs a GPU.  A torch_dist checkpoint is a checkpoint of torch.distributed.checkpoint (DCP):
each name is one whole tensor, for any number of ranks, and the object `common_state` has the run's arguments.  So DCP
reads and writes it in one process.  checkpoint/hf/families.py has names and layouts, checkpoint/hf/config.py the
arguments.

All weights become BF16: a BF16 model's bit for bit, another precision's rounded once (--dtype e4m3 rounds those of the
four linears to E4M3 instead).  to-hf holds one stacked tensor and one file of weights in memory at a time, to-megatron
the whole model.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import UserError, is_bug
from ..flags.rope import STOCK_FACTOR
from ..numerics import ScaledTensor
from .adapters import Adapters
from .hf.config import args_of, config_of, flags_of, model_args, quantization_config
from .hf.families import EXPERT_LINEARS, LINEARS, Parameter, family_of, parameters, to_e4m3
from .hf.folder import CONFIG, INDEX, Weights, read_json
from .hf.schema import shown
from .pickles import data_only
from .seal import Broken, how_to_put_back, is_finished, seal, verify
from .tracker import TRACKER, tracked

# isort: split
from safetensors.torch import save_file  # if it is missing, hf/folder.py has raised a UserError


def to_hf(
    checkpoint: str,
    out: str,
    dtype: str = "bf16",
    vocab_size: int | None = None,
    max_shard_bytes: int = 5 * 10**9,
    merge_adapters: bool = False,
) -> None:
    """Write config.json and model*.safetensors to the folder `out`.

    checkpoint: a folder for --load, or an iteration's folder.  dtype: "bf16" or "e4m3", for the four linears.
    vocab_size: real tokens; None: the checkpoint's.  max_shard_bytes: of one file, unless a single tensor is larger.
    merge_adapters: add LoRA adapters to the weights (adapters.py).
    Raises UserError for a model that cannot be converted exactly, and for a damaged checkpoint.
    """
    folder = _iteration_folder(Path(checkpoint))
    saved, stored = _contents(folder)
    args = model_args(saved, vocab_size, str(folder))
    if dtype == "e4m3" and family_of(args).model_type == "gpt2":
        raise UserError("--dtype e4m3: loaders support E4M3 only in Linear modules, and gpt2 has none; use bf16")
    if dtype == "e4m3" and args.num_experts is not None:
        raise UserError("--dtype e4m3: experts are not written in E4M3; use bf16")
    wanted = parameters(args)
    adapters = Adapters(stored)
    if merge_adapters:
        adapters.check(folder, stored, wanted, args.num_layers)
    _check_names(folder, stored, wanted, args, adapters.names if merge_adapters else set())
    config = config_of(args)
    if dtype == "e4m3":
        config["quantization_config"] = quantization_config(family_of(args))
    writer = _ShardWriter(_new_folder(out), max_shard_bytes)

    def load(name: str) -> torch.Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        with _damage_of(folder):
            dcp.load({name: tensor}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return tensor

    for parameter in wanted:
        tensor, changes = load(parameter.name), adapters.changes(parameter, load)
        for layer in range(args.num_layers) if parameter.is_stacked else (None,):
            names = [name.format(layer) for name in parameter.names]
            one = tensor if layer is None else tensor[layer]
            change = None if changes is None or layer is None else changes(layer)
            rounded = _rounded(parameter, one if change is None else one.float() + change, dtype)
            if change is not None:
                adapters.count(change, one, rounded.dequantize())
            for name, part in _encode(parameter, names, rounded, args):
                writer.add(name, part)
    files = writer.close(config)
    if merge_adapters:
        print(f"{out}: {adapters.line()}")
    print(f"{out}: {config['architectures'][0]}, {writer.total:,} bytes in {files} file(s)")


def _iteration_folder(path: Path) -> Path:
    """The checkpoint's folder: the one that the tracker in `path` names, or `path` itself."""
    with _damage_of(path):
        folder = path / tracked(path)
        if kept := how_to_put_back(folder):
            raise UserError(f"{path}: {kept}")
        try:
            verify(folder)
        except Broken as broken:
            raise UserError(f"{path}: {folder.name}{broken}; name another iteration's folder") from None
        if not is_finished(folder) or not all((folder / name).is_file() for name in (".metadata", "metadata.json")):
            raise UserError(f"{path}: no complete checkpoint of --ckpt-format torch_dist (looked at {folder})")
    return folder


def _contents(folder: Path) -> tuple[Namespace, Mapping[str, Any]]:
    """(a checkpoint's arguments, {name: its metadata})."""
    with _damage_of(folder):
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        common = load_common_state_dict(str(folder))
        metadata = dcp.FileSystemReader(folder).read_metadata()
    saved = common.get("args") if isinstance(common, dict) else None
    if not isinstance(saved, Namespace):
        raise UserError(f"{folder}: contains no run's arguments, so the model is unknown; give another checkpoint")
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise UserError(f"{folder}/.metadata: damaged, or not the metadata of a checkpoint")
    return saved, metadata.state_dict_metadata


@contextlib.contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Raise UserError of one line if reading a checkpoint or folder fails. Pickles in it may contain only data.

    Damaged bytes unpickle into anything, so every exception counts as damage, unless it is a bug of ours. DCP wraps
    errors in CheckpointException, which is no subclass of Exception.
    """
    try:
        with data_only():
            yield
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:
        if is_bug(error) and not isinstance(error, OSError):
            raise
        reason = str(error).strip().splitlines()[-1:] or [""]
        raise UserError(f"{path}: damaged, or not a checkpoint: {type(error).__name__}: {reason[0]}") from error


def _check_names(
    folder: Path, stored: Mapping[str, Any], wanted: list[Parameter], args: Namespace, merged: set[str]
) -> None:
    """Raise UserError unless the model's tensors in the checkpoint are the wanted ones, in name and shape.

    merged: the adapters' that are added to weights.
    """
    model = {
        name: tuple(entry.size)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
        and entry.properties.dtype.is_floating_point
        and "optimizer." not in name
        and name not in merged
    }
    for parameter in wanted:
        shape = model.pop(parameter.name, None)
        expected = (args.num_layers, *parameter.shape) if parameter.is_stacked else parameter.shape
        if shape != expected:
            found = "is missing" if shape is None else f"has shape {shape}"
            raise UserError(f"{folder}: {parameter.name} {found}; the checkpoint's arguments demand {expected}")
    if adapters := Adapters(model).names:
        said = "is an adapter's: add --merge-adapters, which adds adapters to the weights"
        raise UserError(f"{folder}: {shown(min(adapters))} {said}")
    if model:
        raise UserError(f"{folder}: {shown(min(model))} has no place in a {family_of(args).model_type} model")


def _new_folder(out: str) -> Path:
    path = Path(out)
    try:
        out.encode()  # the name is printed later
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{out}: exists already; name a new or an empty folder")
        path.mkdir(parents=True, exist_ok=True)
    except UnicodeEncodeError:
        raise UserError(f"{shown(out)}: the name is not UTF-8; name another folder") from None
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; name a new or an empty folder") from None
    return path


def _rounded(parameter: Parameter, tensor: torch.Tensor, dtype: str) -> torch.Tensor | ScaledTensor:
    """One layer's parameter in the format in which it is written."""
    if dtype != "e4m3" or not parameter.is_linear_weight:
        return tensor.bfloat16()
    try:
        return to_e4m3(tensor)
    except UserError as error:
        raise UserError(f"{parameter.name}: {error}") from None


def _encode(
    parameter: Parameter, names: list[str], rounded: torch.Tensor | ScaledTensor, args: Namespace
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor that is written for one layer's parameter."""
    if isinstance(rounded, ScaledTensor):
        for name, part in zip(names, parameter.split(rounded.payload, args), strict=True):
            yield name, part
            yield f"{name}_scale", rounded.scale_inv.view(1)
    else:
        yield from zip(names, parameter.split(rounded, args), strict=True)


class _ShardWriter:
    """Writes tensors in the order in which they are added, and starts a new file before one exceeds the limit.

    config.json and the index are written last: an unfinished folder has neither and does not load.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self.total = folder, limit, 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []  # names by file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.limit:
            self._flush()
        # Copy: safetensors refuses tensors that share memory.
        self._pending[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._pending, self.folder / f"part-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def close(self, config: Mapping[str, Any]) -> int:
        """Write the rest and config.json. Returns the number of files of weights."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            os.replace(self.folder / f"part-{i}", self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            _write_json(self.folder / INDEX, index)
        _write_json(self.folder / CONFIG, config)
        for path in self.folder.glob("*.safetensors"):
            shutil.copymode(self.folder / CONFIG, path)  # safetensors makes its files unreadable to other users
        return count


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def to_megatron(folder: str, out: str) -> None:
    """Write a checkpoint of --ckpt-format torch_dist to the folder `out`.

    folder: config.json and model*.safetensors; float8 weights need scales, one per weight or one per row.
    Raises UserError for a model that Megatron cannot compute, and for missing, extra or misshapen tensors.
    """
    path = Path(folder)
    args = args_of(read_json(path / CONFIG), str(path / CONFIG))
    source, wanted = Weights(path), parameters(args)
    source.check(wanted, args)
    state: dict[str, Any] = {}
    for parameter in wanted:
        layers = range(args.num_layers) if parameter.is_stacked else [0]
        state[parameter.name] = stack = torch.empty(len(layers), *parameter.shape, dtype=torch.bfloat16)
        for layer in layers:
            stack[layer] = parameter.merge([source.get(name.format(layer)) for name in parameter.names], args)
        if not parameter.is_stacked:
            state[parameter.name] = stack[0]
    _write_megatron(_new_folder(out), state, args)
    print(f"{out}: start Megatron with --load {shlex.quote(out)} {flags_of(args)}")
    if args.rope_factor_built != STOCK_FACTOR:
        said = f"--rope-scaling-factor {args.rope_factor_built} needs the plugin"
        print(f"{out}: {said}; stock Megatron 0.19 ignores it and builds {STOCK_FACTOR}")


def _write_megatron(out: Path, state: dict[str, Any], args: Namespace) -> None:
    """Write a `release` checkpoint: Megatron loads it as iteration 0, without an optimizer."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def add_object(name: str, value: Any, of: tuple[int, ...] = (1,), at: tuple[int, ...] = (0,)) -> None:
        state[ShardedObject(name, None, of, at).unique_key] = [value]

    # Megatron's linears expect an extra state, which is empty except with Transformer Engine's FP8.
    present = family_of(args).modules
    for module in (module for module in (*LINEARS, *EXPERT_LINEARS) if module in present):
        of = (args.num_layers, *([args.num_experts] if module in EXPERT_LINEARS else []))
        for at in itertools.product(*map(range, of)):
            add_object(f"{module}_extra_state", None, of, at)
    add_object("common_state", {"args": args, "checkpoint_version": 3.0, "iteration": 0})
    release = out / "release"
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(release),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    save_config(CheckpointingConfig("torch_dist"), str(release))
    seal(release)
    (out / TRACKER).write_text("release")
