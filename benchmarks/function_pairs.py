"""Functions of Python's standard library, and the same with one mistake: preferences whose labels are facts.

A document is a prompt (module, the function's signature and docstring) and an answer, the rest of its body. The
rejected answer is the true one with one place changed in the syntax tree:

    <  and  >        a comparison is turned (also <= and >=, == and !=)
    +  and  -        a sum becomes a difference
    and, or          a condition is joined otherwise
    True, False      a constant is its opposite
    7 -> 8, 7 -> 6   an integer of one digit is off by one
    f(a, b)          two neighbouring arguments change places

Both answers have the same number of tokens, so a longer one cannot give itself away. A changed function may by chance
do the same. Functions of one file are all for training, or all held out.
"""

import ast
import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "__pycache__", "lib2to3")
HELD_OUT = 0.25  # share of the files
OPPOSITE = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "==", "+": "-", "-": "+", "and": "or",
            "or": "and", "True": "False", "False": "True"}  # fmt: skip
TURNED = (ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.Eq, ast.NotEq)
LARGEST = 20_000  # characters of a function


@dataclass(frozen=True)
class Function:
    """module: dotted. prompt: signature and docstring. body: the rest, as it stands in the file."""

    module: str
    prompt: str
    body: str
    held_out: bool


def functions(folder: Path | None = None) -> Iterator[Function]:
    """Those of the .py files below a folder (the standard library's), in the order of their paths."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if set(inside.parts) & set(LEFT_OUT):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        digest = hashlib.sha256(module.encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (found := _cut(node, lines)):
                yield Function(module, *found, held_out)


def _cut(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """(prompt, body) of a function whose body begins on a line of its own and has two lines or more."""
    first = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not first:
        return None
    begins = getattr(first[0], "decorator_list", None) or [first[0]]
    start = min(part.lineno for part in begins) - 1
    before = node.body[0].end_lineno - 1 if first is not node.body else node.lineno - 1
    if start <= before or node.end_lineno - start < 2:
        return None
    prompt, body = "".join(lines[node.lineno - 1 : start]), "".join(lines[start : node.end_lineno])
    return (prompt.rstrip("\n"), body.rstrip("\n")) if len(prompt) + len(body) < LARGEST else None


def mutations(body: str) -> list[str]:
    """The bodies with one mistake, each parsed like the true one."""
    head = "async def f():\n"  # any body may stand in it, await too
    data = (head + body).encode()
    try:
        tree = ast.parse(data)
    except SyntaxError:
        return []
    starts = [0]  # of each line, in bytes, as ast counts columns
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    changed = []
    for node in ast.walk(tree):
        for first, last, new in _places(node, data, lambda line, column: starts[line - 1] + column):
            changed.append((data[len(head) : first] + new + data[last:]).decode())
    return changed


def _places(node: ast.AST, data: bytes, at: Callable[[int, int], int]) -> Iterator[tuple[int, int, bytes]]:
    """(start, stop, other bytes) of each mistake that a node allows."""

    def span(part) -> tuple[int, int]:
        return at(part.lineno, part.col_offset), at(part.end_lineno, part.end_col_offset)

    def operator(left, right) -> Iterator[tuple[int, int, bytes]]:
        start, stop = span(left)[1], span(right)[0]
        between = data[start:stop]
        word = between.strip(b" ()\\\n").decode()
        if word in OPPOSITE:
            first = start + between.index(word.encode())
            yield first, first + len(word), OPPOSITE[word].encode()

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], TURNED):
        yield from operator(node.left, node.comparators[0])
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield from operator(*node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from operator(node.left, node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield *span(node), OPPOSITE[str(node.value)].encode()
    elif isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 9:
        if len(data[slice(*span(node))]) == 1:
            for value in {node.value - 1, node.value + 1} & set(range(10)):
                yield *span(node), str(value).encode()
    elif isinstance(node, ast.Call):
        for left, right in zip(node.args, node.args[1:], strict=False):
            (a, b), (c, d) = span(left), span(right)
            if data[a:b] != data[c:d] and not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                yield a, d, data[c:d] + data[b:c] + data[a:b]


@dataclass(frozen=True)
class Documents:
    """Tokens of prompts, true answers and wrong ones (empty if there is none of equal length): of each function."""

    prompts: list[np.ndarray]
    chosen: list[np.ndarray]
    rejected: list[np.ndarray]
    held_out: np.ndarray

    def save(self, path: Path) -> None:
        """In one compressed file of 16-bit numbers."""
        arrays = {"held_out": self.held_out}
        for name in ("prompts", "chosen", "rejected"):
            parts = getattr(self, name)
            arrays[name] = np.concatenate(parts).astype(np.uint16)
            arrays[f"{name}_ends"] = np.cumsum([len(part) for part in parts])
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Documents":
        with np.load(path) as found:
            parts = [np.split(found[name], found[f"{name}_ends"][:-1]) for name in ("prompts", "chosen", "rejected")]
            return cls(*parts, found["held_out"])


def documents(
    found: Iterator[Function],
    encode: Callable[[str], list[int]],
    turn: Callable[[str, str], tuple[str, str]],
    most: int,
) -> Documents:
    """Tokenize functions. Raises ValueError if none is short enough.

    encode: a text's tokens, below 65,536.
    turn: (a module, a prompt) -> (all that stands before the answer, all that stands after it).
    most: tokens of a prompt with its answer; longer ones are left out.

    The mistake of a function is drawn with a seed that its text gives.
    """
    lists: tuple[list, list, list, list] = ([], [], [], [])
    for function in found:
        before, after = turn(function.module, function.prompt)
        prompt, answer = encode(before), encode(function.body + after)
        if len(prompt) + len(answer) > most:
            continue
        wrong = mutations(function.body)
        random.Random(function.body).shuffle(wrong)
        tokens = (encode(text + after) for text in wrong[:8])
        rejected = next((ids for ids in tokens if len(ids) == len(answer) and ids != answer), [])
        for values, one in zip(lists, (prompt, answer, rejected, function.held_out), strict=True):
            values.append(one)
    prompts, chosen, rejected, held_out = lists
    if not prompts:
        raise ValueError(f"no function of at most {most} tokens")
    as_arrays = ([np.array(ids, dtype=np.uint16) for ids in ids_of] for ids_of in (prompts, chosen, rejected))
    return Documents(*as_arrays, np.array(held_out))
