"""The table of levels is consistent, and `resolve` reads it correctly."""

import pytest

from megatron_fp8.flags.level import CELLS, LEVELS, resolve

FIRST = {  # O1 of the design
    "gemm": "fp8",
    "grad_accum": "auto",
    "grad_reduce": "block",
    "exp_avg": "fp32",
    "exp_avg_sq": "fp32",
    "master": "fp32",
    "weight": "bf16",
    "tp_gather": "bf16",
    "tp_reduce_scatter": "bf16",
    "partition": "even",
}


def test_every_value_of_a_level_is_known():
    for cell in CELLS:
        assert len(set(cell.available)) == len(cell.available)
        assert set(cell.levels) <= set(cell.available)


def test_names():
    assert len({c.name for c in CELLS}) == len(CELLS)
    cell = next(c for c in CELLS if c.name == "exp_avg_sq")
    assert (cell.dest, cell.flag, cell.at("O1"), cell.at("O3")) == (
        "fp8_exp_avg_sq",
        "--fp8-exp-avg-sq",
        "fp32",
        "fp16",
    )


def test_o1():
    assert resolve("O1", {}) == FIRST
    assert resolve("O1", dict.fromkeys(FIRST)) == FIRST


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_level_fills_every_cell(level):
    assert resolve(level, {}) == {c.name: c.at(level) for c in CELLS}


@pytest.mark.parametrize(
    "cell, value",
    [
        ("gemm", "bf16"),
        ("gemm", "fp8"),
        ("grad_reduce", "fp32"),
        ("grad_reduce", "shared"),
        ("grad_accum", "bf16"),
        ("grad_accum", "fp8"),
    ],
)
def test_override(cell, value):
    assert resolve("O1", {cell: value}) == {**FIRST, cell: value}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_only_available_values_pass(cell):
    for value in cell.available:
        assert resolve("O1", {cell.name: value})[cell.name] == value
    with pytest.raises(ValueError) as error:
        resolve("O1", {cell.name: "int4"})
    assert str(error.value) == f"{cell.flag} int4: no such value (available: {', '.join(cell.available)})"


@pytest.mark.parametrize("name", ["O4", "o1", "", "O0", "1"])
def test_unknown_level(name):
    with pytest.raises(ValueError, match=rf"^--fp8-level {name}: .*use one of O0, O1, O2, O3$"):
        resolve(name, {})
