"""S3 in a late state: the jumps of S3 at the MLPs of a model that was trained for long, `--late DIR`.

Late in training a SwiGLU's gate and up rows align, and single channels of fc2's input become hundreds of times as large
as the rest (arXiv 2409.12517). No training of minutes reaches that. So the weights of three layers come from a Hugging
Face folder of Llama's form: a sixth and a third of the way, and the last but one. Their inputs are normal numbers, as a
norm would hand them on, times its gain:

    x ~ N(0, 1) * gain        h = silu(Wg x) * (Wu x)        judged: the error of h W2^T, as in S3

Inputs of text are not normal: the rest of the model would be needed for them.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from ...errors import UserError
from ...packages import installed, needs
from .drawing import bars
from .jumps import LIMITS, PERIOD, errors
from .network import TOY, device, size
from .suite import JUDGED, Found, Point, Stress

NAME = "S3-late"
JUMPS = {"as they come": 1.0, "jump of 4": 4.0}
BATCHES = 2 * PERIOD


def layers(folder: Path) -> dict[str, tuple[torch.Tensor, ...]]:
    """{layer: gain (H,), gate (F, H), up (F, H), down (H, F)}, FP32. Raises UserError for another kind of folder."""
    if not installed("safetensors"):
        raise UserError(f"--late {folder}: {needs('safetensors')}")
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise UserError(f"--late {file}: damaged, or not a safetensors file: {error}") from None
    count = len({name.split(".")[2] for name in where if name.startswith("model.layers.")})
    found = {}
    for layer in sorted({count // 6, count // 3 + 1, count - 2}):
        names = [f"model.layers.{layer}.{part}.weight" for part in _PARTS]
        if count < 3 or not all(name in where for name in names):
            raise UserError(f"--late {folder}: no model of Llama's form; name a folder with its model*.safetensors")
        read = tuple(_read(where[name], name) for name in names)
        found[f"width {len(read[0])}, layer {layer} of {count}"] = read
    return found


_PARTS = "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name).float().to(device())


def measure(folder: Path, seed: int) -> Iterator[Found]:
    torch.manual_seed(seed)
    tokens = 1024 if size() is TOY else 4096
    for layer, (gain, gate, up, down) in layers(folder).items():
        inputs = []
        for _ in range(BATCHES):
            x = torch.randn(tokens, len(gain), device=device()) * gain
            inputs.append((torch.nn.functional.silu(x @ gate.T) * (x @ up.T)).bfloat16())
        for case, k in JUMPS.items():
            for arm, worst in errors(inputs, down, k).items():
                yield Found(arm, f"{layer}, {case}", k, JUDGED, worst)


def draw(points: list[Point]):
    caption = f"{NAME}: error of fc2's product in the worst batch, a dot a seed"
    return bars("s3-late", points, JUDGED, "% of the product", caption, _limits(points))


def _limits(points: list[Point]) -> dict[str, float]:
    cases = {point.found.case for point in points}
    return {case: LIMITS[case.rpartition(", ")[2]] for case in cases}


def stress(folder: Path | None, points: list[Point]) -> Stress:
    """It. folder: of the weights, to measure; points: of the store, whose layers are judged."""
    return Stress(
        NAME,
        "Jumps in a late state",
        "The MLPs of a model that was trained for long, with normal inputs, cast with scales of earlier batches. "
        "Judged: the worst batch's error of fc2's product, as they come (at most 5 %), and if four elements become "
        "four times the largest of the batch before (at most 10 %).",
        _limits([point for point in points if point.stress == NAME]),
        "% of the product",
        functools.partial(measure, folder or Path()),
        draw,
    )
