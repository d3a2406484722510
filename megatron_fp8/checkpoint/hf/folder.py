"""Reads a Hugging Face folder: its config.json, and the tensors of its safetensors files.

The folder may come from another user. Only regular files are opened: a read of a FIFO or a device may never end.
A link may point anywhere, as in Hugging Face's own cache; a name in the index may not leave the folder. JSON is bounded
in size. Names and shapes in the files' headers are checked before a tensor is read or memory allocated for it.
"""

import stat
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...numerics import FORMATS, ScaledTensor
from ...packages import needs
from .families import Parameter
from .schema import Index, checked, shown

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError:
    raise UserError(f"megatron-fp8 convert {needs('safetensors')}") from None
from pydantic_core import from_json

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MOST = 64 * 2**20  # bytes of JSON
# Tensors that are not weights; they may be in a folder and are ignored.
_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
_SCALES = ("weight_scale", "weight_scale_inv")  # both multiply
_FLOATS = "BF16", "F16", "F32"  # dtype names in safetensors headers
_FP8 = {fmt.dtype: f"F8_{fmt.name.upper()}" for fmt in FORMATS.values()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.  Raises UserError for anything else."""
    _check_regular(path)
    if (size := path.stat().st_size) > _MOST:
        raise UserError(f"{path}: {size:,} bytes of JSON; at most {_MOST:,} are read")
    try:
        values = from_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a Hugging Face folder") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: not a regular file; name a Hugging Face folder")


class Weights:
    """The tensors of a folder's safetensors files, by name, as BF16.

    It reads model.safetensors; without it, the files that the index names; without an index, all model*.safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}  # by tensor
        listed = self._listed()
        for path in sorted({folder / file for file in listed.values()}) or self._unlisted():
            _check_regular(path)
            try:
                file = safe_open(path, framework="pt")
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: damaged, or not a safetensors file: {shown(str(error), 200)}") from None
            if again := self._files.keys() & names:
                raise UserError(f"{path}: {shown(min(again))} is in another file too; keep one of them")
            self._files |= dict.fromkeys(names, file)
            if lacking := {name for name, at in listed.items() if folder / at == path} - set(names):
                raise UserError(f"{path}: lacks {shown(min(lacking))}, which {INDEX} places there")

    def _listed(self) -> dict[str, str]:
        """{tensor: file} of the index; empty if there is a model.safetensors or no index."""
        if _is_there(self.folder / WHOLE) or not _is_there(self.folder / INDEX):
            return {}
        place = self.folder / INDEX
        return checked(Index, read_json(place), str(place)).weight_map

    def _unlisted(self) -> list[Path]:
        whole = self.folder / WHOLE
        found = [whole] if _is_there(whole) else sorted(self.folder.glob("model*.safetensors"))
        if not found:
            raise UserError(f"{self.folder}: no model*.safetensors there; convert reads no other format of weights")
        return found

    def check(self, wanted: Iterable[Parameter], args: Namespace) -> None:
        """Raise UserError unless these are exactly the model's tensors, in shape and a float dtype. Reads headers only.
        """
        used = set()
        for parameter in wanted:
            for layer in range(args.num_layers if parameter.is_stacked else 1):
                for name, shape in zip(parameter.names, parameter.part_shapes(args), strict=True):
                    used |= self._check_tensor(name.format(layer), shape)
        tied = not args.untie_embeddings_and_output_weights
        known = (*_BUFFERS, "input_scale", *(["lm_head.weight", "embed_out.weight"] if tied else []))
        for name in sorted(self._files.keys() - used):
            if not name.endswith(known):
                said = f"{shown(name)} has no place in the Megatron model that {CONFIG} describes"
                raise UserError(f"{self.folder}: {said}")

    def _check_tensor(self, wanted: str, shape: tuple[int, ...]) -> set[str]:
        """Check one tensor. Returns its name in the files, and its scale's name if it has one."""
        name = self._found(wanted)
        if name not in self._files:
            raise UserError(f"{self.folder}: no tensor {wanted} in its safetensors files")
        dtype, found = self._header(name)
        if found != shape:
            raise UserError(f"{self.folder}: {name} has shape {found}, but the sizes in {CONFIG} make it {shape}")
        if dtype in _FLOATS:
            return {name}
        if dtype not in _FP8.values():
            known = ", ".join((*_FLOATS, *_FP8.values()))
            raise UserError(f"{self.folder}: {name} is {shown(dtype)}, which convert cannot read; it reads {known}")
        if (scale := self._scale_of(name)) is None:
            raise UserError(f"{self.folder}: {name} is {dtype} and needs {' or '.join(_SCALES)}, which is missing")
        kind, scales = self._header(scale)
        if kind not in _FLOATS or scales not in ((), (1,), (1, 1), (shape[0], 1)):
            raise UserError(f"{self.folder}: {scale} {scales} of {kind} is not one float per weight or per row")
        return {name, scale}

    def get(self, wanted: str) -> torch.Tensor:
        """A checked tensor, converted to BF16."""
        name = self._found(wanted)
        tensor = self._read(name)
        scale = self._scale_of(name) if tensor.dtype in _FP8 else None
        if scale is None:
            return tensor.bfloat16()
        return ScaledTensor(tensor, self._read(scale).float().view(-1, 1)).dequantize(torch.bfloat16)

    def _found(self, name: str) -> str:
        """The name in the files. Some folders leave out a name's first part: gpt2's "transformer."."""
        return name if name in self._files else name.split(".", 1)[-1]

    def _scale_of(self, name: str) -> str | None:
        names = (name.removesuffix("weight") + kind for kind in _SCALES)
        return next((scale for scale in names if scale in self._files), None)

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        piece = self._files[name].get_slice(name)
        return piece.get_dtype(), tuple(piece.get_shape())

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder}: {name} cannot be read: {shown(str(error), 200)}") from None


def _is_there(path: Path) -> bool:
    """Whether there is anything of this name; a broken link counts."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass  # reported when it is opened
    return True
