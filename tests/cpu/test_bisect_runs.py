"""Linears kept in BF16 (--fp8-bf16-layers), and the bisect that finds which to keep, in Megatron's real loop."""

import argparse

import pytest
from launch import RunFailed
from megatron_runs import TINY_GPT, run_megatron, start_forked

from megatron_fp8.tools.lab.trial import bisect

EXACT = "--fp8-level O1 --fp8-gemm bf16"


def run(flags: str, nproc: int = 1):
    return run_megatron(nproc, [*TINY_GPT, *flags.split()])


def kept(lines: list[str]) -> list[str]:
    return [line.partition("--fp8-bf16-layers: ")[2] for line in lines if "[fp8] --fp8-bf16-layers: " in line]


def bytes_a_weight(lines: list[str]) -> float:
    (line,) = [line for line in lines if "bytes a parameter on this rank" in line]
    return float(line.partition("weight ")[2].partition(",")[0])


@pytest.mark.slow
def test_all_linears_in_bf16_are_bf16_gemms():
    """For FP8, FP8 storage and emulation, with the LM head."""
    exact = run(EXACT)
    all_kept = run("--fp8-level O1 --fp8-bf16-layers *")
    assert all_kept.losses == exact.losses and all_kept.grad_norms == exact.grad_norms
    assert kept(all_kept.lines) == [
        "8 of 8 linears stay in BF16: decoder.layers.0-1.self_attention.linear_proj "
        "decoder.layers.0-1.self_attention.linear_qkv decoder.layers.0-1.mlp.linear_fc1 "
        "decoder.layers.0-1.mlp.linear_fc2"
    ]
    emulated = run(f"{EXACT} --fp8-emulate E8M1 --fp8-emulate-lm-head --fp8-bf16-layers *")
    assert emulated.losses == exact.losses


def test_stored_in_bf16_at_o3():
    """On two pipeline stages: all linears of the first, and one of the second."""
    stored = run("--fp8-level O3 --pipeline-model-parallel-size 2 --fp8-bf16-layers decoder.layers.0.*,*.1.mlp.*fc1 "
                 "--micro-batch-size 4", 2)  # fmt: skip
    assert kept(stored.lines) == [
        "5 of 8 linears stay in BF16: decoder.layers.0.self_attention.linear_proj "
        "decoder.layers.0.self_attention.linear_qkv decoder.layers.0-1.mlp.linear_fc1 decoder.layers.0.mlp.linear_fc2"
    ]
    assert bytes_a_weight(stored.lines) == 2
    assert stored.losses[-1] < stored.losses[0] - 0.3


@pytest.mark.slow
def test_bytes_of_a_layer_at_o3():
    whole, one = run("--fp8-level O3"), run("--fp8-level O3 --fp8-bf16-layers decoder.layers.1.*")
    ours = 4 * 64 * 64 + 3 * 64 * 128  # one byte more for each of these
    assert bytes_a_weight(one.lines) - bytes_a_weight(whole.lines) == pytest.approx(ours / 115_008, abs=0.01)


@pytest.mark.slow
def test_emulation_of_the_others():
    """Two spellings of the same."""
    given = run("--fp8-emulate E8M2 --fp8-emulate-layers *.linear_fc2,*.linear_qkv").losses
    assert given == run("--fp8-emulate E8M2 --fp8-bf16-layers *.linear_fc1,*.linear_proj").losses
    first = run("--fp8-emulate E8M2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0").losses
    assert first == run("--fp8-emulate E8M2 --fp8-emulate-layers decoder.layers.1.*").losses


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--fp8-level O1 --fp8-bf16-layers *.linear_fc1,decoder.layers.2.*", "--fp8-bf16-layers decoder.layers.2.*"),
        pytest.param(
            *("--fp8-emulate E8M3 --fp8-emulate-layers *.fc1,layers.*", "--fp8-emulate-layers *.fc1,layers.*"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_one_line(flags, line):
    with pytest.raises(RunFailed) as failed:
        run(flags)
    said = [text for text in str(failed.value).splitlines() if text.startswith("megatron_fp8: ")]
    assert said[0].startswith(f"megatron_fp8: {line}: matches none of the model's linears, decoder.layers.0-1.")
    assert "Traceback" not in str(failed.value)


@pytest.mark.slow
def test_a_planted_culprit_is_found(tmp_path, capsys, monkeypatch):
    start_forked(monkeypatch)
    flags = "--num-layers 4 --fp8-emulate activation=E8M1 --fp8-emulate-layers decoder.layers.1.mlp.linear_fc2"
    folder = ["--folder", str(tmp_path), "--steps", "3"]
    parser = argparse.ArgumentParser()
    bisect.add_arguments(parser)
    args = parser.parse_args([*folder, "--", "pretrain_gpt_fp8.py", *TINY_GPT, *flags.split()])
    assert bisect.run(args) == 0
    out = capsys.readouterr().out
    assert "1 of 16 linears in BF16 remove 100% of the gap of loss:" in out, out
    assert "\n--fp8-bf16-layers decoder.layers.1.mlp.linear_fc2\n" in out, out
    assert len(list((tmp_path / "runs").iterdir())) <= 3 + 8
