"""The search of a bisect: find a few linears whose return to BF16 removes most of a gap.

Each run tells the share of the gap that a set of linears removes. A set is enough if that share reaches the target;
subsets of a set that is not enough are assumed not to be enough either. From a set that is enough, blocks are left out:
halves first, then halves of the rest, down to single units, as long as the rest is still enough. k culprits among n
units cost at most 2 k log2(n) runs. Units are first the kinds of linears, over all layers (a fault of linear_fc2 may be
in each layer), then the layers, then single linears. If every part contributes to the gap, nothing can be left out, and
trying that costs n runs. So the search ends after three halvings in a row that leave nothing out.

After Zeller and Hildebrandt's delta debugging (IEEE TSE 28, 2002), which leaves out parts of a failing input.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from ....flags.emulate import matches

Units = list[list[str]]  # the linears of one unit stay or go together
_PATIENCE = 3  # halvings that leave nothing out


def search(linears: Sequence[str], share: Callable[[frozenset[str]], float], target: float) -> list[str]:
    """A small set of linears whose return to BF16 removes at least the share `target` of the gap.

    Args:
        linears: whole paths, in the model's order; together they are enough.
        share: the share of the gap that a set removes; it may be called twice for one set.
        target: above 0.
    """

    too_few: list[frozenset[str]] = []

    def enough(units: Units) -> bool:
        chosen = frozenset(name for unit in units for name in unit)
        if any(chosen <= others for others in too_few):
            return False
        if share(chosen) < target:
            too_few.append(chosen)
            return False
        return True

    kept = list(linears)
    for key in (kind_of, layer_of):
        units, complete = _leave_out(grouped(kept, key), enough)
        kept = [name for name in kept if any(name in unit for unit in units)]
        if not complete:
            return kept
    if len(kept) < len(linears):
        units, _ = _leave_out([[name] for name in kept], enough)
        kept = [name for unit in units for name in unit]
    return kept


def _leave_out(units: Units, enough: Callable[[Units], bool]) -> tuple[Units, bool]:
    """The units that are needed, and whether the halving was completed (else it left nothing out too often)."""
    blocks, in_vain = [units], 0
    while any(len(block) > 1 for block in blocks):
        if in_vain == _PATIENCE:
            return [unit for block in blocks for unit in block], False
        blocks = [half for block in blocks for half in _halves(block)]
        before = len(blocks)
        for block in list(blocks):
            rest = [other for other in blocks if other is not block]
            if rest and enough([unit for other in rest for unit in other]):
                blocks = rest
        in_vain = in_vain + 1 if len(blocks) == before else 0
    return [unit for block in blocks for unit in block], True


def _halves(block: Units) -> list[Units]:
    middle = (len(block) + 1) // 2
    return [half for half in (block[:middle], block[middle:]) if half]


def grouped(linears: Iterable[str], key: Callable[[str], Hashable]) -> Units:
    """The linears of each key together, in order of first appearance."""
    found: dict[Hashable, list[str]] = {}
    for name in linears:
        found.setdefault(key(name), []).append(name)
    return list(found.values())


def _parts(name: str) -> tuple[str, int, str]:
    """("decoder.layers.", 3, ".mlp.linear_fc1") of decoder.layers.3.mlp.linear_fc1; else (name, -1, "")."""
    found = re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", name)
    return (found[1], int(found[2]), found[3]) if found else (name, -1, "")


def kind_of(name: str) -> str:
    """The part of a linear's name that is the same in every layer: ".mlp.linear_fc1"."""
    return _parts(name)[2]


def layer_of(name: str) -> tuple[str, int]:
    """The layer that contains a linear."""
    return _parts(name)[:2]


def in_order(linears: Iterable[str]) -> list[str]:
    """Linears by block and layer; those of a layer keep their order."""
    return sorted(linears, key=layer_of)


def patterns(chosen: Iterable[str], linears: Sequence[str]) -> str:
    """Shell patterns, separated by commas, that match those chosen and no others of `linears`."""
    chosen = set(chosen)
    if chosen == set(linears):
        return "*"
    words = []
    for members in grouped(linears, lambda name: _parts(name)[0]):
        words += _of_block(members, [name for name in members if name in chosen])
    found = {name for name in linears if matches(tuple(words), name)}
    return ",".join(words if found == chosen else [name for name in linears if name in chosen])


def _of_block(members: list[str], chosen: list[str]) -> list[str]:
    """Patterns for a block's chosen linears: whole kinds, then whole layers, then the rest."""
    before, first, _ = _parts(members[0])
    if first < 0:
        return chosen
    left, words = set(chosen), []
    for kind in grouped(members, kind_of):
        if left.issuperset(kind):
            words.append(f"{before}*{kind_of(kind[0])}")
            left.difference_update(kind)
    chosen_layers = [layer for layer in grouped(members, layer_of) if set(chosen).issuperset(layer)]
    whole = [layer for layer in chosen_layers if left.intersection(layer)]
    words += [f"{before}{number}.*" for number in _globs(_parts(layer[0])[1] for layer in whole)]
    left.difference_update(name for layer in whole for name in layer)
    for kind in grouped((name for name in members if name in left), kind_of):
        words += [f"{before}{number}{kind_of(kind[0])}" for number in _globs(_parts(name)[1] for name in kind)]
    return words


def _globs(numbers: Iterable[int]) -> list[str]:
    """Patterns for whole numbers, one for each ten: [8, 9, 10, 12] give "[89]" and "1[02]"."""
    tens: dict[int, list[int]] = {}
    for number in sorted(numbers):
        tens.setdefault(number // 10, []).append(number % 10)
    words = []
    for ten, digits in tens.items():
        in_a_row = len(digits) > 2 and digits == list(range(digits[0], digits[-1] + 1))
        shown = f"{digits[0]}-{digits[-1]}" if in_a_row else "".join(map(str, digits))
        words.append(f"{ten or ''}{shown if len(digits) == 1 else f'[{shown}]'}")
    return words
