"""Reads a YAML file within bounds, with libyaml if PyYAML has it. All of the project's YAML is read here.

A file may come from another user. So three things are bounded: its size, before it is parsed; its depth, because PyYAML
and libyaml recurse, and a deep file ends the process; and the number of its values with aliases written out, because a
few lines of `<<: [*a, *a]` that refer to one another can exceed the memory. Depth and values are counted on libyaml's
stream of events, before any object is built.
"""

import functools
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ..errors import UserError, is_bug

LARGEST = 2**20  # bytes; this repository's largest file has 3,000
DEEPEST = 50
MOST_VALUES = 100_000


def load_yaml(path: str | Path, place: str = "", remedy: str = "give a YAML file", loader: type | None = None) -> Any:
    """A file's content, constructed by `loader` (`safe_loader()`, or a subclass).

    Raises UserError of one line, which begins with `place` (default: the path).
    """
    place = place or str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)  # a pipe has no size
            size = max(Path(path).stat().st_size, len(content))
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}; {remedy}") from None
    if len(content) > LARGEST:
        said = f"{size:,} bytes" if size > len(content) else f"more than {LARGEST:,} bytes"
        raise UserError(f"{place}: {said}; a YAML file may have {LARGEST:,}: split it, or {remedy}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text, from byte {error.start} on; {remedy}") from None
    loader = loader or safe_loader()
    try:
        _check_bounds(text, loader)
        return _construct(text, loader)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except Exception as error:  # a YAMLError; or any other, from a tag that does not fit: !!timestamp x
        if is_bug(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{place}: not YAML: {said}") from None


def _construct(text: str, loader: type) -> Any:
    import yaml

    return yaml.load(text, loader)


def _check_bounds(text: str, loader: type) -> None:
    """Raise UserError if the objects would need too much memory or too deep a recursion."""
    import yaml

    sizes: dict[str, int] = {}  # {anchor: values} of each anchored node that is complete
    open_: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, values so far) of the document and each open node
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.events.CollectionStartEvent):
            open_.append((event.anchor, 1))
            sizes.pop(event.anchor, None)
            if len(open_) > DEEPEST:
                raise UserError(f"values are nested more than {DEEPEST} deep; a few levels are enough")
            continue
        if isinstance(event, yaml.events.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 0)
            if not size and event.anchor in (name for name, _ in open_):
                raise UserError(f"*{event.anchor} stands inside &{event.anchor}; write its value out")
        elif isinstance(event, yaml.events.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.events.CollectionEndEvent):
            anchor, size = open_.pop()
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        enclosing, before = open_[-1]
        open_[-1] = enclosing, before + size
        if before + size > MOST_VALUES:
            raise UserError(f"more than {MOST_VALUES:,} values, with its aliases written out; leave some out")


@functools.cache
def safe_loader() -> type:
    """PyYAML's safe loader, on libyaml if PyYAML was built with it (its wheels are). It refuses a duplicate key."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """With the stock loader the last of two equal keys wins: a flag or an arm would be silently lost."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.seen: set[int] = set()

        def flatten_mapping(self, node):
            """Check a mapping's keys, on the first call for it only: a merge (<<) then adds other keys to its own."""
            if id(node) not in self.seen:
                self.seen.add(id(node))
                found = set()
                for key, _ in node.value:
                    value = self.construct_object(key, deep=True) if key.tag != "tag:yaml.org,2002:merge" else "<<"
                    if isinstance(value, Hashable):
                        if value in found:
                            raise UserError(f"{value}: is given twice; give it once")
                        found.add(value)
            super().flatten_mapping(node)

    return Loader
