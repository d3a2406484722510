"""A Hugging Face folder of a Llama in the few bits of the GGUF file that it was made of, cut into parts to carry.

The parts are one compressed numpy file. Its arrays are named by kind and tensor, and hold the bytes of rows, in blocks:

    Q4_1   20 bytes for 32 numbers: FP16 d and m, then 16 bytes whose low halves are q of the first 16; d q + m
    Q8_0   34 bytes for 32 numbers: FP16 d, then signed bytes q; d q
    F32, BF16: a number

The first bytes of all blocks come first, then the second ones, and so on: bytes of one meaning lie together, so that
the file's entropy code fits them.

llama.cpp keeps the rows of Q and K in another order; they are put back, which quantized rows allow.
"""

import json
import shutil
from pathlib import Path

import numpy as np

MODEL, CONFIG = "model.npz.part", "config.json"
BLOCK = {"Q4_1": 20, "Q8_0": 34, "F32": 4, "BF16": 2}  # bytes


def unpacked(kind: str, raw: np.ndarray) -> np.ndarray:
    """FP32 (rows, numbers) of a tensor's stored bytes (rows, bytes of a row)."""
    if kind == "F32":
        return raw.view(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(len(raw), -1, BLOCK[kind])
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        values = d * blocks[..., 2:].view(np.int8).astype(np.float32)
    else:
        m = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
        q = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1).astype(np.float32)
        values = d * q + m
    return values.reshape(len(raw), -1)


def in_gguf(name: str) -> str:
    """llama.cpp's name of a tensor of a Hugging Face Llama."""
    words = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if (plain := name.removesuffix(".weight")) in words:
        return f"{words[plain]}.weight"
    number, _, part = plain.removeprefix("model.layers.").partition(".")
    part = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
            "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}[part]  # fmt: skip
    return f"blk.{number}.{part}.weight"


def pack_model(folder: Path, gguf_file: Path | None, out: Path, parts: int) -> None:
    """Write the folder's weights to out/0 .. out/parts-1, in the GGUF file's bits, or without one in BF16.

    Raises ValueError if the file's numbers are not the folder's.
    """
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / CONFIG).read_text())
    tensors, stored = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    if gguf_file is not None:
        from gguf import GGUFReader

        stored = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    packed = {}
    for name, tensor in tensors.items():
        if gguf_file is None:
            kind, raw = "BF16", tensor.view(torch.int16).numpy().view(np.uint8).reshape(len(tensor), -1)
        else:
            found = stored[in_gguf(name)]
            kind, raw = found.tensor_type.name, np.ascontiguousarray(found.data)
            raw = raw.view(np.uint8).reshape(len(tensor), -1)
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if part in name:  # its rows lie in pairs that are rotated together
                    raw = raw.reshape(config[heads], -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        raw = np.array(raw, order="C")
        values = torch.from_numpy(unpacked(kind, raw)).bfloat16().view(tensor.shape)
        if not torch.equal(values, tensor.bfloat16()):
            raise ValueError(f"{gguf_file}: {name} has other numbers than in {folder}")
        packed[f"{kind} {name}"] = raw.reshape(len(raw), -1, BLOCK[kind]).transpose(2, 0, 1)
    whole = out / "model.npz"
    np.savez_compressed(whole, **packed)
    data = whole.read_bytes()
    whole.unlink()
    for i in range(parts):
        (out / str(i)).mkdir(exist_ok=True)
        (out / str(i) / f"{MODEL}{i}").write_bytes(data[i * len(data) // parts : (i + 1) * len(data) // parts])


def unpack_model(inputs: list[Path], folder: Path) -> None:
    """Write a Hugging Face folder in BF16 of the parts. Raises ValueError if one is missing."""
    import torch
    from safetensors.torch import save_file

    files = sorted((file for path in inputs for file in path.glob(f"{MODEL}*")), key=lambda file: file.name)
    if [file.name for file in files] != [f"{MODEL}{i}" for i in range(len(files))] or not files:
        found = ", ".join(file.name for file in files) or "no part of the model"
        raise ValueError(f"--inputs: {found}; name the folders of all parts")
    folder.mkdir(parents=True)
    whole = folder / "model.npz"
    whole.write_bytes(b"".join(file.read_bytes() for file in files))
    tensors = {}
    with np.load(whole) as found:
        for key in found.files:
            kind, _, name = key.partition(" ")
            bytes_ = found[key]
            raw = np.ascontiguousarray(bytes_.transpose(1, 2, 0)).reshape(bytes_.shape[1], -1)
            values = torch.from_numpy(unpacked(kind, raw)).bfloat16()
            tensors[name] = values.flatten() if "norm" in name else values
    whole.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(one_of(inputs, CONFIG), folder / CONFIG)


def one_of(inputs: list[Path], name: str) -> Path:
    found = [path / name for path in inputs if (path / name).is_file()]
    if not found:
        raise ValueError(f"--inputs: no folder has {name}")
    return found[0]
