"""The line of the log that says what of a run is in FP8."""

import pytest
import torch
from engine_parts import OneWeight
from megatron.core.process_groups_config import ProcessGroupCollection
from test_config import O1

from megatron_fp8.engine.level_line import level_line
from megatron_fp8.flags.config import config_from_args


@pytest.fixture
def line_of(parse, group):
    """The line of a model of two layers' fc1, the second in BF16 where `kept`, with those flags."""
    def line_of(*flags: str, kept: bool = False) -> str:
        config = config_from_args(parse(*O1, *flags))
        chunk = torch.nn.ModuleList()
        chunk.pg_collection = ProcessGroupCollection(tp_ep_pp=group)
        for layer in (1, 2):
            linear = torch.nn.Module()
            linear.owned = OneWeight(torch.randn(16, 16).bfloat16(), group).weight
            linear.owned.layer_number, linear.owned.fp8 = layer, config.gemm == "fp8" and not (kept and layer == 2)
            chunk.append(linear)
        return level_line(config, [chunk], "cuBLASLt")

    return line_of


def test_levels(line_of):
    assert line_of("--fp8-level", "O3", "--fp8-grad-accum", "fp8", "--fp8-recipe", "tensorwise") == (
        "O3: the GEMMs of 2 of 2 linears are in FP8 (E4M3 and E5M2, tensorwise scales, by cuBLASLt); weights FP8; "
        "moments FP8 and FP16; masters 16 bits beside the weight; weight gradients FP8, summed over ranks in FP8 blocks"
    )


def test_exceptions(line_of):
    line = line_of(kept=True)
    assert line.startswith("O1: the GEMMs of 1 of 2 linears are in FP8 (E4M3 and E5M2, delayed scales, by cuBLASLt); ")
    assert "; in BF16 are decoder.layers.1.mlp.linear_fc1; " in line
    assert "; the LM head's are too; " in line_of("--fp8-lm-head")


def test_without_fp8_gemms(line_of):
    assert line_of("--fp8-gemm", "bf16").startswith("O1: the GEMMs of 0 of 2 linears are in FP8 (--fp8-gemm bf16); ")
    assert line_of("--fp8-emulate", "E8M3").startswith("the GEMMs of the linears are in BF16, their operands rounded: ")
