"""Names of linears in few words, for messages."""

import re
from collections.abc import Iterable


def ranges(names: Iterable[str]) -> str:
    """Names of linears in few words: "decoder.layers.0-3,7.mlp.linear_fc1 decoder.layers.0.mlp.linear_fc2"."""
    numbers: dict[tuple[str, str], list[int]] = {}
    words = []
    for name in names:
        if found := re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", name):
            numbers.setdefault((found[1], found[3]), []).append(int(found[2]))
        else:
            words.append(name)
    for (before, after), layers in numbers.items():
        runs: list[list[int]] = []
        for number in sorted(layers):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        shown = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        words.append(f"{before}{','.join(shown)}{after}")
    return " ".join(words)
