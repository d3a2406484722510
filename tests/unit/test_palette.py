"""A level has one colour in all figures, and no two lines of a figure look the same."""

import itertools

from megatron_fp8.flags.level import LEVELS
from megatron_fp8.tools.palette import COLOURS, level_in, looks


def test_a_level_has_one_colour_whatever_stands_beside_it():
    assert set(LEVELS) <= COLOURS.keys() and len({COLOURS[level] for level in LEVELS}) == len(LEVELS)
    for names in itertools.permutations([*LEVELS, "TE", "before.jsonl"], 3):
        for name, look in looks(names).items():
            assert name not in COLOURS or look["color"] == COLOURS[name]


def test_the_level_is_a_word_of_the_name():
    for name, level in {
        "O3.jsonl": "O3", "o3_seed_2.log": "O3", "O0, TE": "O0", "our O2": "O2", "bf16": "BF16", "te-delayed": "TE",
        "before.jsonl": None, "E7M7 scaled": None, "SO3": None, "O31": None, "": None,
    }.items():  # fmt: skip
        assert level_in(name) == level, name


def test_lines_of_a_figure_differ():
    names = ["O0", "O0 seed 2", "O3", "BF16", *(f"run {i}" for i in range(20))]
    found = looks(names)
    assert len({tuple(look.values()) for look in found.values()}) == len(names)
    assert found["O0"]["color"] == found["BF16"]["color"] == found["O0 seed 2"]["color"]
    levels = {COLOURS["O0"], COLOURS["O3"]}
    assert not levels & {look["color"] for name, look in found.items() if name.startswith("run")}
