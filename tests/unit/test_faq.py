"""docs/faq.md quotes lines of the log and errors as the code writes them."""

import ast
import functools
import re

import pytest
from commands import MODEL, O1, error_of
from launch import ROOT

from megatron_fp8.flags.config import adapt_stock_args, config_from_args

QUOTED = [
    line.strip()
    for block in re.findall(r"^ *```\n(.*?)^ *```", (ROOT / "docs/faq.md").read_text(), re.M | re.S)
    for line in block.splitlines()
]
REFUSED = {  # the flags of the lines that config_from_args writes
    "--use-megatron-fsdp": "--use-megatron-fsdp --use-distributed-optimizer",
    "--optimizer muon": "--optimizer muon",
    "--fp8-recipe blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "--fp16": "--fp16",
}
ADAPTED = "[fp8] --transformer-impl transformer_engine: "
SHORT = 4  # characters: what stands between two parts of a line


@functools.cache
def constants() -> str:
    """All strings of the package's code but docstrings, a zero byte between two."""
    found = []
    for path in (ROOT / "megatron_fp8").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs)
        found += [node.value for node in constants if isinstance(node.value, str)]
    return "\0".join(found)


def is_made_of(text: str, known: str, least: int = 14) -> bool:
    """Whether a text is parts of `known`, each of `least` characters or more, as a line of an f-string is."""
    while len(text) > SHORT:
        end = len(text)
        while text[:end] not in known:
            end -= 1
        if end < min(least, len(text)):
            return False
        text = text[end:]
    return True


def test_lines_of_stock_flags(parse):
    lines = [line.removeprefix("megatron_fp8: ") for line in QUOTED if line.startswith("megatron_fp8: ")]
    refused = [(line, flags) for line in lines for start, flags in REFUSED.items() if line.startswith(f"{start}: ")]
    assert len(refused) == len(REFUSED)
    for line, flags in refused:
        assert error_of(config_from_args, parse(*MODEL, "--fp8-level", "O3", *flags.split())) == line
    (adapted,) = (line for line in QUOTED if line.startswith(ADAPTED))
    args = parse(*O1, "--transformer-impl", "transformer_engine")
    assert adapted.removeprefix("[fp8] ") in adapt_stock_args(args, config_from_args(args))


def test_other_lines_are_in_the_code():
    known, looked_at = constants(), 0
    starts = (ADAPTED, *(f"megatron_fp8: {start}: " for start in REFUSED))
    for line in QUOTED:
        if not line.startswith(starts):
            said = re.sub(r"^(?:\[fp8\]|megatron_fp8:) ", "", line)
            for part in filter(None, (re.sub(r"^--[\w-]+|^O3: ", "", one.strip()) for one in said.split("..."))):
                looked_at += 1
                assert is_made_of(part, known), (line, part)
    assert looked_at > 12


@pytest.mark.parametrize("text", ["the GEMMs of all linears are in FP8", "no CUDA device at all, sorry"])
def test_what_the_code_does_not_say_is_found(text):
    assert not is_made_of(text, constants())
