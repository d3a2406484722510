"""The demo's picture: the noise of O0's seeds, and each level in its colour."""

import re

import demo
import pytest
from launch import Step

from megatron_fp8.flags.level import LEVELS
from megatron_fp8.tools.palette import COLOURS


def test_the_noise_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    names = [*LEVELS, *map(demo.again, demo.SEEDS[1:])]
    curves = {name: [Step(step, 5 - step / 10 + i / 50, 1.0, 0, 9.0) for step in range(1, 9)]
              for i, name in enumerate(names)}  # fmt: skip
    results = {name: {"heldout_loss": 2 + i / 50} for i, name in enumerate(names)}
    demo.plot(curves, results, tmp_path / "loss.svg")
    svg = (tmp_path / "loss.svg").read_text()
    assert "O0, 4 seeds" in svg and "the noise: spread of O0's 4 seeds" in svg
    assert {COLOURS[level] for level in LEVELS} <= {*re.findall(r"#[0-9a-f]{6}", svg)}
    assert "#1f77b4" not in svg  # matplotlib's own first colour
