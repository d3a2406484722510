"""The table of levels: the format or method of each part of training at each level.

A cell of the table is one choice, such as the format of Adam's first moment. A level fills every cell; a
flag named after the cell overrides one of them. O0 is not in the table: it installs nothing.

    cell                 the choice                                         bytes a parameter
    gemm                 the three GEMMs of qkv, proj, fc1 and fc2
    grad_accum           weight gradient while micro-batches add to it      4 fp32, 2 bf16, 1 + 1/128 fp8
    grad_reduce          weight gradient between data-parallel ranks        4 fp32, 1 + 1/128 block, 1 shared
    exp_avg, exp_avg_sq  Adam's moments                                     4 fp32, 2 fp16 or bf16, 1 fp8
    master               the weight that Adam updates                       4 fp32, 2 remainder, ...
    weight               the weight in the model and in its all-gather      2 bf16, 1 fp8
    tp_gather            tensor/sequence-parallel all-gather of activations and their gradients
    tp_reduce_scatter    tensor/sequence-parallel reduce-scatter, or all-reduce
    partition            how weights are split over data-parallel ranks

No other code decides by a level's name: it calls `is_stock`, or reads the cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from .flag import Flag, one_of

LEVELS = ("O0", "O1", "O2", "O3")
STOCK, LOWEST = LEVELS[:2]
LEVEL = Flag(
    "--fp8-level",
    "How much of the run is FP8. O0, the default, is stock Megatron-LM, bit for bit.",
    one_of(*LEVELS),
)


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        name: of the cell, and of its field in Fp8Config.
        meaning: one line for --help and docs/flags.md.
        levels: the values at O1, O2 and O3.
        available: all values.
    """

    name: str
    meaning: str
    levels: tuple[str, str, str]
    available: tuple[str, ...]

    @property
    def dest(self) -> str:
        """Its name in the parsed arguments: fp8_grad_accum."""
        return f"fp8_{self.name}"

    @property
    def flag(self) -> str:
        """The flag that overrides the cell: --fp8-grad-accum."""
        return "--" + self.dest.replace("_", "-")

    def at(self, level: str) -> str:
        """The value at `level` (O1, O2 or O3)."""
        return self.levels[LEVELS.index(level) - 1]


CELLS = (
    Cell(
        "gemm",
        "GEMMs of the four linears: FP8, or BF16 as an ablation (the FP8 scaling flags then have no effect)",
        ("fp8", "fp8", "fp8"),
        available=("fp8", "bf16"),
    ),
    Cell(
        "grad_accum",
        "storage of the weight gradient between micro-batches; auto: FP8 for one micro-batch a step, BF16 for more",
        ("auto", "auto", "auto"),
        available=("auto", "fp8", "bf16", "fp32"),
    ),
    Cell(
        "grad_reduce",
        "reduction of the weight gradient over data-parallel ranks: block (FP8 blocks, one FP32 sum), shared (FP8-LM's "
        "shared scale and FP8 sum), or fp32 (ablation)",
        ("block", "block", "block"),
        available=("block", "shared", "fp32"),
    ),
    Cell("exp_avg", "Adam's first moment", ("fp32", "fp8", "fp8"), ("fp32", "bf16", "fp8")),
    Cell(
        "exp_avg_sq",
        "Adam's second moment; fp8 stores its root, and rounding then stops its slow decay",
        ("fp32", "fp16", "fp16"),
        ("fp32", "fp16", "fp8"),
    ),
    Cell(
        "master",
        "master weight: a copy, or the stored weight plus a 16-bit remainder",
        ("fp32", "remainder", "remainder"),
        available=("fp32", "remainder", "fp16", "bf16", "fp8"),
    ),
    Cell(
        "weight",
        "stored weight, and its data-parallel gather",
        ("bf16", "bf16", "fp8"),
        available=("bf16", "fp8"),
    ),
    Cell(
        "tp_gather",
        "sequence-parallel all-gather of activations, and of their gradients",
        ("bf16", "bf16", "fp8"),
        available=("bf16", "fp8"),
    ),
    Cell(
        "tp_reduce_scatter",
        "tensor/sequence-parallel sums of partial products: fp8 (FP8 blocks, one FP32 sum), or that in one pass only",
        ("bf16", "bf16", "bf16"),
        available=("bf16", "fp8", "forward", "backward"),
    ),
    Cell(
        "partition",
        "how the weights are split over the data-parallel ranks",
        ("even", "even", "even"),
        available=("even", "greedy"),
    ),
)

CELL_FLAGS = tuple(
    Flag(
        cell.flag,
        f"{cell.meaning}. By level: {' '.join(f'{level} {cell.at(level)}' for level in LEVELS[1:])}.",
        one_of(*cell.available),
        cell.name,
    )
    for cell in CELLS
)
FLAGS = (LEVEL, *CELL_FLAGS)


def is_stock(level: str | None) -> bool:
    """Whether a run with this --fp8-level (None: not given) is stock Megatron, unless it emulates."""
    return level in (None, STOCK)


def resolve(level: str, overrides: Mapping[str, str | None]) -> dict[str, str]:
    """Fill every cell.

    Args:
        level: O1, O2 or O3.
        overrides: {cell name: value, or None to take the level's}.

    Returns:
        {cell name: value}, every value available.

    Raises:
        UserError: an unknown level, or an unknown value.
    """
    if level not in LEVELS[1:]:
        raise UserError(f"--fp8-level {level}: there is no such level; use one of {', '.join(LEVELS)}")
    values = {c.name: overrides.get(c.name) or c.at(level) for c in CELLS}
    for cell in CELLS:
        value = values[cell.name]
        if value not in cell.available:
            raise UserError(f"{cell.flag} {value}: no such value (available: {', '.join(cell.available)})")
    return values
